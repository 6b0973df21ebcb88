"""Continuous batching: what each step computes, and what its results mean.

    batch = scheduler.schedule(now)
    ...the runner computes it...
    output = scheduler.update(batch, sampled, now)

The next step may be scheduled while one is under way, before its update(): its tokens are then awaited ones.

There are no phases. A running request has tokens that are computed and tokens to run; a step takes from all of them
what its token budget allows. Chunked prefill, prefix hits, decode and recomputing after a preemption are that one case.
"""

from typing import Any

from paging import KVCacheManager, extend_hashes
from server.config import SchedulerConfig
from server.errors import ConfigError
from server.protocol import FinishReason, GenerateRequest, OutputDelta, StepOutput, TokenLogprobs
from server.scheduler.batch import AWAITED, AdmittedRow, SampledRow, SampledTokens, ScheduledBatch, ScheduledItem
from server.scheduler.books import Books
from server.scheduler.capacity import why_it_never_fits
from server.scheduler.planner import StepPlan, StepPlanner
from server.scheduler.request import Request, RequestStatus, make_request
from server.scheduler.turns import Turns

NO_STEP = -1
EMPTY_BATCH = ScheduledBatch(NO_STEP, [], [], [])
_NEVER = float("inf")


class Scheduler:
    """Owns every open request and the KV cache's books. Synchronous, no I/O, no clock.

    `now` is time.monotonic() seconds. A request's blocks are free for others as soon as it ends, even if the step under
    way still computes a token of it: the device works in order, so that token lies in a place that nobody reads before
    the next owner has written it.
    """

    def __init__(self, *, config: SchedulerConfig, manager: KVCacheManager, max_model_len: int) -> None:
        """Raises ConfigError where a step could not give each running request a token."""
        if config.max_num_batched_tokens < config.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({config.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({config.max_num_seqs}): a step gives each running request at least one token"
            )
        self._has_priorities = config.policy == "priority"
        self._manager = manager
        self._block_size = manager.block_size
        self._max_model_len = max_model_len
        self._books = Books(manager=manager, max_num_seqs=config.max_num_seqs)
        self._turns = Turns()
        self._planner = StepPlanner(books=self._books, config=config)
        self._ended: list[OutputDelta] = []
        """Of requests that ended outside a step; the next StepOutput carries them."""
        self._num_added = 0
        self._num_steps = 0
        self._under_way: dict[int, list[Request]] = {}
        """Of each scheduled step without an update(), its items' requests. A request may have ended meanwhile, and its
        id be in use again."""
        self._next_deadline = _NEVER
        """No open request's deadline is earlier."""

    # ------------------------------------------------------------------------------------------------ requests in, out

    @property
    def has_work(self) -> bool:
        """Some request is open, so schedule() will find something to run."""
        return bool(self._books.requests)

    def add(self, request: GenerateRequest, now: float) -> None:
        """Queues it, or ends it at once where it can never run or has nothing left to do.

        Raises ValueError for an id that is in use: its deltas could not be told from the other one's.
        """
        if request.request_id in self._books.requests:
            raise ValueError(f"request id {request.request_id} is in use")
        self._num_added += 1
        priority = request.priority if self._has_priorities else 0
        new = make_request(request, order=(priority, self._turns.take(request.client), self._num_added))
        self._books.open(new)
        refusal = why_it_never_fits(
            new.num_prompt_tokens,
            request.sampling.max_tokens,
            max_model_len=self._max_model_len,
            num_blocks=self._manager.num_blocks,
            block_size=self._block_size,
        )
        if refusal is not None:
            self._ended.append(self._end(new, FinishReason.ERROR, error=refusal))
        elif new.num_output_tokens and (reason := new.finish_reason_now()):
            self._ended.append(self._end(new, reason))
        elif new.deadline is not None:
            self._next_deadline = min(self._next_deadline, new.deadline)

    def abort(self, request_ids: list[str]) -> None:
        """Ends them and frees their blocks now; unknown ids are ignored. Allowed while a step is under way."""
        for request_id in request_ids:
            request = self._books.requests.get(request_id)
            if request is not None:
                self._ended.append(self._end(request, FinishReason.ABORT))

    def take_finished(self, now: float) -> StepOutput | None:
        """For a moment without a step: what ended outside one, if anything did. update() carries it too."""
        return self._output(NO_STEP, [], 0, now) if self._ended else None

    # ------------------------------------------------------------------------------------------------------- a step out

    def schedule(self, now: float) -> ScheduledBatch:
        """The next step. Empty where nothing is open, or nothing can run until the step under way is updated.

        At most one is under way. Passed deadlines are enforced here, waiting or running.
        """
        assert len(self._under_way) <= 1
        if now >= self._next_deadline:
            self._expire(now)
        if self._under_way and self._must_wait():
            return EMPTY_BATCH
        return self._build(self._planner.plan(now))

    def _must_wait(self) -> bool:
        """Whether the next step depends on what the one under way samples, or must not be on the device beside it."""
        waiting = self._books.waiting
        if len(waiting) and waiting[0].run_alone:
            return True
        return any(request.must_know_its_token for step in self._under_way.values() for request in step)

    def _expire(self, now: float) -> None:
        self._next_deadline = _NEVER
        for request in list(self._books):
            if request.deadline is None:
                continue
            if request.deadline <= now:
                self._ended.append(self._end(request, FinishReason.TIMEOUT))
            else:
                self._next_deadline = min(self._next_deadline, request.deadline)

    def _build(self, plan: StepPlan) -> ScheduledBatch:
        if not plan.num_new_tokens:
            return EMPTY_BATCH
        items = []
        for request, num_new in plan.num_new_tokens.items():
            start = request.num_computed_tokens
            end = start + num_new
            samples = end == request.num_tokens
            tokens = request.token_ids[start:end] or [AWAITED]
            items.append(ScheduledItem(request.request_id, request.row, start, tokens, samples))
            request.num_computed_tokens = end
            request.num_awaited_tokens += samples
        admitted = [
            AdmittedRow(r.request_id, r.row, r.sampling, r.prompt_token_ids, r.output_token_ids) for r in plan.admitted
        ]
        for request in plan.admitted:
            self._turns.serve(request.order[1])
        released, self._books.released_rows = self._books.released_rows, []
        self._num_steps += 1
        self._under_way[self._num_steps] = list(plan.num_new_tokens)
        return ScheduledBatch(self._num_steps, items, admitted, released)

    # --------------------------------------------------------------------------------------------------- its results in

    def update(self, batch: ScheduledBatch, sampled: SampledTokens, now: float) -> StepOutput:
        """Takes the results of the oldest step under way. Requests that have ended meanwhile are skipped."""
        rows = {row.request_id: row for row in sampled.rows}
        block_size = self._block_size
        deltas: list[OutputDelta] = []
        num_tokens = 0
        for item, request in zip(batch.items, self._under_way.pop(batch.step_id), strict=True):
            num_tokens += len(item.token_ids)
            request.num_awaited_tokens -= item.samples
            if request.status is RequestStatus.FINISHED:
                continue
            if item.request_id in sampled.failed:
                deltas.append(self._end(request, FinishReason.ERROR, error=sampled.failed[item.request_id]))
                continue
            num_full = item.end // block_size
            if num_full > request.num_committed_blocks and request.status is RequestStatus.RUNNING:
                self._commit(request, num_full)
            if item.samples:
                deltas.append(self._absorb(request, rows[item.request_id], now))
        return self._output(batch.step_id, deltas, num_tokens, now)

    def _commit(self, request: Request, num_full: int) -> None:
        """Lets others find its first num_full blocks."""
        if self._manager.enable_prefix_cache:
            hashes = request.block_hashes
            extend_hashes(hashes, request.token_ids, block_size=self._block_size, salt=request.cache_salt)
            self._manager.commit(request.row, hashes[:num_full])
            self._books.inflight.end(request, request.num_committed_blocks, num_full)
        request.num_committed_blocks = num_full

    def _absorb(self, request: Request, row: SampledRow, now: float) -> OutputDelta:
        """Appends what was sampled, up to the token that ends the request."""
        prompt_logprobs = row.prompt_logprobs if request.owes_prompt_logprobs else None
        tokens = request.token_ids
        accepted = 0
        # max_tokens may be 0: then the prompt was all that was wanted.
        reason = FinishReason.LENGTH if len(tokens) >= request.max_num_tokens else None
        while reason is None and accepted < len(row.token_ids):
            tokens.append(row.token_ids[accepted])
            accepted += 1
            reason = request.finish_reason_now()
            request.run_alone = False  # it has got through a step: no longer under suspicion
        if reason is None and request.is_announced and row.logprobs is None:
            return OutputDelta(request.request_id, row.token_ids)
        if request.first_token_time is None:
            request.first_token_time = now
        token_ids = row.token_ids[:accepted]
        logprobs = row.logprobs[:accepted] if row.logprobs is not None else None
        if reason is not None:
            return self._end(request, reason, token_ids=token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        return self._delta(request, token_ids=token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs | None] | None = None,
        error: str | None = None,
    ) -> OutputDelta:
        """The only way out: frees what the request holds and makes its last delta."""
        self._books.close(request)
        self._turns.leave(request.client)
        request.finish_reason = reason
        self._books.forecast.learn(request)
        return self._delta(
            request, token_ids=token_ids or [], logprobs=logprobs, prompt_logprobs=prompt_logprobs, error=error
        )

    def _delta(
        self,
        request: Request,
        *,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        prompt_logprobs: list[TokenLogprobs | None] | None,
        error: str | None = None,
    ) -> OutputDelta:
        is_first = not request.is_announced
        request.is_announced = True
        return OutputDelta(
            request.request_id,
            token_ids,
            finish_reason=request.finish_reason,
            stop_token_id=token_ids[-1] if request.finish_reason is FinishReason.STOP and token_ids else None,
            num_cached_tokens=request.num_cached_tokens if is_first else None,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            scheduled_time=request.scheduled_time if is_first else None,
            error=error,
        )

    def _output(self, step_id: int, deltas: list[OutputDelta], num_tokens: int, now: float) -> StepOutput:
        """Ends outside a step come first: none of them is of a request that this step gave a token."""
        ended, self._ended = self._ended, []
        stats = self._books.stats(num_tokens)
        self._books.clear_counters()
        return StepOutput(step_id=step_id, deltas=ended + deltas, stats=stats, time=now)

    # ------------------------------------------------------------------------------------------------------ side doors

    def inspect(self) -> dict[str, Any]:
        """JSON-able: {"pages": block counts, "requests": the open ones in order of service}."""
        return self._books.describe()

    def reset_prefix_cache(self) -> None:
        """Nothing cached so far is hit again; running requests go on."""
        self._manager.reset_prefix_cache()

    def check_invariants(self) -> None:
        """Raises InvariantViolation (an AssertionError) where the books don't balance. When idle, and in tests."""
        self._books.check_invariants()
