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
from server.runner.decode_graphs import Capture, DecodeGraphs
from server.runner.input_batch import StepInputs, build_inputs
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
        capture: Capture | None = None,
    ) -> None:
        """page_table: int32[max_num_seqs, W], the scheduler's, read only. start_grammar: at a request's begin,
        with its grammar and its max_tokens. capture: how warm_up records decode steps; None leaves them as they are.
        """
        self._model = model
        self._cache = kv_cache
        self._page_table = page_table
        self._device = device
        self._start_grammar = start_grammar
        self._capture = capture
        self._graphs: DecodeGraphs | None = None
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
        hidden = self._forward(inputs, wanted)
        if sampling:
            handle.logits = self._model.logits(hidden[: len(sampling)])
        offset = len(sampling)
        for row, item, last in scoring:
            count = len(_scored_tokens(row, item, last))
            self._score(row, item, hidden[offset : offset + count])
            offset += count
        return handle

    def _forward(self, inputs: StepInputs, wanted: list[int]) -> torch.Tensor:
        """Runs the model and returns the hidden states of the wanted tokens, [len(wanted), C]."""
        select = None
        if wanted != list(range(inputs.meta.num_tokens)):
            select = torch.tensor(wanted, dtype=torch.int64).to(self._device)
        if self._graphs is None or not inputs.meta.is_decode:
            return self._model.forward(inputs.token_ids, inputs.meta, self._cache, select)
        hidden = self._graphs.forward(inputs)
        return hidden if select is None else hidden.index_select(0, select)

    @torch.inference_mode()
    def collect(self, handle: object) -> SampledTokens:
        """Samples, and tells each row its token. handle: what launch returned."""
        assert isinstance(handle, StepHandle)
        if handle.logits is None:
            return SampledTokens(handle.step_id, [], handle.failed)
        states = [row.sampling for row in handle.rows if row.sampling is not None]
        positions = [item.end for item in handle.items]
        sampled = sample(handle.logits, states, positions, fused=self._model.ops.sampler)
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
        kernels compiled, memory mapped and threads running. On a GPU, every kind of batch that compiles kernels of its
        own; then captures the decode steps.
        """
        width = self._page_table.shape[1]
        longest = max(1, min(num_tokens, width * self._cache.spec.block_size))
        batches = [[longest], [1]]
        if self._device.type == "cuda":
            batches += [[min(n, longest)] for n in (2, 4, 8)] + [[1, longest]]
        for query_lens in batches:
            total = sum(query_lens)
            starts = torch.tensor([0, *query_lens]).cumsum(0)
            meta = AttentionMetadata(
                query_start_loc=starts.to(self._device, torch.int32),
                seq_lens=torch.full((len(query_lens),), longest, dtype=torch.int32, device=self._device),
                page_table=torch.zeros(len(query_lens), width, dtype=torch.int32, device=self._device),
                slot_mapping=torch.full((total,), -1, dtype=torch.int64, device=self._device),
                positions=torch.cat([torch.arange(longest - n, longest) for n in query_lens]).to(self._device),
                num_requests=len(query_lens),
                num_tokens=total,
                max_query_len=max(query_lens),
                max_seq_len=longest,
            )
            token_ids = torch.zeros(total, dtype=torch.int64, device=self._device)
            hidden = self._model.forward(token_ids, meta, self._cache)
            self._model.logits(hidden[-1:])
        if self._capture is not None:
            self._graphs = DecodeGraphs(
                self._model,
                self._cache,
                max_num_seqs=len(self._rows),
                table_width=width,
                device=self._device,
                capture=self._capture,
            )

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
