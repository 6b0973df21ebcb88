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
    if all(len(item.token_ids) == 1 for item in items):
        return _decode_inputs(items, page_table, block_size=block_size, vocab_size=vocab_size, device=device)
    num_requests = len(items)
    lengths = np.fromiter((len(item.token_ids) for item in items), np.int64, num_requests)
    starts = np.fromiter((item.start for item in items), np.int64, num_requests)
    rows = np.fromiter((item.row for item in items), np.int64, num_requests)
    query_start_loc = np.zeros(num_requests + 1, np.int64)
    np.cumsum(lengths, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])
    seq_lens = starts + lengths
    token_ids = np.fromiter(chain.from_iterable(item.token_ids for item in items), np.int64, num_tokens)
    awaited = np.fromiter((i for i, item in enumerate(items) if item.token_ids == [AWAITED]), np.int64)
    token_ids[(token_ids < 0) | (token_ids >= vocab_size)] = 0

    blocks = page_table[rows, : -(-int(seq_lens.max()) // block_size)]  # [B, W], a copy
    positions = np.arange(num_tokens) + np.repeat(starts - query_start_loc[:-1], lengths)
    owners = np.repeat(np.arange(num_requests), lengths)
    return _upload(
        token_ids=token_ids,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        blocks=blocks,
        slots=blocks[owners, positions // block_size] * block_size + positions % block_size,
        positions=positions,
        awaited=(query_start_loc[awaited], rows[awaited]),
        max_query_len=int(lengths.max()),
        device=device,
    )


def _decode_inputs(
    items: Sequence[ScheduledItem],
    page_table: npt.NDArray[np.int32],
    *,
    block_size: int,
    vocab_size: int,
    device: torch.device,
) -> StepInputs:
    """The same where every request has one token: most steps, and the host's share of a short one counts."""
    known = [item.token_ids[0] for item in items]
    token_ids, positions, rows = np.array(
        [
            [token_id if 0 <= token_id < vocab_size else 0 for token_id in known],
            [item.start for item in items],
            [item.row for item in items],
        ]
    )
    counting = np.arange(len(items) + 1)
    seq_lens = positions + 1
    columns, offsets = np.divmod(positions, block_size)
    blocks = page_table[rows, : int(columns.max()) + 1]
    awaited = np.array([i for i, token_id in enumerate(known) if token_id == AWAITED], dtype=np.int64)
    return _upload(
        token_ids=token_ids,
        query_start_loc=counting,
        seq_lens=seq_lens,
        blocks=blocks,
        slots=blocks[counting[:-1], columns] * block_size + offsets,
        positions=positions,
        awaited=(awaited, rows[awaited]),
        max_query_len=1,
        device=device,
    )


def _upload(
    *,
    token_ids: npt.NDArray[np.int64],
    query_start_loc: npt.NDArray[np.int64],
    seq_lens: npt.NDArray[np.int64],
    blocks: npt.NDArray[np.int32],
    slots: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    awaited: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    max_query_len: int,
    device: torch.device,
) -> StepInputs:
    bounds = [query_start_loc.astype(np.int32), seq_lens.astype(np.int32)]
    tensors = upload([token_ids, *bounds, blocks, slots, positions, *awaited], device)
    meta = AttentionMetadata(
        query_start_loc=tensors[1],
        seq_lens=tensors[2],
        page_table=tensors[3],
        slot_mapping=tensors[4],
        positions=tensors[5],
        num_requests=len(seq_lens),
        num_tokens=len(token_ids),
        max_query_len=max_query_len,
        max_seq_len=int(seq_lens.max()),
    )
    return StepInputs(tensors[0], meta, query_start_loc[1:] - 1, (tensors[6], tensors[7]) if len(awaited[0]) else None)
