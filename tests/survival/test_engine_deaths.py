"""Real engine processes that are killed, stopped and poisoned while they work."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from server.frontend.engine_client import SupervisedEngine
from server.protocol import FinishReason, OutputDelta
from tests.survival.conftest import Started, collect, idle_usage, request, run, tokens

POISON = 256  # a token that no other prompt holds


def engine_pid(client: SupervisedEngine) -> int:
    """The child that serves now: the newest one of this process."""
    listing = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True, text=True, check=True
    ).stdout
    return max(int(line.split()[0]) for line in listing.splitlines() if "server.engine.process" in line)


async def disturbed(client: SupervisedEngine, sig: signal.Signals, times: int, num_requests: int) -> list[list[int]]:
    """Answers while the engine gets the signal so many times, each after some progress."""
    answers = [asyncio.create_task(collect(client, request(i))) for i in range(num_requests)]
    for _ in range(times):
        seen = client.state.num_restarts
        await asyncio.sleep(0.02)
        os.kill(engine_pid(client), sig)
        while client.state.num_restarts == seen:
            await asyncio.sleep(0.01)
        while client.state.phase != "ready":
            await asyncio.sleep(0.01)
    return [tokens(await answer) for answer in answers]


@pytest.mark.parametrize(("sig", "times"), [(signal.SIGKILL, 3), (signal.SIGSTOP, 1)], ids=["kill -9", "stopped"])
def test_streams_go_on_with_the_tokens_that_would_have_come(
    started: Started, undisturbed: list[list[OutputDelta]], sig: signal.Signals, times: int
) -> None:
    """Regression: a token lost, repeated or drawn differently because the engine died or hung."""

    async def main() -> None:
        async with started(step_timeout_s=2) as client:
            assert await disturbed(client, sig, times, 16) == [tokens(answer) for answer in undisturbed]
            assert client.state.num_restarts == times
            assert client.state.num_resumed >= 16
            assert (await idle_usage(client))["used"] == 0

    run(main())


def test_logprobs_continue_over_a_restart(started: Started, undisturbed: list[list[OutputDelta]]) -> None:
    """Regression: log-probabilities missing, or out of step with their tokens, behind a resumption."""

    async def main() -> None:
        async with started() as client:
            answer = asyncio.create_task(collect(client, request(1)))
            await asyncio.sleep(0.02)
            os.kill(engine_pid(client), signal.SIGKILL)
            disturbed = await answer
            values = [
                [(entry.token_id, round(entry.logprob, 4)) for delta in deltas for entry in delta.logprobs or ()]
                for deltas in (undisturbed[1], disturbed)
            ]
            assert values[0] == values[1]
            assert len(values[0]) == 64

    run(main())


@pytest.mark.parametrize("kind", ["exit-on-token", "raise-on-token"])
def test_a_poisoned_request_fails_alone(started: Started, kind: str) -> None:
    """Regression: one request that brings the engine down takes others with it, or restarts engines for ever."""

    async def main() -> None:
        async with started(faults=f"{kind}:{POISON}") as client:
            bad = request(1000, max_tokens=24)
            bad.prompt_token_ids.append(POISON)
            good = [asyncio.create_task(collect(client, request(i, max_tokens=24))) for i in range(20)]
            poisoned = asyncio.create_task(collect(client, bad))
            ends = [(await g)[-1].finish_reason for g in good]
            assert ends == [FinishReason.LENGTH] * 20
            last = (await poisoned)[-1]
            assert last.finish_reason is FinishReason.ERROR
            assert last.error
            assert client.state.num_restarts <= 4
            assert (await idle_usage(client))["used"] == 0

    run(main())


@pytest.mark.parametrize("fault", ["raise-in:launch", "raise-in:collect", "no-memory-in:launch"])
def test_an_exception_in_a_stage_of_the_step_loses_nobody(
    started: Started, undisturbed: list[list[OutputDelta]], fault: str
) -> None:
    """Regression: a step that raises leaves its requests waiting, or its blocks taken."""

    async def main() -> None:
        async with started(faults=fault) as shaky:
            shaken = [tokens(a) for a in await asyncio.gather(*(collect(shaky, request(i)) for i in range(8)))]
            assert shaken == [tokens(answer) for answer in undisturbed[:8]]
            assert shaky.state.num_restarts >= 1
            assert (await idle_usage(shaky))["used"] == 0

    run(main())


def test_a_deadline_holds_while_no_engine_is_there(started: Started) -> None:
    """Regression: a request with a timeout that waits for a restart without end."""

    async def main() -> None:
        async with started() as client:
            os.kill(engine_pid(client), signal.SIGKILL)
            while client.state.phase == "ready":
                await asyncio.sleep(0.01)
            late = request(1, deadline=time.monotonic() + 0.1)
            assert (await collect(client, late))[-1].finish_reason is FinishReason.TIMEOUT

    run(main())


PARENT = """
import asyncio, os, sys
from server.config import EngineConfig, ModelConfig, DeviceConfig
from server.frontend.engine_client import SupervisedEngine
from server.frontend.launcher import ProcessLauncher

async def main():
    config = EngineConfig(model=ModelConfig(model=sys.argv[1]), device=DeviceConfig(device="cpu"))
    client = SupervisedEngine(ProcessLauncher(), config, max_queue=1, step_timeout_s=60)
    await client.start()
    await client.wait_ready()
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["idle", "stopped"])
def test_no_engine_outlives_its_server(checkpoint: Path, stopped: bool) -> None:
    """Regression: kill -9 of the API process that leaves an engine, even a stopped one, with gigabytes of weights."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(checkpoint)], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        child = int(subprocess.check_output(["ps", "--ppid", str(parent.pid), "-o", "pid="]))
        if stopped:
            os.kill(child, signal.SIGSTOP)
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 20
        while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
            assert time.monotonic() < deadline, "the engine is still there"
            time.sleep(0.02)
    finally:
        parent.kill()
        parent.wait()
