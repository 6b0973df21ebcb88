"""Decode steps as captured graphs: the model's forward pass recorded once a batch bucket and replayed with one launch.

At small batches a GPU computes a layer faster than a CPU can launch it. A recorded pass reads fixed addresses, so a
step's index tensors are copied into static buffers first, and a batch is padded to the next bucket with requests that
have no keys and tokens that are written nowhere.
"""

from collections.abc import Callable

import torch

from kernels.layout import KVCache
from kernels.metadata import AttentionMetadata
from server.models.decoder import Decoder
from server.runner.input_batch import StepInputs

Pass = Callable[[], torch.Tensor]
Capture = Callable[[Pass], Pass]
"""Makes a pass that does the same work on the same buffers, and returns the same tensor each time."""


def capture_cuda(run: Pass) -> Pass:
    """A CUDA graph of run, after one call that compiles what it needs."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return output

    return replay


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph, rising; the last is max_num_seqs. Between two, at most 31 rows are padding."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(96, max_num_seqs, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class DecodeGraphs:
    """Static inputs, and a captured pass a bucket. Written by: the runner, one step at a time.

    All buckets share the buffers: a bucket's inputs are the first rows of the largest one's.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        *,
        max_num_seqs: int,
        table_width: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        """Captures every bucket, the largest first. table_width: columns of the page table."""

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._token_ids = zeros(max_num_seqs, dtype=torch.int64)
        self._positions = zeros(max_num_seqs, dtype=torch.int64)
        self._slots = torch.full_like(self._positions, -1)
        self._seq_lens = zeros(max_num_seqs, dtype=torch.int32)
        self._page_table = zeros(max_num_seqs, table_width, dtype=torch.int32)
        self._query_starts = zeros(max_num_seqs + 1, dtype=torch.int32)
        self._counting = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        longest = table_width * cache.spec.block_size

        def at_size(size: int) -> Pass:
            meta = AttentionMetadata(
                query_start_loc=self._query_starts[: size + 1],
                seq_lens=self._seq_lens[:size],
                page_table=self._page_table[:size],
                slot_mapping=self._slots[:size],
                positions=self._positions[:size],
                num_requests=size,
                num_tokens=size,
                max_query_len=1,
                max_seq_len=longest,
            )
            return lambda: model.forward(self._token_ids[:size], meta, cache)

        self._passes = {size: capture(at_size(size)) for size in reversed(bucket_sizes(max_num_seqs))}
        self._sizes = sorted(self._passes)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """The hidden states [B, C] of a decode step (one token a request), valid until the next call."""
        meta = inputs.meta
        count, columns = meta.num_requests, meta.page_table.shape[1]
        size = next(size for size in self._sizes if size >= count)
        self._token_ids[:count].copy_(inputs.token_ids)
        self._positions[:count].copy_(meta.positions)
        self._slots[:count].copy_(meta.slot_mapping)
        self._seq_lens[:count].copy_(meta.seq_lens)
        self._page_table[:count, :columns].copy_(meta.page_table)
        # Columns beyond may hold an earlier step's blocks: no kernel looks past seq_lens.
        self._slots[count:size].fill_(-1)
        self._seq_lens[count:size].zero_()
        torch.clamp(self._counting, max=count, out=self._query_starts)
        return self._passes[size]()[:count]
