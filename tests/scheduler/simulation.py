"""A model made of arithmetic, run through the real scheduler, page table and prefix cache.

The value that the fake model stores for a position depends on all tokens up to it, as real keys and values do, and the
next token depends on all stored values, which are read THROUGH the page table. So a wrong block, a stale block, a
prefix shared by mistake or a token computed out of turn changes the answer. `expected_tokens` computes the same without
any of it.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from paging import KVCacheManager, blocks_needed
from server.config import SchedulerConfig
from server.protocol import (
    FinishReason,
    GenerateRequest,
    GrammarSpec,
    OutputDelta,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
)
from server.scheduler.batch import AWAITED, AdmittedRow, SampledRow, SampledTokens, ScheduledBatch
from server.scheduler.scheduler import Scheduler

VOCAB = 50
_MODULUS = 2**31 - 1


def _next_value(previous: int, token: int) -> int:
    return (previous * 1_000_003 + token * 7_919 + 12_345) % _MODULUS


def _sample(values: np.ndarray, seed: int) -> int:
    """values: int64 [positions so far], each below 2**31."""
    weights = np.arange(1, len(values) + 1, dtype=np.int64)
    return int((values * weights % _MODULUS).sum() + seed) % VOCAB


def _values(tokens: Iterable[int]) -> list[int]:
    values, value = [], 0
    for token in tokens:
        value = _next_value(value, token)
        values.append(value)
    return values


def expected_tokens(request: GenerateRequest) -> list[int]:
    """The whole output, resumed tokens included, of an undisturbed run without paging."""
    sampling = request.sampling
    tokens = list(request.prompt_token_ids)
    values = _values(tokens)
    output: list[int] = []
    while len(output) < sampling.max_tokens:
        token = _sample(np.array(values, dtype=np.int64), sampling.seed)
        output.append(token)
        tokens.append(token)
        values.append(_next_value(values[-1], token))
        if token in sampling.stop_token_ids and len(output) > sampling.min_tokens:
            break
    return output


@dataclass
class _Row:
    admitted: AdmittedRow
    tokens: list[int]
    num_computed: int | None = None
    """None: the first chunk says where it starts."""


class FakeRunner:
    """Checks every promise of ScheduledBatch while it computes."""

    def __init__(self, manager: KVCacheManager, config: SchedulerConfig) -> None:
        self._manager = manager
        self._config = config
        self._kv = np.full((manager.num_blocks + 1) * manager.block_size, -1, dtype=np.int64)
        self._rows: dict[int, _Row] = {}
        self.num_computed_tokens = 0
        self.largest_row = -1
        self.num_awaited = 0

    def run(self, batch: ScheduledBatch) -> SampledTokens:
        for row in batch.released_rows:
            del self._rows[row]
        for admitted in batch.admitted:
            assert admitted.row not in self._rows, "a row is filled twice"
            tokens = admitted.prompt_token_ids + admitted.output_token_ids
            self._rows[admitted.row] = _Row(admitted, tokens)
        assert batch.num_tokens <= self._config.max_num_batched_tokens
        assert len(batch.items) <= self._config.max_num_seqs
        assert len({item.row for item in batch.items}) == len(batch.items)
        rows = [sampled for item in batch.items if (sampled := self._compute(item)) is not None]
        return SampledTokens(batch.step_id, rows, {})

    def _compute(self, item) -> SampledRow | None:
        state = self._rows[item.row]
        self.largest_row = max(self.largest_row, item.row)
        assert state.admitted.request_id == item.request_id
        assert item.token_ids, "an item without tokens"
        if state.num_computed is None:
            state.num_computed = item.start
        assert item.start == state.num_computed, "tokens were skipped or computed twice"
        tokens = state.tokens[item.start : item.end]
        if item.token_ids == [AWAITED]:
            assert item.end == len(state.tokens) > len(state.admitted.prompt_token_ids), "nothing was sampled"
            assert state.admitted.sampling.grammar is None, "a grammar has not seen the token yet"
            self.num_awaited += 1
        else:
            assert item.token_ids == tokens
        assert item.samples == (item.end == len(state.tokens))
        slots = self._slots(item.row, item.end)
        value = int(self._kv[slots[item.start - 1]]) if item.start else 0
        for position, token in enumerate(tokens, item.start):
            value = _next_value(value, token)
            self._kv[slots[position]] = value
        state.num_computed = item.end
        self.num_computed_tokens += len(item.token_ids)
        if not item.samples:
            return None
        sampling = state.admitted.sampling
        token = _sample(self._kv[slots], sampling.seed)
        prompt_logprobs = None
        if sampling.prompt_logprobs is not None:
            prompt_logprobs = [None] + [TokenLogprobs(t, 0.0, 1, [], []) for t in state.admitted.prompt_token_ids[1:]]
        state.tokens.append(token)
        return SampledRow(item.request_id, [token], None, prompt_logprobs)

    def _slots(self, row: int, end: int) -> np.ndarray:
        """int64 [end]: where positions 0 .. end - 1 of a row lie."""
        block_size = self._manager.block_size
        positions = np.arange(end)
        blocks = self._manager.page_table.view[row, positions // block_size].astype(np.int64)
        assert blocks.all(), "a token lies in the null block"
        return blocks * block_size + positions % block_size


@dataclass
class Answer:
    """What a client gathers of one request."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    deltas: list[OutputDelta] = field(default_factory=list)

    @property
    def error(self) -> str | None:
        return self.deltas[-1].error


class Simulation:
    """A scheduler, a fake runner and the clients. One tick a step. lookahead: steps under way when one is scheduled."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 256,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_num_prefill_tokens: int | None = None,
        prefill_tokens_per_stream: int = 0,
        policy: str = "fcfs",
        watermark: float = 0.0,
        admission: str = "auto",
        enable_prefix_cache: bool = True,
        lookahead: int = 0,
    ) -> None:
        self.lookahead = lookahead
        self._under_way: deque[tuple[ScheduledBatch, SampledTokens]] = deque()
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_prefill_tokens=max_num_prefill_tokens,
            prefill_tokens_per_stream=prefill_tokens_per_stream,
            policy=policy,
            watermark=watermark,
            admission=admission,
        )
        self.manager = KVCacheManager(
            num_blocks=num_blocks,
            block_size=block_size,
            max_requests=max_num_seqs,
            max_blocks_per_request=blocks_needed(max_model_len, block_size),
            enable_prefix_cache=enable_prefix_cache,
        )
        self.longest_request = min(max_model_len, num_blocks * block_size)
        self.scheduler = Scheduler(config=self.config, manager=self.manager, max_model_len=max_model_len)
        self.runner = FakeRunner(self.manager, self.config)
        self.answers: dict[str, Answer] = {}
        self.now = 0.0
        self.num_preemptions = 0
        self.recomputed_tokens = 0
        self.queried_tokens = 0
        self.hit_tokens = 0

    def add(self, *requests: GenerateRequest) -> None:
        for request in requests:
            self.answers[request.request_id] = Answer()
            self.scheduler.add(request, self.now)

    def abort(self, *request_ids: str) -> None:
        self.scheduler.abort(list(request_ids))

    def step(self, *, check: bool = True) -> ScheduledBatch:
        """One step, or the news of a moment without one. Returns what was launched."""
        self.now += 1.0
        batch = self.scheduler.schedule(self.now)
        if batch:
            self._under_way.append((batch, self.runner.run(batch)))
        if len(self._under_way) > (self.lookahead if batch else 0):
            self.receive(self.scheduler.update(*self._under_way.popleft(), self.now))
        elif (output := self.scheduler.take_finished(self.now)) is not None:
            self.receive(output)
        if check:
            self.scheduler.check_invariants()
        return batch

    def run(self, *, max_steps: int = 10_000, check: bool = True) -> None:
        """Until nothing is open."""
        for _ in range(max_steps):
            if not self.has_work:
                break
            waited = bool(self._under_way)
            assert self.step(check=check) or waited, "requests are open, but nothing can run"
        assert not self.has_work, f"not done after {max_steps} steps"
        if (output := self.scheduler.take_finished(self.now)) is not None:
            self.receive(output)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._under_way)

    def receive(self, output: StepOutput) -> None:
        self.num_preemptions += output.stats.num_preemptions
        self.recomputed_tokens += output.stats.preemption_recomputed_tokens
        self.queried_tokens += output.stats.prefix_cache_queries
        self.hit_tokens += output.stats.prefix_cache_hits
        for delta in output.deltas:
            answer = self.answers[delta.request_id]
            assert answer.finish_reason is None, f"{delta.request_id} got a delta after its end"
            answer.token_ids += delta.token_ids
            answer.finish_reason = delta.finish_reason
            answer.deltas.append(delta)

    def describe(self, request_id: str) -> dict:
        """The request's entry of inspect(), which must be open."""
        return next(entry for entry in self.scheduler.inspect()["requests"] if entry["request_id"] == request_id)


def request(
    request_id: str,
    prompt: Iterable[int],
    *,
    max_tokens: int = 4,
    seed: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    min_tokens: int = 0,
    prompt_logprobs: int | None = None,
    grammar: GrammarSpec | None = None,
    **fields,
) -> GenerateRequest:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        stop_token_ids=stop_token_ids,
        min_tokens=min_tokens,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )
    return GenerateRequest(request_id, list(prompt), sampling, fields.pop("arrival_time", 0.0), **fields)
