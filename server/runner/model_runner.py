"""Runs a model on the scheduler's batches. Decides nothing: which tokens and which blocks is the scheduler's affair."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from kernels.layout import KVCache
from kernels.metadata import AttentionMetadata
from server.models.decoder import Decoder
from server.protocol import GrammarSpec, SamplingParams, TokenLogprobs
from server.runner.decode_graphs import Capture, DecodeGraphs
from server.runner.input_batch import StepInputs, build_inputs
from server.sampling.fused import FusedSampler
from server.sampling.logprobs import read_scores, score_tokens
from server.sampling.row_state import Grammar, SamplingRow
from server.sampling.sampler import Chosen, choose
from server.scheduler.batch import AdmittedRow, SampledRow, SampledTokens, ScheduledBatch, ScheduledItem
from server.transfer import Download, upload

log = logging.getLogger(__name__)

_LOGPROBS_CHUNK = 256
"""Prompt positions whose logits exist at one time."""
_COMPILED_SIZES = [2**n for n in range(6, 13)]
"""Kernels are compiled for powers of two of requests; up to 32 share one."""


@dataclass(slots=True)
class _Row:
    """A running request. Written by: the runner.

    sampling: None if the state could not be built; error then says why. prompt_logprobs: None where they aren't wanted
    or were delivered; grows chunk by chunk, on the device.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingRow | None
    error: str = ""
    num_prompt_logprobs: int = 0
    prompt_scores: list[list[torch.Tensor]] | None = None


@dataclass(slots=True)
class StepHandle:
    """A launched step. rows: those that sample. download: the tensors of chosen, then those of prompt_scores.

    prompt_scores: row index -> what score_tokens returned for its prompt, piece by piece.
    """

    step_id: int
    rows: list[_Row] = field(default_factory=list)
    chosen: Chosen | None = None
    prompt_scores: dict[int, list[list[torch.Tensor]]] = field(default_factory=dict)
    download: Download | None = None
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
        lookahead: bool = False,
    ) -> None:
        """page_table: int32[max_num_seqs, W], the scheduler's, read only. start_grammar: at a request's begin,
        with its grammar and its max_tokens. capture: how warm_up records decode steps; None leaves them as they are.
        lookahead: batches may hold awaited tokens.
        """
        self._model = model
        self._cache = kv_cache
        self._page_table = page_table
        self._device = device
        self._start_grammar = start_grammar
        self._capture = capture
        self._graphs: DecodeGraphs | None = None
        self._rows: list[_Row | None] = [None] * max_num_seqs
        self._sampler = None if model.ops.sampler is None else FusedSampler(model.ops.sampler, device)
        self._newest = torch.zeros(max_num_seqs, dtype=torch.int64, device=device) if lookahead else None
        """The token that each row sampled last: the next step may run it before the host knows it."""
        model.prepare_positions(min(page_table.shape[1] * kv_cache.spec.block_size, model.spec.max_position))

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> StepHandle:
        """Computes the batch's tokens and samples. Never waits for a GPU, nor for the step before."""
        for released in batch.released_rows:
            self._rows[released] = None
        for admitted in batch.admitted:
            self._rows[admitted.row] = self._admit(admitted)
        if not batch.items:
            return StepHandle(batch.step_id)
        inputs = build_inputs(
            batch.items,
            self._page_table,
            block_size=self._cache.spec.block_size,
            vocab_size=self._model.spec.vocab_size,
            device=self._device,
        )
        if inputs.awaited is not None:
            assert self._newest is not None, "an awaited token without lookahead"
            places, rows = inputs.awaited
            inputs.token_ids.index_copy_(0, places, self._newest.index_select(0, rows))
        handle = StepHandle(batch.step_id)
        items, sampling, scoring = [], [], []
        for item, last in zip(batch.items, inputs.last_tokens.tolist(), strict=True):
            row = self._row(item)
            if row.error:
                handle.failed[item.request_id] = row.error
            elif item.samples:
                items.append(item)
                handle.rows.append(row)
                sampling.append(last)
            if row.prompt_scores is not None and not row.error:
                scoring.append((row, item, last))
        wanted = sampling + [token for entry in scoring for token in _scored_tokens(*entry)] or [0]
        hidden = self._forward(inputs, wanted)
        offset = len(sampling)
        for row, item, last in scoring:
            count = len(_scored_tokens(row, item, last))
            self._score(row, item, hidden[offset : offset + count])
            offset += count
        if sampling:
            self._sample(handle, items, hidden[: len(sampling)])
        return handle

    def _sample(self, handle: StepHandle, items: list[ScheduledItem], hidden: torch.Tensor) -> None:
        """hidden: [S, C] of the last tokens of the items, whose rows handle.rows are."""
        states = [row.sampling for row in handle.rows if row.sampling is not None]
        positions = [item.end for item in items]
        chosen = choose(self._model.logits(hidden), states, positions, fused=self._sampler)
        newest = chosen.token_ids.clamp(min=0)
        if self._newest is not None:
            [rows] = upload([np.array([item.row for item in items], dtype=np.int64)], self._device)
            self._newest.index_copy_(0, rows, newest)
        tensors = chosen.tensors
        for index, (row, state) in enumerate(zip(handle.rows, states, strict=True)):
            state.append(newest, index)
            if row.prompt_scores is not None:
                handle.prompt_scores[index], row.prompt_scores = row.prompt_scores, None
                tensors += chain.from_iterable(handle.prompt_scores[index])
        handle.chosen = chosen
        handle.download = Download(tensors)

    def _forward(self, inputs: StepInputs, wanted: list[int]) -> torch.Tensor:
        """Runs the model and returns the hidden states of the wanted tokens, [len(wanted), C]."""
        select = None
        if wanted != list(range(inputs.meta.num_tokens)):
            [select] = upload([np.array(wanted, dtype=np.int64)], self._device)
        if self._graphs is None or not inputs.meta.is_decode:
            return self._model.forward(inputs.token_ids, inputs.meta, self._cache, select)
        hidden = self._graphs.forward(inputs)
        return hidden if select is None else hidden.index_select(0, select)

    def collect(self, handle: object) -> SampledTokens:
        """Waits for the step's tokens, and tells them to the rows' grammars. handle: what launch returned."""
        assert isinstance(handle, StepHandle)
        if handle.chosen is None or handle.download is None:
            return SampledTokens(handle.step_id, [], handle.failed)
        tensors = iter(handle.download.wait())
        sampled = handle.chosen.read([next(tensors) for _ in handle.chosen.tensors])
        results = []
        for index, (row, token_id) in enumerate(zip(handle.rows, sampled.token_ids, strict=True)):
            prompt_logprobs: list[TokenLogprobs | None] | None = None
            if index in handle.prompt_scores:
                pieces = [[next(tensors) for _ in piece] for piece in handle.prompt_scores[index]]
                prompt_logprobs = [None, *chain.from_iterable(_read_piece(row, piece) for piece in pieces)]
            error = sampled.failed.get(index) or _advance(row, token_id)
            if error:
                row.error = handle.failed[row.request_id] = error
                continue
            logprobs = sampled.logprobs[index]
            results.append(
                SampledRow(row.request_id, [token_id], None if logprobs is None else [logprobs], prompt_logprobs)
            )
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
        if self._device.type != "cpu":
            batches += [[min(n, longest)] for n in (2, 4, 8)] + [[1, longest]]
            sizes = {min(size, len(self._rows)) for size in _COMPILED_SIZES}
            batches += [[1] * size for size in sizes] + [[1] * (size - 1) + [longest] for size in sizes]
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
            logits = self._model.logits(hidden[-1:])
        if self._sampler is not None:
            nobody = SamplingParams(max_tokens=1, seed=0)
            row = SamplingRow(nobody, [0], [], vocab_size=self._model.spec.vocab_size, device=self._device)
            self._sampler(logits, [row], [1])
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
            row.prompt_scores = []
        return row

    def _score(self, row: _Row, item: ScheduledItem, hidden: torch.Tensor) -> None:
        """hidden: [N, C] of the item's first N tokens. Adds the log-probabilities of the tokens behind them."""
        assert row.prompt_scores is not None
        known = np.array(row.prompt_ids[item.start + 1 : item.start + 1 + len(hidden)], dtype=np.int64)
        [targets] = upload([known], self._device)
        for begin in range(0, len(known), _LOGPROBS_CHUNK):
            chunk = targets[begin : begin + _LOGPROBS_CHUNK]
            logits = self._model.logits(hidden[begin : begin + len(chunk)])
            row.prompt_scores.append(score_tokens(logits, chunk, row.num_prompt_logprobs))


def _scored_tokens(row: _Row, item: ScheduledItem, last: int) -> range:
    """The item's tokens, as indices into the step's, that have a prompt token behind them."""
    first = last + 1 - len(item.token_ids)
    count = min(item.end, len(row.prompt_ids) - 1) - item.start
    return range(first, first + max(count, 0))


def _read_piece(row: _Row, piece: list[torch.Tensor]) -> list[TokenLogprobs]:
    return read_scores(piece, [row.num_prompt_logprobs] * len(piece[0]))


def _advance(row: _Row, token_id: int) -> str:
    """Returns what is wrong, or an empty string."""
    assert row.sampling is not None
    try:
        row.sampling.advance(token_id)
    except Exception as error:  # one request's grammar must not end the others' step
        return f"the grammar refused its token: {error}"
    return ""
