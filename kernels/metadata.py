"""The calling convention of every attention kernel: one step's ragged batch, described by index tensors.

    tokens      t0 t1 t2 | t3 | t4 t5            T = 6 new tokens of B = 3 requests, concatenated
    query_start_loc  0     3    4      6         i32[B+1]
    seq_lens         3    18   40                keys each request has after this step, the new ones included
    page_table  [[7, 0], [3, 9], [4, 5]]         i32[B, W]: block ids, padded with the null block 0

The keys of request b at position p live in slot page_table[b, p // block_size] * block_size + p % block_size.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's index tensors, on the device of the KV cache. Written by: the runner, once a step; then nobody.

    query_start_loc: i32[B+1]. Offsets of each request's new tokens.
    seq_lens: i32[B]. Tokens in the cache after this step's write: b's last query is at position seq_lens[b] - 1.
    page_table: i32[B, W]. W may exceed what is used; unused entries are 0.
    slot_mapping: i64[T]. Where each new token's key and value go. A negative slot writes nothing (padding).
    positions: i64[T]. Position of each new token in its sequence.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    num_requests: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int

    @property
    def is_decode(self) -> bool:
        """Every request has exactly one new token."""
        return self.max_query_len == 1
