"""From a ScheduledBatch, which is plain integers, to the tensors of one step. numpy over all tokens at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from kernels.metadata import AttentionMetadata
from server.scheduler.batch import AWAITED, ScheduledItem
from server.transfer import upload


@dataclass(frozen=True, slots=True)
class StepInputs:
    """token_ids: i64[T]. last_tokens: i64[B], each item's last token as an index into the T tokens, on the host.
    awaited: (indices into the T tokens, rows), i64[A] each: where the row's newest token belongs; or None.
    """

    token_ids: torch.Tensor
    meta: AttentionMetadata
    last_tokens: npt.NDArray[np.int64]
    awaited: tuple[torch.Tensor, torch.Tensor] | None


def build_inputs(
    items: Sequence[ScheduledItem],
    page_table: npt.NDArray[np.int32],
    *,
    block_size: int,
    vocab_size: int,
    device: torch.device,
) -> StepInputs:
    """page_table: int32[rows, W], the scheduler's; what the step needs of it is copied. One copy goes to the device.

    A token that the vocabulary does not have is computed as token 0: its request fails elsewhere, and no kernel reads
    beyond the embedding.
    """
    num_requests = len(items)
    lengths = np.fromiter((len(item.token_ids) for item in items), np.int64, num_requests)
    starts = np.fromiter((item.start for item in items), np.int64, num_requests)
    rows = np.fromiter((item.row for item in items), np.int64, num_requests)
    query_start_loc = np.zeros(num_requests + 1, np.int64)
    np.cumsum(lengths, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])
    seq_lens = starts + lengths
    max_seq_len = int(seq_lens.max())
    token_ids = np.fromiter(chain.from_iterable(item.token_ids for item in items), np.int64, num_tokens)
    awaited = np.fromiter((i for i, item in enumerate(items) if item.token_ids == [AWAITED]), np.int64)
    token_ids[(token_ids < 0) | (token_ids >= vocab_size)] = 0

    blocks = page_table[rows, : -(-max_seq_len // block_size)]  # [B, W], a copy
    if num_tokens == num_requests:
        positions, owners = starts, np.arange(num_requests)
    else:
        positions = np.arange(num_tokens) + np.repeat(starts - query_start_loc[:-1], lengths)
        owners = np.repeat(np.arange(num_requests), lengths)
    slots = blocks[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
    bounds = [query_start_loc.astype(np.int32), seq_lens.astype(np.int32)]
    awaiting = [query_start_loc[awaited], rows[awaited]]

    tensors = upload([token_ids, *bounds, blocks, slots, positions, *awaiting], device)
    meta = AttentionMetadata(
        query_start_loc=tensors[1],
        seq_lens=tensors[2],
        page_table=tensors[3],
        slot_mapping=tensors[4],
        positions=tensors[5],
        num_requests=num_requests,
        num_tokens=num_tokens,
        max_query_len=int(lengths.max()),
        max_seq_len=max_seq_len,
    )
    places = (tensors[6], tensors[7]) if len(awaited) else None
    return StepInputs(tensors[0], meta, query_start_loc[1:] - 1, places)
