"""Runs a model on the scheduler's batches. Decides nothing: which tokens and which blocks is the scheduler's affair."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kernels.layout import KVCache
from kernels.metadata import AttentionMetadata
from server.models.decoder import Decoder
from server.protocol import GrammarSpec, TokenLogprobs
from server.runner.input_batch import build_inputs
from server.sampling.logprobs import token_logprobs
from server.sampling.row_state import Grammar, SamplingRow
from server.sampling.sampler import sample
from server.scheduler.batch import AdmittedRow, SampledRow, SampledTokens, ScheduledBatch, ScheduledItem

log = logging.getLogger(__name__)

_LOGPROBS_CHUNK = 256
"""Prompt positions whose logits exist at one time."""


@dataclass(slots=True)
class _Row:
    """A running request. Written by: the runner.

    sampling: None if the state could not be built; error then says why. prompt_logprobs: None where they aren't wanted
    or were delivered; grows chunk by chunk.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingRow | None
    error: str = ""
    num_prompt_logprobs: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(slots=True)
class StepHandle:
    """A launched step. logits: float32[S, V] of the items that sample."""

    step_id: int
    items: list[ScheduledItem]
    rows: list[_Row]
    logits: torch.Tensor | None
    failed: dict[str, str] = field(default_factory=dict)


class ModelRunner:
    """Implements runner.interface.Runner. Rows' sampling state lives here and nowhere else."""

    def __init__(
        self,
        *,
        model: Decoder,
        kv_cache: KVCache,
        page_table: npt.NDArray[np.int32],
        max_num_seqs: int,
        device: torch.device,
        start_grammar: Callable[[GrammarSpec, int], Grammar] | None = None,
    ) -> None:
        """page_table: int32[max_num_seqs, W], the scheduler's, read only. start_grammar: at a request's begin,
        with its grammar and its max_tokens."""
        self._model = model
        self._cache = kv_cache
        self._page_table = page_table
        self._device = device
        self._start_grammar = start_grammar
        self._rows: list[_Row | None] = [None] * max_num_seqs
        model.prepare_positions(min(page_table.shape[1] * kv_cache.spec.block_size, model.spec.max_position))

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> StepHandle:
        """Computes the batch's tokens, up to the logits of those that sample."""
        for released in batch.released_rows:
            self._rows[released] = None
        for admitted in batch.admitted:
            self._rows[admitted.row] = self._admit(admitted)
        if not batch.items:
            return StepHandle(batch.step_id, [], [], None)
        inputs = build_inputs(
            batch.items,
            self._page_table,
            block_size=self._cache.spec.block_size,
            vocab_size=self._model.spec.vocab_size,
            device=self._device,
        )
        handle = StepHandle(batch.step_id, [], [], None)
        sampling, scoring = [], []
        for item, last in zip(batch.items, inputs.last_tokens.tolist(), strict=True):
            row = self._row(item)
            if row.error:
                handle.failed[item.request_id] = row.error
            elif item.samples:
                handle.items.append(item)
                handle.rows.append(row)
                sampling.append(last)
            if row.prompt_logprobs is not None and not row.error:
                scoring.append((row, item, last))
        wanted = sampling + [token for entry in scoring for token in _scored_tokens(*entry)] or [0]
        select = None if wanted == list(range(inputs.meta.num_tokens)) else torch.tensor(wanted, dtype=torch.int64)
        hidden = self._model.forward(
            inputs.token_ids, inputs.meta, self._cache, None if select is None else select.to(self._device)
        )
        if sampling:
            handle.logits = self._model.logits(hidden[: len(sampling)])
        offset = len(sampling)
        for row, item, last in scoring:
            count = len(_scored_tokens(row, item, last))
            self._score(row, item, hidden[offset : offset + count])
            offset += count
        return handle

    @torch.inference_mode()
    def collect(self, handle: object) -> SampledTokens:
        """Samples, and tells each row its token. handle: what launch returned."""
        assert isinstance(handle, StepHandle)
        if handle.logits is None:
            return SampledTokens(handle.step_id, [], handle.failed)
        states = [row.sampling for row in handle.rows if row.sampling is not None]
        sampled = sample(handle.logits, states, [item.end for item in handle.items])
        results = []
        for index, (row, state) in enumerate(zip(handle.rows, states, strict=True)):
            error = sampled.failed.get(index) or _append(state, sampled.token_ids[index])
            if error:
                row.error = handle.failed[row.request_id] = error
                continue
            logprobs = sampled.logprobs[index]
            results.append(
                SampledRow(
                    row.request_id,
                    [sampled.token_ids[index]],
                    None if logprobs is None else [logprobs],
                    row.prompt_logprobs,
                )
            )
            row.prompt_logprobs = None
        return SampledTokens(handle.step_id, results, handle.failed)

    @torch.inference_mode()
    def warm_up(self, num_tokens: int = 256) -> None:
        """Runs a prefill of so many tokens and a decode step that touch no block, so that the first request finds
        kernels compiled, memory mapped and threads running."""
        width = self._page_table.shape[1]
        num_tokens = max(1, min(num_tokens, width * self._cache.spec.block_size))
        for num_queries in (num_tokens, 1):
            meta = AttentionMetadata(
                query_start_loc=torch.tensor([0, num_queries], dtype=torch.int32, device=self._device),
                seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=self._device),
                page_table=torch.zeros(1, width, dtype=torch.int32, device=self._device),
                slot_mapping=torch.full((num_queries,), -1, dtype=torch.int64, device=self._device),
                positions=torch.arange(num_tokens - num_queries, num_tokens, device=self._device),
                num_requests=1,
                num_tokens=num_queries,
                max_query_len=num_queries,
                max_seq_len=num_tokens,
            )
            token_ids = torch.zeros(num_queries, dtype=torch.int64, device=self._device)
            hidden = self._model.forward(token_ids, meta, self._cache)
            self._model.logits(hidden[-1:])

    def _row(self, item: ScheduledItem) -> _Row:
        row = self._rows[item.row]
        assert row is not None, (
            f"request {item.request_id} is scheduled in row {item.row}, which nobody was admitted to"
        )
        return row

    def _admit(self, admitted: AdmittedRow) -> _Row:
        """Never raises: what is wrong with a request's parameters is found in its row's error."""
        params = admitted.sampling
        row = _Row(admitted.request_id, admitted.prompt_token_ids, None)
        vocab_size = self._model.spec.vocab_size
        try:
            known = [*admitted.prompt_token_ids, *admitted.output_token_ids]
            if not known or min(known) < 0 or max(known) >= vocab_size:
                raise ValueError(f"the prompt holds a token outside the vocabulary of {vocab_size} tokens")
            grammar = None
            if params.grammar is not None:
                if self._start_grammar is None:
                    raise ValueError("structured outputs are not available")
                grammar = self._start_grammar(params.grammar, params.max_tokens)
            row.sampling = SamplingRow(
                params,
                admitted.prompt_token_ids,
                admitted.output_token_ids,
                vocab_size=vocab_size,
                device=self._device,
                grammar=grammar,
            )
        except Exception as error:  # one request's parameters must not end the others' step
            log.warning("request %s can't be served: %s", admitted.request_id, error)
            row.error = str(error) or type(error).__name__
        if params.prompt_logprobs is not None and not admitted.output_token_ids:
            row.num_prompt_logprobs = params.prompt_logprobs
            row.prompt_logprobs = [None]
        return row

    def _score(self, row: _Row, item: ScheduledItem, hidden: torch.Tensor) -> None:
        """hidden: [N, C] of the item's first N tokens. Adds the log-probabilities of the tokens behind them."""
        assert row.prompt_logprobs is not None
        targets = row.prompt_ids[item.start + 1 : item.start + 1 + len(hidden)]
        for begin in range(0, len(targets), _LOGPROBS_CHUNK):
            chunk = targets[begin : begin + _LOGPROBS_CHUNK]
            logits = self._model.logits(hidden[begin : begin + len(chunk)])
            row.prompt_logprobs += token_logprobs(logits, chunk, [row.num_prompt_logprobs] * len(chunk))


def _scored_tokens(row: _Row, item: ScheduledItem, last: int) -> range:
    """The item's tokens, as indices into the step's, that have a prompt token behind them."""
    first = last + 1 - len(item.token_ids)
    count = min(item.end, len(row.prompt_ids) - 1) - item.start
    return range(first, first + max(count, 0))


def _append(state: SamplingRow, token_id: int) -> str:
    """Returns what is wrong, or an empty string."""
    try:
        state.append(token_id)
    except Exception as error:  # one request's grammar must not end the others' step
        return f"the grammar refused its token: {error}"
    return ""
