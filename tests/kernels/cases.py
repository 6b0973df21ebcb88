"""Random paged batches for the tests of every attention backend, and the oracle that they are compared with.

A case holds each request's keys and values contiguously, as the backend should have stored them. `fill_cache` puts them
into a backend's own layout through that backend's KV-write, so a case knows nothing of layouts, and `oracle` attends on
the contiguous tensors in float64, so it knows nothing of page tables.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels.layout import KVCacheSpec, LayerKV
from kernels.metadata import AttentionMetadata
from kernels.ops import Ops, QkvLayout

Pair = tuple[int, int]
"""(query_len, kv_len): new tokens of this step, and keys after it. kv_len - query_len are computed already."""

TOLERANCE: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.float16: {"atol": 2e-3, "rtol": 2e-3},
    torch.bfloat16: {"atol": 1.6e-2, "rtol": 1.6e-2},
}
"""By dtype of the activations, for unit-variance inputs: `assert_close(out, want, **TOLERANCE[dtype])`."""

BLOCK = 16

BATCHES: dict[str, list[Pair]] = {
    "one_token": [(1, 1)],
    "decode": [(1, 5), (1, 40), (1, 17)],
    "decode_block_edges": [(1, BLOCK - 1), (1, BLOCK), (1, BLOCK + 1), (1, 2 * BLOCK)],
    "decode_uneven": [(1, 2), (1, 300), (1, 33)],
    "prefill": [(23, 23)],
    "prefill_block_edges": [(BLOCK - 1, BLOCK - 1), (BLOCK, BLOCK), (BLOCK + 1, BLOCK + 1)],
    "chunk": [(7, 40), (BLOCK, 3 * BLOCK), (9, 25)],
    "prefix_hit": [(1, BLOCK), (3, 2 * BLOCK + 3), (BLOCK, 2 * BLOCK)],
    "mixed": [(1, 33), (12, 12), (1, 1), (5, 70), (1, 48)],
    "long_chunk": [(70, 210), (1, 129)],
}
"""Named batches for block_size 16: decode, chunk, prefix hit, block edges, and all of them at once."""


@dataclass(frozen=True, slots=True)
class PagedCase:
    """One step's batch over one layer.

    q: dtype[T, num_heads, head_dim]. keys, values: one dtype[kv_len, num_kv_heads, head_dim] a request, of which the
    last query_len are this step's own.
    """

    pairs: tuple[Pair, ...]
    q: torch.Tensor
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    meta: AttentionMetadata
    block_size: int
    num_blocks: int

    @property
    def num_heads(self) -> int:
        return self.q.shape[1]

    @property
    def head_dim(self) -> int:
        return self.q.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.keys[0].shape[1]

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)


def build_case(
    pairs: Sequence[Pair],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = BLOCK,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> PagedCase:
    """Unit-variance q, k, v, the same for a seed on every device. Blocks are handed out in random order; a few are left
    over, and the page table is two columns wider than the longest request needs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    q = normal(sum(query_len for query_len, _ in pairs), num_heads, head_dim)
    keys = tuple(normal(kv_len, num_kv_heads, head_dim) for _, kv_len in pairs)
    values = tuple(normal(kv_len, num_kv_heads, head_dim) for _, kv_len in pairs)
    needed = [-(-kv_len // block_size) for _, kv_len in pairs]
    num_blocks = sum(needed) + 4
    page_table = _hand_out(needed, num_blocks, generator).to(device)
    meta = metadata(pairs, page_table, block_size=block_size)
    return PagedCase(tuple(pairs), q, keys, values, meta, block_size, num_blocks)


def permuted(case: PagedCase, *, seed: int = 1) -> PagedCase:
    """The same tokens in other blocks."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-kv_len // case.block_size) for _, kv_len in case.pairs]
    page_table = _hand_out(needed, case.num_blocks, generator).to(case.q.device)
    return replace(case, meta=metadata(case.pairs, page_table, block_size=case.block_size))


def metadata(pairs: Sequence[Pair], page_table: torch.Tensor, *, block_size: int) -> AttentionMetadata:
    """The step that computes the last query_len of each request's kv_len tokens. page_table: i32[B, W]."""
    device = page_table.device
    query_lens = [query_len for query_len, _ in pairs]
    seq_lens = [kv_len for _, kv_len in pairs]
    positions = torch.cat([torch.arange(kv_len - query_len, kv_len) for query_len, kv_len in pairs]).to(device)
    request = torch.repeat_interleave(torch.arange(len(pairs)), torch.tensor(query_lens)).to(device)
    slots = page_table[request, positions // block_size].long() * block_size + positions % block_size
    starts = [0, *torch.tensor(query_lens).cumsum(0).tolist()]
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        page_table=page_table,
        slot_mapping=slots,
        positions=positions,
        num_requests=len(pairs),
        num_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )


def fill_cache(ops: Ops, case: PagedCase, *, poison: bool = False) -> LayerKV:
    """A one-layer cache that holds the case's keys and values, written by ops' own KV-write (rotation by zero degrees).

    poison: everything that the write doesn't touch, the null block included, is NaN.
    """
    dtype, device = case.q.dtype, case.q.device
    spec = KVCacheSpec(1, case.num_kv_heads, case.head_dim, case.block_size, dtype)
    layer = ops.allocate_kv_cache(spec, num_blocks=case.num_blocks, device=device)[0]
    if poison:
        layer.key.fill_(torch.nan)
        layer.value.fill_(torch.nan)
    whole = metadata([(n, n) for _, n in case.pairs], case.meta.page_table, block_size=case.block_size)
    layout = QkvLayout(case.num_heads, case.num_kv_heads, case.head_dim)
    no_q = torch.zeros(whole.num_tokens, case.num_heads * case.head_dim, dtype=dtype, device=device)
    qkv = torch.cat([no_q, torch.cat(case.keys).flatten(1), torch.cat(case.values).flatten(1)], dim=1)
    ops.rope_and_write_kv(qkv, layout, identity_rotation(whole.max_seq_len, case.head_dim, device), layer, whole)
    return layer


def identity_rotation(num_positions: int, rotary_dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """cos_sin, float32[num_positions, rotary_dim], that leaves q and k as they are."""
    half = rotary_dim // 2
    ones, zeros = torch.ones(num_positions, half), torch.zeros(num_positions, half)
    return torch.cat([ones, zeros], dim=1).to(device)


def rotation(num_positions: int, rotary_dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """cos_sin, float32[num_positions, rotary_dim], at base 10000."""
    inv_freq = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * inv_freq
    return torch.cat([angles.cos(), angles.sin()], dim=1).float().to(device)


def oracle(case: PagedCase, *, window: int = 0, soft_cap: float = 0.0) -> torch.Tensor:
    """Attention of each query over its request's contiguous keys, float64[T, num_heads * head_dim]."""
    group = case.num_heads // case.num_kv_heads
    outputs = []
    queries = torch.split(case.q.double(), [query_len for query_len, _ in case.pairs])
    for (query_len, kv_len), q, k, v in zip(case.pairs, queries, case.keys, case.values, strict=True):
        k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * case.scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = torch.arange(kv_len - query_len, kv_len)[:, None] - torch.arange(kv_len)
        hidden = (distance < 0) | ((distance >= window) if window else False)
        scores = scores.masked_fill(hidden.to(scores.device), -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1))
    return torch.cat(outputs)


def _hand_out(needed: Sequence[int], num_blocks: int, generator: torch.Generator) -> torch.Tensor:
    """i32[B, max(needed) + 2]: distinct random block ids other than the null block, padded with it."""
    ids = (torch.randperm(num_blocks - 1, generator=generator) + 1).int()
    table = torch.zeros(len(needed), max(needed) + 2, dtype=torch.int32)
    for row, count in enumerate(needed):
        table[row, :count], ids = ids[:count], ids[count:]
    return table
