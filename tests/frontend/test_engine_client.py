"""The supervisor, played through with engines that die on command."""

import asyncio
import itertools
import socket
import time

import pytest

from server.config import EngineConfig
from server.errors import StartupError
from server.frontend.engine_client import SupervisedEngine
from server.frontend.launcher import EngineHandle
from server.protocol import FinishReason
from tests.frontend.scripted_engine import (
    CONFIG,
    POISON,
    POISON_LATER,
    FailingLauncher,
    Script,
    collect,
    expected,
    launcher,
    request,
    run,
    started,
    tokens,
)


def test_a_request_runs_to_its_end() -> None:
    """Regression: tokens lost, doubled or out of order between the engine and the reader."""

    async def main() -> None:
        script = Script()
        script.hold.set()
        async with started(script) as client:
            deltas = await collect(client, request("a"))
            assert tokens(deltas) == expected(8)
            assert [d.finish_reason for d in deltas if d.finish_reason] == [FinishReason.LENGTH]

    run(main())


@pytest.mark.parametrize("step", [0, 1, 5])
def test_a_dead_engine_loses_no_request(step: int) -> None:
    """Regression: a crash that drops a stream, or repeats or skips a token behind the resumption."""

    async def main() -> None:
        script = Script(die_at_step=step)
        script.hold.set()
        async with started(script) as client:
            answers = await asyncio.gather(*(collect(client, request(f"r{i}")) for i in range(5)))
            assert [tokens(a) for a in answers] == [expected(8)] * 5
            assert client.state.num_restarts == 1
            assert client.state.num_resumed == 5
            assert all(sum(d.num_cached_tokens is not None for d in a) == 1 for a in answers)

    run(main())


def test_a_kill_during_the_restart_accuses_nobody() -> None:
    """Regression: engines that die while loading counted against the requests, or ended the server."""

    async def main() -> None:
        script = Script(die_at_step=2, die_before_ready=2)
        script.hold.set()
        async with started(script) as client:
            assert tokens(await collect(client, request("a"))) == expected(8)
            assert client.state.num_restarts == 3
            assert not any(r.run_alone for r in script.received)

    run(main())


@pytest.mark.parametrize("error", [OSError("no process left"), RuntimeError("can't start new thread")])
def test_a_launch_that_fails_is_tried_again(error: Exception) -> None:
    """Regression: a machine short of processes or threads for a moment ended the supervisor, and nobody was told."""

    async def main() -> None:
        script = Script(die_at_step=2)
        script.hold.set()
        client = SupervisedEngine(FailingLauncher(script, [None, error, None]), CONFIG, max_queue=10, step_timeout_s=20)
        await client.start()
        await client.wait_ready()
        assert tokens(await collect(client, request("a"))) == expected(8)
        assert client.state.num_restarts == 2
        await client.stop()

    run(main())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("poison", [POISON, POISON_LATER])
def test_only_the_poisoned_request_fails(poison: int, ahead: bool) -> None:
    """Regression: good requests failed beside the one that brings the engine down, or a crash loop without end: the end
    of a step acquitted those of the step that was already under way."""

    async def main() -> None:
        script = Script(ahead=ahead)
        async with started(script) as client:
            good = [asyncio.create_task(collect(client, request(f"good{i}"))) for i in range(10)]
            bad = asyncio.create_task(collect(client, request("bad", prompt=[poison])))
            await asyncio.sleep(0)
            script.hold.set()
            for task in good:
                assert tokens(await task) == expected(8)
            last = (await bad)[-1]
            assert last.finish_reason is FinishReason.ERROR
            assert "alone" in (last.error or "")
            assert client.state.num_restarts == 4
            assert tokens(await collect(client, request("after"))) == expected(8)

    run(main())


def test_a_hanging_engine_is_replaced() -> None:
    """Regression: an engine stuck inside a step that kept its requests waiting for ever."""

    async def main() -> None:
        script = Script(hang_at_step=3)
        script.hold.set()
        async with started(script, step_timeout_s=1) as client:
            assert tokens(await collect(client, request("a"))) == expected(8)
            assert client.state.num_restarts == 1

    run(main())


def test_a_stall_shows_before_the_engine_is_replaced() -> None:
    """Regression: /readyz that says 200 while a step hangs, or never says it again."""

    async def main() -> None:
        script = Script(hang_at_step=3)
        script.hold.set()
        async with started(script, step_timeout_s=2) as client:
            answer = asyncio.create_task(collect(client, request("a")))
            seen = []
            while not answer.done():
                if client.state.phase not in seen[-1:]:
                    seen.append(client.state.phase)
                await asyncio.sleep(0.001)
            assert seen[:2] == ["ready", "stalled"]
            assert client.state.phase == "ready"
            assert client.state.num_restarts == 1

    run(main())


@pytest.mark.parametrize("idle_s", [30.0, 1e6])
def test_the_silence_of_an_idle_engine_is_no_hang(idle_s: float) -> None:
    """Regression: the first request after a quiet hour that ends the engine, which has said nothing since."""

    async def main() -> None:
        script = Script()
        async with started(script) as client:
            client._last_event_time -= idle_s
            answer = asyncio.create_task(collect(client, request("a")))
            await asyncio.sleep(0)
            assert client._silence_s() < 1
            script.hold.set()
            assert tokens(await answer) == expected(8)
            client._last_event_time -= idle_s
            await client.inspect()
            assert client.state.num_restarts == 0

    run(main())


def test_a_server_that_was_suspended_does_not_blame_its_engine() -> None:
    """Regression: a laptop that wakes, or a stopped API process, that replaces an engine which did nothing wrong."""

    async def main() -> None:
        script = Script()
        async with started(script, step_timeout_s=1) as client:
            answer = asyncio.create_task(collect(client, request("a")))
            await asyncio.sleep(0.3)
            time.sleep(1.6)  # the event loop stands still, as all of the process would
            await asyncio.sleep(0.01)
            script.hold.set()
            assert tokens(await answer) == expected(8)
            assert client.state.num_restarts == 0

    run(main())


def test_the_wall_clock_may_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a timeout measured by a clock that NTP or an operator sets."""
    clock = itertools.cycle([0.0, 4e9, -1e9])
    monkeypatch.setattr(time, "time", lambda: next(clock))

    async def main() -> None:
        script = Script()
        script.hold.set()
        async with started(script, step_timeout_s=1) as client:
            r = request("a", deadline=time.monotonic() + 20)
            assert tokens(await collect(client, r)) == expected(8)
            assert client.state.num_restarts == 0

    run(main())


def test_a_deadline_holds_while_the_engine_hangs() -> None:
    """Regression: a request with a time limit that waits for the supervisor to notice a hang."""

    async def main() -> None:
        script = Script()
        async with started(script) as client:
            late = request("late", deadline=time.monotonic() - 0.5)
            assert (await collect(client, late))[-1].finish_reason is FinishReason.TIMEOUT
            script.hold.set()
            await collect(client, request("after"))
            assert script.aborted == ["late"]

    run(main())


def test_startup_failure_is_told() -> None:
    """Regression: wait_ready() that hangs, or an engine that is restarted in a loop, when the model can't be loaded."""

    async def main() -> None:
        script = Script(startup_failures=1)
        client = SupervisedEngine(launcher(script), CONFIG, max_queue=1, step_timeout_s=5)
        await client.start()
        with pytest.raises(StartupError, match="no such model"):
            await client.wait_ready()
        assert client.state.phase == "failed"
        assert script.engines == 1
        await client.stop()

    run(main())


@pytest.mark.parametrize("engines_before", [0, 1])
def test_a_bug_in_the_supervisor_is_no_silent_end(engines_before: int, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: an exception nobody had thought of ended the supervisor, and the server stayed, without an engine."""

    async def main() -> None:
        script = Script(die_at_step=2)
        script.hold.set()
        errors = [*[None] * engines_before, ZeroDivisionError()]
        client = SupervisedEngine(FailingLauncher(script, errors), CONFIG, max_queue=10, step_timeout_s=20)
        await client.start()
        if engines_before:
            await client.wait_ready()
            assert (await collect(client, request("a")))[-1].finish_reason is FinishReason.ERROR
        else:
            with pytest.raises(StartupError, match="its log says why"):
                await client.wait_ready()
        assert "its log says why" in await client.wait_failed()
        assert client.state.phase == "failed"
        await client.stop()

    run(main())
    assert any(record.exc_info is not None for record in caplog.records)


def test_an_engine_that_leaves_may_say_how() -> None:
    """Regression: an engine that failed by itself was "killed by signal 9", because we were quicker than its exit."""

    class Leaver:
        """Closes its stream, then takes a moment to exit."""

        def __init__(self) -> None:
            self.socket, theirs = socket.socketpair()
            theirs.close()
            self.end = ""

        def launch(self, config: EngineConfig) -> EngineHandle:
            return self

        def kill(self) -> None:
            self.end = self.end or "killed by signal 9"

        async def wait(self, timeout_s: float) -> str:
            await asyncio.sleep(0.05)
            self.end = self.end or "exit status 1"
            return self.end

    async def main() -> None:
        client = SupervisedEngine(Leaver(), CONFIG, max_queue=10, step_timeout_s=20)
        await client.start()
        with pytest.raises(StartupError, match="exit status 1"):
            await client.wait_ready()
        await client.stop()

    run(main())


def test_a_restart_does_not_show_how_far_the_start_before_came() -> None:
    """Regression: /readyz told of the old engine's warm-up while the new one had not said a word."""

    async def main() -> None:
        script = Script(loads=True, die_at_step=1)
        script.hold.set()
        async with started(script) as client:
            assert client.state.loading is None
            reading = asyncio.create_task(collect(client, request("a")))
            while client.state.phase != "restarting":
                await asyncio.sleep(0)
            assert client.state.loading is None
            assert tokens(await reading) == expected(8)

    run(main())


def test_whoever_does_not_run_counts_as_waiting() -> None:
    """Regression: requests whose grammar compiles, which the scheduler doesn't know yet, were in no gauge."""

    async def main() -> None:
        script = Script()
        async with started(script) as client:
            reading = [asyncio.create_task(collect(client, request(f"r{i}"))) for i in range(3)]
            await asyncio.sleep(0)
            assert client.state.num_waiting == 3
            script.hold.set()
            await asyncio.gather(*reading)
            assert client.state.num_waiting == 0

    run(main())
