"""What readers, the queue and a server that closes see of the supervisor: nobody dies here."""

import asyncio
import time

import pytest

from server.errors import EngineRestarting, Overloaded
from server.frontend.service_rate import ServiceRate
from server.protocol import FinishReason, OutputDelta
from tests.frontend.scripted_engine import (
    Script,
    collect,
    expected,
    request,
    run,
    started,
    tokens,
)


def test_unread_deltas_are_merged() -> None:
    """Regression: a slow reader that makes the server keep one object a token."""

    async def main() -> None:
        script = Script()
        script.hold.set()
        async with started(script) as client:
            stream = client.generate(request("slow", max_tokens=50))
            first = await anext(stream)
            await collect(client, request("other", max_tokens=60))
            rest = [delta async for delta in stream]
            assert tokens([first, *rest]) == expected(50)
            assert len(rest) <= 1

    run(main())


def test_a_reader_that_leaves_aborts_the_request() -> None:
    """Regression: a disconnected client whose request keeps its blocks until it is done."""

    async def main() -> None:
        script = Script()
        script.hold.set()
        async with started(script) as client:
            stream = client.generate(request("gone", max_tokens=100_000))
            await anext(stream)
            await stream.aclose()
            await collect(client, request("after"))
            assert script.aborted == ["gone"]

    run(main())


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    """Regression: an unbounded queue, or a 429 without Retry-After."""

    async def main() -> None:
        script = Script()
        async with started(script, max_queue=2) as client:
            waiting = [asyncio.create_task(collect(client, request(f"w{i}"))) for i in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded) as refusal:
                await anext(client.generate(request("late")))
            assert refusal.value.retry_after
            script.hold.set()
            await asyncio.gather(*waiting)
            assert tokens(await collect(client, request("now"))) == expected(8)

    run(main())


def test_a_greedy_client_makes_way_in_a_full_queue() -> None:
    """Regression: one client that fills the queue, so that everyone else is refused."""

    async def main() -> None:
        script = Script()
        async with started(script, max_queue=4) as client:
            greedy = [asyncio.create_task(collect(client, request(f"g{i}", client="greedy"))) for i in range(4)]
            await asyncio.sleep(0)
            modest = [asyncio.create_task(collect(client, request(f"m{i}", client="modest"))) for i in range(3)]
            script.hold.set()
            ends = await asyncio.gather(*greedy, *modest, return_exceptions=True)
            refused = [isinstance(end, Overloaded) for end in ends]
            assert refused == [False, False, True, True, False, False, True]
            assert all(tokens(end) == expected(8) for end in ends if not isinstance(end, BaseException))

    run(main())


def test_a_refused_client_is_told_the_present_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a Retry-After of minutes because the server was idle for hours before."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    rate = ServiceRate()
    for _ in range(10):
        now += 2.0
        rate.count_finished()
    assert rate.seconds_for(10) == pytest.approx(18, abs=3)
    now += 3600
    assert rate.seconds_for(10) == 5


def test_drain_finishes_open_requests_and_refuses_new_ones() -> None:
    """Regression: SIGTERM that cuts off running answers, or lets new ones in."""

    async def main() -> None:
        script = Script()
        async with started(script) as client:
            running = asyncio.create_task(collect(client, request("running")))
            await asyncio.sleep(0.01)
            drain = asyncio.create_task(client.drain(20))
            await asyncio.sleep(0)
            with pytest.raises(EngineRestarting):
                await anext(client.generate(request("late")))
            script.hold.set()
            assert tokens(await running) == expected(8)
            await drain

    run(main())


def test_drain_ends_what_is_left_at_the_deadline() -> None:
    """Regression: a shutdown that waits for ever for a request that does not end."""

    async def main() -> None:
        script = Script()
        async with started(script) as client:
            running = asyncio.create_task(collect(client, request("endless")))
            await asyncio.sleep(0.01)
            await client.drain(0.05)
            assert (await running)[-1].finish_reason is FinishReason.ABORT

    run(main())


def test_prompt_logprobs_are_not_asked_for_twice() -> None:
    """Regression: a resumed request that delivers its prompt's log-probabilities again."""

    async def main() -> None:
        script = Script()
        script.hold.set()
        async with started(script) as client:
            r = request("a")
            stream = client.generate(r)
            await anext(stream)
            open_request = client._open.get("a")
            assert open_request is not None
            open_request.push(OutputDelta("a", [], prompt_logprobs=[None]))
            assert open_request.to_submit().sampling.prompt_logprobs is None
            await stream.aclose()

    run(main())


def test_inspect_asks_the_engine() -> None:
    """Regression: /debug that shows the API process's idea instead of the engine's."""

    async def main() -> None:
        async with started(Script()) as client:
            assert await client.inspect() == {"pages": 1}

    run(main())
