"""Reading bodies within their limits."""

import asyncio

import pytest
from starlette.requests import Request

from server.api.transport import FREE_BYTES, BodyReader
from server.errors import BodyTooLarge, Overloaded

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
