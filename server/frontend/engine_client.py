"""The EngineClient of the server: keeps every open request going, over as many engines as it takes.

launch -> Loading... -> Ready -> resubmit what is open -> events ... -> lost -> accuse the step's requests -> launch
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from server.config import EngineConfig
from server.errors import EngineRestarting, StartupError
from server.frontend.connection import EngineConnection
from server.frontend.engine_status import EngineStatus
from server.frontend.launcher import EngineLauncher
from server.frontend.open_request import OpenRequest
from server.frontend.open_requests import OpenRequests
from server.frontend.steps_under_way import StepsUnderWay
from server.protocol import (
    AbortRequests,
    EngineStats,
    Event,
    FinishReason,
    GenerateRequest,
    Inspect,
    Inspection,
    Loading,
    OutputDelta,
    Ready,
    ResetPrefixCache,
    Shutdown,
    StartupFailed,
    StepBegun,
    StepOutput,
)

logger = logging.getLogger("pageturner.frontend")

_TICK_S = 0.25
_LOAD_TIMEOUT_S = 1800.0
"""Loading says something at least after every tensor; a silence of this length is a hang."""
_END_TIMEOUT_S = 10.0
_LAST_WORDS_S = 1.0
"""For an engine that has closed its stream to end by itself: what we kill can't say how it ended."""
_MAX_FAILED_STARTS = 5
_MAX_BACKOFF_S = 10.0
_STALL_SHARE = 0.25
"""Share of the step timeout after which a silent engine no longer counts as ready."""
_SUSPENSION_S = 1.0
"""A tick that is so late says that this process was stopped or starved: what it last heard is then old news."""
_DEADLINE_GRACE_S = 1.0
"""The engine enforces deadlines between steps; what it owes for so much longer is ended from here."""


class SupervisedEngine:
    """Implements EngineClient. Everything here runs on one event loop, so nothing is locked."""

    def __init__(
        self,
        launcher: EngineLauncher,
        config: EngineConfig,
        *,
        max_queue: int,
        step_timeout_s: float,
        on_step: Callable[[StepOutput], None] = lambda output: None,
    ) -> None:
        """on_step: told of every StepOutput, for the metrics."""
        self._launcher = launcher
        self._on_step = on_step
        self._config = config
        self._step_timeout_s = step_timeout_s
        self._open = OpenRequests(max_waiting=max_queue, abort=self._abort_one)
        self.state = EngineStatus(self._open)
        self._engine: EngineConnection | None = None
        """Set only between Ready and the loss of the connection."""
        self._steps = StepsUnderWay()
        self._last_event_time = time.monotonic()
        self._startup_failure: StartupFailed | None = None
        self._failure = ""
        """Why no further engine will be started."""
        self._inspections: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._inspection_tokens = itertools.count()
        self._draining = False
        self._stopping = False
        self._supervisor: asyncio.Task[None] | None = None
        self._first_ready: asyncio.Future[Ready] | None = None
        self._failed = asyncio.Event()

    # ------------------------------------------------------------------------------------------------ EngineClient

    async def start(self) -> None:
        self._first_ready = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")

    async def wait_ready(self) -> Ready:
        assert self._first_ready is not None, "wait_ready before start"
        return await asyncio.shield(self._first_ready)

    async def wait_failed(self) -> str:
        """Waits until no further engine will be started; says why. Normally that never comes."""
        await self._failed.wait()
        return self._failure

    async def generate(self, request: GenerateRequest) -> AsyncIterator[OutputDelta]:
        open_request = self._admit(request)
        try:
            while True:
                delta = await open_request.next_delta()
                if open_request.refusal is not None:
                    raise open_request.refusal
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self._open.forget(open_request)

    def abort(self, request_ids: list[str]) -> None:
        if self._engine is not None:
            self._engine.send(AbortRequests(request_ids))
            return
        for request_id in request_ids:
            if open_request := self._open.get(request_id):
                open_request.end(FinishReason.ABORT)

    async def inspect(self) -> dict[str, Any]:
        if self._engine is None:
            raise EngineRestarting(f"the engine is {self.state.phase}; there is nothing to inspect yet")
        token = next(self._inspection_tokens)
        self._begin_owing()
        answer = self._inspections[token] = asyncio.get_running_loop().create_future()
        self._engine.send(Inspect(token))
        try:
            async with asyncio.timeout(self._step_timeout_s):
                payload: dict[str, Any] = await answer
                return payload
        except TimeoutError:
            raise EngineRestarting("the engine does not answer") from None
        finally:
            del self._inspections[token]

    async def reset_prefix_cache(self) -> None:
        if self._engine is not None:
            self._engine.send(ResetPrefixCache())

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        self.state.phase = "draining"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._open:
                    await asyncio.sleep(_TICK_S / 5)
        self._open.end_all(FinishReason.ABORT, "the server is shutting down")

    async def stop(self, *, at_once: bool = False) -> None:
        """at_once: without asking first. An engine that still loads is never asked: it could not listen."""
        self._stopping = True
        self.state.phase = "stopped"
        if self._supervisor is None:
            return
        if self._engine is not None and not at_once:
            self._engine.send(Shutdown())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_TIMEOUT_S / 2):
                    await asyncio.shield(self._supervisor)
        self._supervisor.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._supervisor

    # ------------------------------------------------------------------------------------------------ open requests

    def _admit(self, request: GenerateRequest) -> OpenRequest:
        if self._draining or self._stopping:
            raise EngineRestarting("the server is shutting down; it takes no new requests", retry_after=5)
        if self.state.ready is None or self.state.phase == "failed":
            raise EngineRestarting(f"the model is not ready yet: {self.state.phase}", retry_after=2)
        self._begin_owing()
        open_request = self._open.add(request)
        if self._engine is not None:
            self._submit(open_request, self._engine)
        return open_request

    def _submit(self, open_request: OpenRequest, engine: EngineConnection) -> None:
        self.state.num_resumed += open_request.submitted
        engine.send(open_request.to_submit())

    def _abort_one(self, request_id: str) -> None:
        if self._engine is not None:
            self._engine.send(AbortRequests([request_id]))

    # ------------------------------------------------------------------------------------------------ events

    def _on_event(self, connection: EngineConnection, event: Event) -> None:
        self._last_event_time = time.monotonic()
        if self.state.phase == "stalled":
            self.state.phase = "ready"
        match event:
            case StepOutput():
                self._steps.end(event.step_id)
                self._on_step_output(event)
            case StepBegun(step_id, request_ids):
                self._steps.begin(step_id, request_ids)
                if request_ids is not None:
                    self._open.mark_started(request_ids)
            case Loading():
                self.state.loading = event
                if self.state.ready is None:
                    self.state.phase = event.phase
            case Ready():
                self._on_ready(connection, event)
            case StartupFailed():
                self._startup_failure = event
            case Inspection(token, payload):
                if (answer := self._inspections.get(token)) and not answer.done():
                    answer.set_result(msgspec.json.decode(payload))

    def _on_step_output(self, output: StepOutput) -> None:
        self.state.stats = output.stats
        self.state.last_step_time = output.time
        self._on_step(output)
        for delta in output.deltas:
            if open_request := self._open.get(delta.request_id):
                open_request.push(delta)

    def _on_ready(self, connection: EngineConnection, ready: Ready) -> None:
        self.state.ready, self.state.loading = ready, None
        self.state.phase = "draining" if self._draining else "ready"
        self._engine = connection
        for open_request in self._open:
            if not open_request.finished:
                self._submit(open_request, connection)
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_result(ready)

    # ------------------------------------------------------------------------------------------------ supervision

    async def _supervise(self) -> None:
        try:
            await self._keep_an_engine()
        except Exception:
            logger.exception("the engine's supervisor failed")
            self._give_up("the server failed in looking after its engine; its log says why")

    async def _keep_an_engine(self) -> None:
        failed_starts = 0
        while not self._stopping:
            try:
                how = await self._run_one_engine()
            except (OSError, RuntimeError) as error:  # no process, file or thread to be had: as passing as a crash
                how = str(error)
            if self._stopping:
                return
            was_ready, self._engine = self._engine is not None, None
            failed_starts = 0 if was_ready else failed_starts + 1
            if self.state.ready is None or failed_starts >= _MAX_FAILED_STARTS:
                failure = self._startup_failure
                self._give_up(failure.message if failure else f"the engine ended while it was starting ({how})")
                return
            self._book_the_crash(how)
            await asyncio.sleep(min(_MAX_BACKOFF_S, 0.5 * 2**failed_starts) if failed_starts else 0)

    async def _run_one_engine(self) -> str:
        """From launch to loss; says how it ended. Leaves no process behind, not even when cancelled."""
        self._last_event_time = time.monotonic()
        self._startup_failure = self.state.loading = None
        handle = self._launcher.launch(self._config)
        connection: EngineConnection | None = None
        try:
            connection = await EngineConnection.open(handle.socket, self._config, self._on_event)
            await self._watch(connection)
            if connection.lost.done():
                await handle.wait(_LAST_WORDS_S)
        finally:
            handle.kill()
            if connection is not None:
                connection.close()
            handle.socket.close()
            how = await handle.wait(_END_TIMEOUT_S)
        return how

    async def _watch(self, connection: EngineConnection) -> None:
        """Returns when the engine is lost or hangs. Meanwhile ends requests whose deadline no engine keeps."""
        while not connection.lost.done():
            begin = time.monotonic()
            await asyncio.wait([connection.lost], timeout=_TICK_S)
            now = time.monotonic()
            if now - begin > _TICK_S + _SUSPENSION_S:
                self._last_event_time = now
            limit = self._step_timeout_s if self._engine is connection else _LOAD_TIMEOUT_S
            if self._silence_s() > limit:
                logger.error("no sign of life from the engine for %.3g s: ending it", limit)
                return
            if self.state.phase == "ready" and self._silence_s() > limit * _STALL_SHARE:
                logger.warning("no sign of life from the engine for %.3g s: not ready", limit * _STALL_SHARE)
                self.state.phase = "stalled"
            self._open.expire(grace_s=0.0 if self._engine is None else _DEADLINE_GRACE_S)

    def _is_owed(self) -> bool:
        """Whether an engine that works would send something soon."""
        return self._engine is None or bool(self._steps) or bool(self._inspections) or self._open.num_unfinished > 0

    def _begin_owing(self) -> None:
        """Call it before asking an engine for something: the silence of an idle one does not count."""
        if not self._is_owed():
            self._last_event_time = time.monotonic()

    def _silence_s(self) -> float:
        """Seconds without an event while the engine owes one."""
        return time.monotonic() - self._last_event_time if self._is_owed() else 0.0

    def _book_the_crash(self, how: str) -> None:
        """Counts it, and accuses the requests of the step in which it happened."""
        self.state.num_restarts += 1
        self.state.phase = "draining" if self._draining else "restarting"
        accused = self._steps.suspects
        logger.error(
            "the engine is gone (%s), %d requests in its step; starting a new one to resume %d",
            how,
            len(accused),
            len(self._open),
        )
        for request_id in accused:
            open_request = self._open.get(request_id)
            if open_request is not None and open_request.accuse():
                open_request.end(FinishReason.ERROR, "the engine fails on this request, even when it runs alone")
        self._steps.clear()
        self.state.stats = EngineStats()

    def _give_up(self, message: str) -> None:
        """Whoever waits for the engine, or for its failure, says so to the operator."""
        self._failure, self._engine = message, None
        self.state.phase = "failed"
        self._open.end_all(FinishReason.ERROR, f"the engine can't be started: {message}")
        self._failed.set()
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_exception(StartupError(message))
            self._first_ready.exception()  # who has stopped waiting for it needs no warning that nobody read it
