"""What the CPU kernels derive from a step's metadata: once a step, then used by every layer."""

from dataclasses import dataclass, field

import numpy as np
import torch

from kernels.metadata import AttentionMetadata

MAX_GATHERED_TOKENS = 4096
"""Most tokens that one decode group copies out of the cache: bounds the scratch memory and keeps it near the cores."""

QUERY_TILE = 128
"""Most queries that attend in one call. A tile stops at its own last key, so a prompt costs about half its square."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a plan depends on besides the metadata; layers that agree in it share a plan."""

    block_size: int
    num_kv_heads: int
    window: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Requests with one query each and contexts of about the same length, padded to kv_len keys.

    rows: i64[B], into the step's tokens. runs: i64[B * KVH * kv_len / block_size], into the cache seen as
    [num_blocks * KVH, block_size * D]. unused: i64, those of the B * KVH * kv_len gathered keys that aren't the
    request's own. mask: [B, 1, 1, kv_len], -inf where unused or out of the window.
    """

    rows: torch.Tensor
    runs: torch.Tensor
    unused: torch.Tensor
    mask: torch.Tensor
    kv_len: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries rows start .. end of the step, which see the gathered keys first .. last (exclusive)."""

    start: int
    end: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ExtendRequest:
    """A request with several queries. runs: as in DecodeGroup, for B = 1."""

    runs: torch.Tensor
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """extend_mask: [tile, keys]. Its lower right corner stands for a tile's last query and key. It fits every tile of
    the step: what a query sees depends on its distance to the key only.
    """

    decodes: tuple[DecodeGroup, ...]
    extends: tuple[ExtendRequest, ...]
    extend_mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos, sin: float32[T, 1, rotary_dim], so that x * cos + roll(x, rotary_dim / 2) * sin turns x."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class WriteIndex:
    """Where the new keys and values go. kept: i64, the tokens that are written, or None for all."""

    blocks: torch.Tensor
    offsets: torch.Tensor
    kept: torch.Tensor | None


@dataclass(slots=True)
class Step:
    """Index tensors of one step, made when a layer first asks. Written by: itself."""

    meta: AttentionMetadata
    _plans: dict[AttentionShape, AttentionPlan] = field(default_factory=dict)
    _rotations: dict[int, tuple[torch.Tensor, Rotation]] = field(default_factory=dict)
    _writes: dict[int, WriteIndex] = field(default_factory=dict)

    def plan(self, shape: AttentionShape) -> AttentionPlan:
        if shape not in self._plans:
            self._plans[shape] = plan_attention(self.meta, shape)
        return self._plans[shape]

    def rotation(self, cos_sin: torch.Tensor) -> Rotation:
        """cos_sin: float32[max_position, rotary_dim]; a model has one or two such tables."""
        if id(cos_sin) not in self._rotations:
            cos, sin = cos_sin.index_select(0, self.meta.positions).unsqueeze(1).chunk(2, dim=-1)
            rotation = Rotation(torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))
            self._rotations[id(cos_sin)] = (cos_sin, rotation)  # holding the table keeps its id from being reused
        return self._rotations[id(cos_sin)][1]

    def write_index(self, block_size: int) -> WriteIndex:
        if block_size not in self._writes:
            slots, kept = self.meta.slot_mapping, None
            if bool((slots < 0).any()):
                kept = torch.nonzero(slots >= 0).squeeze(1)
                slots = slots[kept]
            blocks = torch.div(slots, block_size, rounding_mode="floor")
            self._writes[block_size] = WriteIndex(blocks, slots - blocks * block_size, kept)
        return self._writes[block_size]


def plan_attention(meta: AttentionMetadata, shape: AttentionShape) -> AttentionPlan:
    """Splits the step into decode groups and extends. A request's group and padding depend on its own length only."""
    starts, seq_lens = meta.query_start_loc.numpy(), meta.seq_lens.numpy()
    page_table = meta.page_table.numpy()
    query_lens = starts[1:] - starts[:-1]
    first_queries = seq_lens - query_lens
    first_keys = np.maximum(first_queries - shape.window + 1, 0) if shape.window > 0 else np.zeros_like(seq_lens)
    first_blocks = first_keys // shape.block_size
    num_blocks = -(-seq_lens // shape.block_size) - first_blocks

    groups: dict[int, list[int]] = {}
    extends = []
    for b in range(meta.num_requests):
        if query_lens[b] == 1:
            groups.setdefault(_padded(int(num_blocks[b]), shape.block_size), []).append(b)
        elif query_lens[b] > 1:
            last_block = first_blocks[b] + num_blocks[b]
            runs = _runs(page_table[b : b + 1, first_blocks[b] : last_block], shape.num_kv_heads)
            first_gathered = int(first_blocks[b]) * shape.block_size
            tiles = _tiles(int(starts[b]), int(query_lens[b]), int(first_queries[b]), first_gathered, shape.window)
            extends.append(ExtendRequest(runs, tiles))

    decodes = []
    for width, members in sorted(groups.items()):
        step = max(1, MAX_GATHERED_TOKENS // (width * shape.block_size))
        for i in range(0, len(members), step):
            some = np.array(members[i : i + step])
            columns = first_blocks[some, None] + np.arange(width)
            inside = np.arange(width) < num_blocks[some, None]
            blocks = page_table[some[:, None], np.where(inside, columns, 0)]  # padding reads some block, and is masked
            decodes.append(_decode_group(starts[some], seq_lens[some], first_blocks[some], blocks, shape))
    widest = max((tile.last - tile.first for extend in extends for tile in extend.tiles), default=0)
    return AttentionPlan(tuple(decodes), tuple(extends), _extend_mask(widest, shape))


def _padded(num_blocks: int, block_size: int) -> int:
    """Blocks to gather for a context of num_blocks: the next of 1, 1.5, 2, 3, 4, 6, ... times 64 tokens."""
    least = max(1, 64 // block_size)
    if num_blocks <= least:
        return least
    unit = 1 << max(0, (num_blocks - 1).bit_length() - 2)
    return -(-num_blocks // unit) * unit


def _runs(blocks: np.ndarray, num_kv_heads: int) -> torch.Tensor:
    """blocks int[B, W] -> i64[B * KVH * W], in the order request, head, block."""
    runs = blocks[:, None, :].astype(np.int64) * num_kv_heads + np.arange(num_kv_heads)[:, None]
    return torch.from_numpy(runs.reshape(-1))


def _decode_group(
    rows: np.ndarray, seq_lens: np.ndarray, first_blocks: np.ndarray, blocks: np.ndarray, shape: AttentionShape
) -> DecodeGroup:
    kv_len = blocks.shape[1] * shape.block_size
    positions = (first_blocks * shape.block_size)[:, None] + np.arange(kv_len)  # [B, kv_len]
    seq_lens = seq_lens[:, None]
    used = positions < seq_lens
    seen = used & (positions >= seq_lens - shape.window) if shape.window > 0 else used
    every_head = np.broadcast_to(~used[:, None, :], (len(rows), shape.num_kv_heads, kv_len))
    mask = torch.zeros(seen.shape, dtype=shape.dtype).masked_fill_(torch.from_numpy(~seen), -torch.inf)
    return DecodeGroup(
        rows=torch.from_numpy(rows.astype(np.int64)),
        runs=_runs(blocks, shape.num_kv_heads),
        unused=torch.from_numpy(np.flatnonzero(every_head)),
        mask=mask[:, None, None, :],
        kv_len=kv_len,
    )


def _tiles(start: int, num_queries: int, first_query: int, first_gathered: int, window: int) -> tuple[Tile, ...]:
    """start: of the request's tokens in the step. first_query, first_gathered: positions in the sequence."""
    tiles = []
    for offset in range(0, num_queries, QUERY_TILE):
        end = min(offset + QUERY_TILE, num_queries)
        first_key = max(first_query + offset - window + 1, 0) if window > 0 else 0
        tiles.append(Tile(start + offset, start + end, first_key - first_gathered, first_query + end - first_gathered))
    return tuple(tiles)


def _extend_mask(num_keys: int, shape: AttentionShape) -> torch.Tensor:
    num_queries = min(QUERY_TILE, num_keys)
    ahead = torch.arange(-num_queries + 1, 1)[:, None] - torch.arange(-num_keys + 1, 1)  # query minus key
    hidden = (ahead < 0) | (ahead >= shape.window) if shape.window > 0 else ahead < 0
    return torch.zeros(num_queries, num_keys, dtype=shape.dtype).masked_fill_(hidden, -torch.inf)
