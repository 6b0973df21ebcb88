"""A grammar for batches, and the tensors of one.

    8q1s4k          8 requests with 1 new token each, 4096 keys after it
    1q2k_32q1s1k    a prompt of 2048 tokens beside 32 requests that decode at 1024 keys

[count]q<new tokens>[s<keys>], joined by underscores; k is 1024; without s the keys are the new tokens.
"""

import re
from dataclasses import dataclass

import torch

from kernels.layout import LayerKV
from kernels.metadata import AttentionMetadata

_ITEM = re.compile(r"(\d+)?q(\d+k?)(?:s(\d+k?))?")

Pairs = list[tuple[int, int]]
"""(new tokens, keys after them), one a request."""


def parse(text: str, *, shrink: bool = False) -> Pairs:
    """shrink: for a dry run, at most two requests an item, 8 new tokens and 40 keys."""
    pairs: Pairs = []
    for item in text.split("_"):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r} in {text!r} is not of the form [count]q<new tokens>[s<keys>]")
        count, query_len = int(match[1] or 1), _number(match[2])
        kv_len = _number(match[3]) if match[3] else query_len
        if shrink:
            count, query_len = min(count, 2), min(query_len, 8)
            kv_len = max(query_len, min(kv_len, 40))
        if kv_len < query_len:
            raise ValueError(f"{item!r}: more new tokens than keys")
        pairs += [(query_len, kv_len)] * count
    return pairs


def _number(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


@dataclass(frozen=True, slots=True)
class Shape:
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128


@dataclass(frozen=True, slots=True)
class Problem:
    """Random tensors of one attention call."""

    q: torch.Tensor
    layer: LayerKV
    meta: AttentionMetadata
    pairs: Pairs
    shape: Shape

    @property
    def kv_bytes(self) -> int:
        """What must be read of the cache: each key and value once."""
        keys = sum(kv_len for _, kv_len in self.pairs)
        return 2 * keys * self.shape.num_kv_heads * self.shape.head_dim * self.layer.key.itemsize

    @property
    def flops(self) -> int:
        """Two matrix products over the keys that causality leaves."""
        scores = sum(q * (kv - q) + q * (q + 1) // 2 for q, kv in self.pairs)
        return 4 * scores * self.shape.num_heads * self.shape.head_dim


def build(
    pairs: Pairs,
    shape: Shape,
    *,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int = 16,
    shuffle: bool = True,
    pad_to: int = 0,
) -> Problem:
    """shuffle: blocks in random order. pad_to: least width of the page table in tokens, as a captured graph has it."""
    needed = [-(-kv_len // block_size) for _, kv_len in pairs]
    num_blocks = sum(needed) + 1
    ids = (torch.randperm(num_blocks - 1) if shuffle else torch.arange(num_blocks - 1)).int() + 1
    table = torch.zeros(len(pairs), max(*needed, -(-pad_to // block_size)), dtype=torch.int32)
    for row, count in enumerate(needed):
        table[row, :count], ids = ids[:count], ids[count:]
    query_lens = torch.tensor([q for q, _ in pairs])
    seq_lens = torch.tensor([kv for _, kv in pairs])
    positions = torch.cat([torch.arange(kv - q, kv) for q, kv in pairs])
    owners = torch.repeat_interleave(torch.arange(len(pairs)), query_lens)
    slots = table[owners, positions // block_size].long() * block_size + positions % block_size
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0)])
    meta = AttentionMetadata(
        query_start_loc=starts.int().to(device),
        seq_lens=seq_lens.int().to(device),
        page_table=table.to(device),
        slot_mapping=slots.to(device),
        positions=positions.to(device),
        num_requests=len(pairs),
        num_tokens=len(positions),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
    )
    kv_shape = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
    key, value = (torch.randn(kv_shape, device=device, dtype=dtype) for _ in range(2))
    q = torch.randn(len(positions), shape.num_heads, shape.head_dim, device=device, dtype=dtype)
    return Problem(q, LayerKV(key, value), meta, pairs, shape)
