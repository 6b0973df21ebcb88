"""The loop between two requests."""

from typing import Any

import pytest

from server.engine import loop
from server.engine.loop import EngineLoop
from server.protocol import Command, Inspect, Shutdown


class Idle:
    """A core without work, and a channel that delivers what a script says. None: nothing comes in time."""

    has_work = False

    def __init__(self, script: list[Command | None]) -> None:
        self.script = script
        self.timeouts: list[float | None] = []
        self.num_checks = 0

    def receive(self, timeout: float | None) -> list[Command]:
        self.timeouts.append(timeout)
        command = self.script.pop(0)
        assert command is not None or timeout is not None, "would wait for ever"
        return [] if command is None else [command]

    def send(self, event: Any) -> None:
        pass

    def check_invariants(self) -> None:
        self.num_checks += 1

    def take_finished(self) -> None:
        pass

    def inspect(self) -> dict[str, Any]:
        return {}


def test_an_idle_engine_gives_memory_back_once_and_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards laptops: megabytes of free heap kept for ever, or an idle engine that wakes up every second."""
    trims: list[int] = []
    monkeypatch.setattr(loop, "give_back_free_memory", lambda: trims.append(1))
    idle = Idle([Inspect(1), None, Inspect(2), Shutdown()])
    EngineLoop(idle, idle).run()
    assert idle.timeouts == [1.0, 1.0, None, None]
    assert len(trims) == 1
    assert idle.num_checks == 2
