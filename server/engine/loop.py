"""The engine's busy loop: drain the inbox, run a step, send what came of it; sleep when there is nothing to do."""

import gc

import msgspec

from server.engine.channel import EngineChannel
from server.engine.core import EngineCore
from server.engine.free_memory import give_back_free_memory
from server.protocol import (
    AbortRequests,
    Command,
    GenerateRequest,
    Inspect,
    Inspection,
    ResetPrefixCache,
    Shutdown,
    StepBegun,
)

_PATIENCE_S = 0.005
"""How long to wait for a command when requests are open but none can run, e.g. while a grammar compiles."""
_REST_AFTER_S = 1.0


class EngineLoop:
    """Runs on one thread until Shutdown arrives. Raises ChannelClosed where the API process went away."""

    def __init__(self, core: EngineCore, channel: EngineChannel) -> None:
        self._core = core
        self._channel = channel
        self._announced: list[str] = []
        self._stopped = False
        self._stuck = False
        self._resting = False

    def run(self) -> None:
        gc.collect()
        gc.freeze()  # the model's objects never die: keep them out of every later collection
        while not self._stopped:
            commands = self._channel.receive(self._patience())
            for command in commands:
                self._apply(command)
            if self._core.has_work:
                self._step()
            elif not commands:
                self._rest()
            if ended := self._core.take_finished():
                self._channel.send(ended)

    def _patience(self) -> float | None:
        if self._core.has_work:
            self._resting = False
            return _PATIENCE_S if self._stuck else 0
        if self._resting:
            return None
        self._core.check_invariants()
        return _REST_AFTER_S

    def _rest(self) -> None:
        """Nothing has come for a while: what the allocator holds for the next step goes back to the system."""
        self._resting = True
        give_back_free_memory()

    def _step(self) -> None:
        batch = self._core.schedule()
        if batch:
            self._announce(batch.step_id, [item.request_id for item in batch.items])
        output = self._core.execute(batch)
        if output:
            self._channel.send(output)
        self._stuck = not batch and not output

    def _announce(self, step_id: int, request_ids: list[str]) -> None:
        same = request_ids == self._announced
        self._announced = request_ids
        self._channel.send(StepBegun(step_id, None if same else request_ids))

    def _apply(self, command: Command) -> None:
        match command:
            case GenerateRequest():
                self._core.add(command)
            case AbortRequests(request_ids):
                self._core.abort(request_ids)
            case Inspect(token):
                self._channel.send(Inspection(token, msgspec.json.encode(self._core.inspect())))
            case ResetPrefixCache():
                self._core.reset_prefix_cache()
            case Shutdown():
                self._stopped = True
