"""The engine without its surroundings: no sockets, no waiting, no torch. One step is two calls."""

import time
from collections import deque
from typing import Any

from server.engine.grammar_gate import GrammarGate
from server.protocol import GenerateRequest, StepOutput
from server.runner.interface import Runner
from server.scheduler.batch import ScheduledBatch
from server.scheduler.scheduler import Scheduler


class EngineCore:
    """Wires the scheduler to the runner.

    With lookahead a step is launched before the results of the one before are there: the device never waits for the
    host to decide what comes next. A device that computes while it is being asked, as a CPU does, has nothing to gain.

    An exception in execute() leaves the runner's rows and the scheduler's books in doubt, so it is not handled here:
    the process ends with it, and the API process resumes every request on a fresh engine.
    """

    def __init__(self, *, scheduler: Scheduler, runner: Runner, gate: GrammarGate, lookahead: bool = False) -> None:
        self._lookahead = lookahead
        self._under_way: deque[tuple[ScheduledBatch, object]] = deque()
        """Launched steps and the runner's handles, the oldest first."""
        self._scheduler = scheduler
        self._runner = runner
        self._gate = gate

    def add(self, request: GenerateRequest) -> None:
        if not self._gate.hold(request):
            self._scheduler.add(request, time.monotonic())

    def abort(self, request_ids: list[str]) -> None:
        self._enter(self._gate.take(request_ids))
        self._scheduler.abort(request_ids)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or len(self._gate) > 0 or bool(self._under_way)

    def schedule(self) -> ScheduledBatch:
        """Decides the next step. An empty batch means that nothing can run now; ends of requests may have come up."""
        self._enter(self._gate.release())
        return self._scheduler.schedule(time.monotonic())

    def _enter(self, requests: list[GenerateRequest]) -> None:
        for request in requests:
            self._scheduler.add(request, time.monotonic())

    def execute(self, batch: ScheduledBatch) -> StepOutput | None:
        """Launches the step, then books the results of the one that is due: this one, or with lookahead the one before.

        None: none is due. With an empty batch, a step under way is.
        """
        if batch:
            self._under_way.append((batch, self._runner.launch(batch)))
        if len(self._under_way) <= (1 if self._lookahead and batch else 0):
            return None
        batch, handle = self._under_way.popleft()
        return self._scheduler.update(batch, self._runner.collect(handle), time.monotonic())

    def take_finished(self) -> StepOutput | None:
        """Requests that ended outside a step (aborted, timed out, refused), if there are any."""
        return self._scheduler.take_finished(time.monotonic())

    def reset_prefix_cache(self) -> None:
        self._scheduler.reset_prefix_cache()

    def inspect(self) -> dict[str, Any]:
        return self._scheduler.inspect()

    def check_invariants(self) -> None:
        """Raises AssertionError where the books don't balance. Cheap enough for each time the engine falls idle."""
        self._scheduler.check_invariants()
