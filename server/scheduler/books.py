"""Where every open request stands: in the queue, or in a row with blocks."""

from collections.abc import Iterator
from typing import Any

from paging import InvariantViolation, KVCacheManager
from server.protocol import EngineStats
from server.scheduler.forecast import Forecast
from server.scheduler.inflight import InflightPrefixes
from server.scheduler.queue import RequestQueue
from server.scheduler.request import NO_ROW, Request, RequestStatus


class Books:
    """The scheduler's state and the moves between its parts. Written by: Scheduler and StepPlanner.

    A request is in exactly one of `waiting` and `running`; one that runs has a row, and blocks for its computed tokens.
    """

    def __init__(self, *, manager: KVCacheManager, max_num_seqs: int) -> None:
        self.manager = manager
        self.requests: dict[str, Request] = {}
        self.waiting = RequestQueue()
        self.running = RequestQueue()
        self.inflight = InflightPrefixes()
        self.forecast = Forecast()
        self.num_rows = min(max_num_seqs, manager.max_requests)
        self.free_rows = list(range(self.num_rows))[::-1]
        self.released_rows: list[int] = []
        """Rows that the runner does not know to be free yet."""
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_preemptions = 0
        self.preemption_recomputed_tokens = 0

    def __iter__(self) -> Iterator[Request]:
        """In order of service: those that run, then those that wait."""
        yield from self.running
        yield from self.waiting

    def open(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.add(request)

    @property
    def next_row(self) -> int:
        """The row that seat() will take. Raises IndexError where all are taken."""
        return self.free_rows[-1]

    def seat(self, request: Request, *, num_cached_blocks: int, now: float) -> None:
        """From the queue into next_row, to which the manager has just admitted it."""
        self.waiting.remove(request)
        self.running.add(request)
        num_cached_tokens = num_cached_blocks * self.manager.block_size
        request.status = RequestStatus.RUNNING
        request.row = self.free_rows.pop()
        request.num_computed_tokens = num_cached_tokens
        request.num_committed_blocks = num_cached_blocks
        request.num_hit_tokens = num_cached_tokens
        self.inflight.begin(request)
        if request.scheduled_time is None:
            request.scheduled_time = now
            request.num_cached_tokens = min(num_cached_tokens, request.num_prompt_tokens)
            self.prefix_cache_queries += len(request.token_ids)
            self.prefix_cache_hits += num_cached_tokens
        else:
            self.preemption_recomputed_tokens += max(request.num_lost_tokens - num_cached_tokens, 0)

    def preempt(self, request: Request) -> None:
        """Back to the queue with nothing computed. The prefix cache makes the second time cheap."""
        self._vacate(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        request.num_lost_tokens = request.num_computed_tokens
        request.num_computed_tokens = 0
        self.waiting.add(request)
        self.num_preemptions += 1

    def close(self, request: Request) -> None:
        """Out, from wherever it is; all that it held is free."""
        if request.status is RequestStatus.RUNNING:
            self._vacate(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]

    def _vacate(self, request: Request) -> None:
        self.inflight.end(request, request.num_committed_blocks)
        self.manager.release(request.row)
        self.released_rows.append(request.row)
        self.free_rows.append(request.row)
        self.running.remove(request)
        request.row = NO_ROW

    # -------------------------------------------------------------------------------------------------------- read only

    def stats(self, step_num_tokens: int) -> EngineStats:
        """Gauges as they are now, counters since clear_counters()."""
        usage = self.manager.usage()
        return EngineStats(
            num_running=len(self.running),
            blocks_used=usage.used,
            blocks_cached=usage.cached,
            blocks_free=usage.free,
            step_num_tokens=step_num_tokens,
            prefix_cache_queries=self.prefix_cache_queries,
            prefix_cache_hits=self.prefix_cache_hits,
            num_preemptions=self.num_preemptions,
            preemption_recomputed_tokens=self.preemption_recomputed_tokens,
        )

    def clear_counters(self) -> None:
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_preemptions = 0
        self.preemption_recomputed_tokens = 0

    def describe(self) -> dict[str, Any]:
        """JSON-able: the page map and every open request."""
        usage = self.manager.usage()
        pages = {
            "num_blocks": self.manager.num_blocks,
            "block_size": self.manager.block_size,
            "used": usage.used,
            "cached": usage.cached,
            "free": usage.free,
        }
        return {"pages": pages, "requests": [self._describe(request) for request in self]}

    def _describe(self, request: Request) -> dict[str, Any]:
        is_running = request.row != NO_ROW
        return {
            "request_id": request.request_id,
            "status": request.status.value,
            "row": request.row if is_running else None,
            "blocks": list(self.manager.blocks_of(request.row)) if is_running else [],
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_output_tokens": request.num_output_tokens,
            "num_computed_tokens": request.num_computed_tokens,
            "num_cached_tokens": request.num_cached_tokens,
            "num_preemptions": request.num_preemptions,
            "priority": request.order[0],
            "run_alone": request.run_alone,
            "arrival_time": request.arrival_time,
            "scheduled_time": request.scheduled_time,
            "first_token_time": request.first_token_time,
            "deadline": request.deadline,
        }

    def check_invariants(self) -> None:
        """Raises InvariantViolation. O(blocks + requests): when idle, and in tests."""
        self.manager.check_invariants()
        if sorted(request.request_id for request in self) != sorted(self.requests):
            raise InvariantViolation("a request is in no queue, or in two")
        for queue in (self.running, self.waiting):
            if [request.order for request in queue] != sorted(request.order for request in queue):
                raise InvariantViolation("a queue is out of order")
        rows = [request.row for request in self.running]
        if sorted(rows + self.free_rows) != list(range(self.num_rows)):
            raise InvariantViolation(f"rows {rows} are taken and {self.free_rows} free, of {self.num_rows}")
        for request in self.running:
            room = len(self.manager.blocks_of(request.row)) * self.manager.block_size
            if not 0 <= request.num_computed_tokens <= min(room, request.num_tokens):
                raise InvariantViolation(
                    f"{request.request_id}: {request.num_computed_tokens} of {request.num_tokens} tokens computed, "
                    f"room for {room}"
                )
        if any(request.num_computed_tokens or request.row != NO_ROW for request in self.waiting):
            raise InvariantViolation("a waiting request has a row or computed tokens")
        if any(map(self.manager.blocks_of, self.free_rows)):
            raise InvariantViolation("a free row holds blocks")
        if not self.inflight.owners() <= set(self.running):
            raise InvariantViolation("a block is awaited from a request that does not run")
