"""Reading bodies within their limits, and streams that fall silent."""

import asyncio
import re
from collections.abc import AsyncGenerator

import pytest
from starlette.requests import Request
from starlette.types import Message

from server.api.sse import DONE
from server.api.transport import FREE_BYTES, KEEP_ALIVE, BodyReader, EventStream
from server.errors import BodyTooLarge, InvalidRequest, Overloaded

LARGE = 1 << 20


def arriving(*chunks: bytes, hold: asyncio.Event | None = None) -> Request:
    """A request whose last chunk comes once `hold` is set."""
    left = list(chunks)

    async def receive() -> dict[str, object]:
        if len(left) == 1 and hold is not None:
            await hold.wait()
        chunk = left.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(left)}

    return Request({"type": "http", "headers": []}, receive)


def test_large_bodies_share_a_limit_and_give_it_back() -> None:
    """Regression: a thousand clients that each send the largest body allowed, and fill the memory together."""

    async def main() -> None:
        reader = BodyReader(max_bytes=LARGE, max_total_bytes=2 * LARGE)
        hold = asyncio.Event()
        body = b"x" * (LARGE - 1)
        first = [asyncio.create_task(reader.read(arriving(body, b"y", hold=hold))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await reader.read(arriving(body, b"y"))
        assert await reader.read(arriving(b"z" * FREE_BYTES)) == b"z" * FREE_BYTES
        hold.set()
        assert [len(done) for done in await asyncio.gather(*first)] == [LARGE, LARGE]
        assert len(await reader.read(arriving(body, b"y"))) == LARGE
        with pytest.raises(BodyTooLarge):
            await reader.read(arriving(body, b"yy"))

    asyncio.run(main())


class _Wire:
    """What an answer sends, and a wait for the comment that fills a silence."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.body = b""
        self.commented = asyncio.Event()

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        assert self.status is not None, "a body before its head"
        self.body += message["body"]
        if message["body"] == KEEP_ALIVE:
            self.commented.set()


def stream(frames: AsyncGenerator[bytes, None], keep_alive_s: float) -> EventStream:
    return EventStream(
        frames, error_frame=lambda error: f"data: {error}\n\n".encode(), closing=DONE, keep_alive_s=keep_alive_s
    )


SILENT, SPOKEN = 1e-3, 1e9


@pytest.mark.parametrize(
    ("script", "keep_alive_s", "body"),
    [
        ([b"a", b"b"], SPOKEN, b"ab"),
        ([b"a", b"b"], 0.0, b"ab"),
        ([b"a", "silence", b"b"], SILENT, b"a" + KEEP_ALIVE + b"b"),
        (["silence", b"a"], SILENT, KEEP_ALIVE + b"a"),
        (["silence", InvalidRequest("late")], SILENT, KEEP_ALIVE + b"data: late\n\n"),
        ([b"a", InvalidRequest("late")], SPOKEN, b"adata: late\n\n"),
        ([InvalidRequest("early")], SPOKEN, None),
    ],
)
def test_a_silent_stream_is_kept_alive(
    script: list[bytes | str | Exception], keep_alive_s: float, body: bytes | None
) -> None:
    """Regression: proxies that cut a stream in the queue, or over a restart; and a 400 that had become a 200."""

    async def main() -> None:
        wire = _Wire()

        async def frames() -> AsyncGenerator[bytes, None]:
            for item in script:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, bytes):
                    yield item
                else:
                    wire.commented.clear()
                    await wire.commented.wait()

        async with asyncio.timeout(10):
            answer = stream(frames(), keep_alive_s)({}, wire.receive, wire.send)
            if body is None:
                with pytest.raises(InvalidRequest):
                    await answer
                assert wire.status is None
                return
            await answer
        seen = re.sub(
            b"(" + re.escape(KEEP_ALIVE) + b")+", KEEP_ALIVE, wire.body
        )  # a slow machine is silent for longer
        assert (wire.status, seen) == (200, body + DONE)

    asyncio.run(main())
