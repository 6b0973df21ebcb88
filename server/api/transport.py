"""Reading a body within its limit, and noticing that a client has gone."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.errors import ClientGone
from server.errors import BodyTooLarge, Overloaded

FREE_BYTES = 64 << 10
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: readers of event streams skip it."""
_T = TypeVar("_T")


class BodyReader:
    """Reads bodies within their limit, and all that are being read together within theirs. Written by: itself.

    max_bytes: of one body. max_total_bytes: of all, what each has above FREE_BYTES; so small ones get through always.
    """

    def __init__(self, *, max_bytes: int, max_total_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes_left = max_total_bytes

    async def read(self, request: Request) -> bytes:
        """Raises BodyTooLarge and Overloaded as soon as that is known, ClientGone where the client hangs up."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_bytes:
            raise self._too_large()
        chunks: list[bytes] = []
        size = taken = 0
        try:
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > self._max_bytes:
                    raise self._too_large()
                more = max(size - FREE_BYTES, 0) - taken
                if more > self._bytes_left:
                    raise Overloaded("Too many large requests are arriving at once; try again later", retry_after=2.0)
                taken += more
                self._bytes_left -= more
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
        finally:
            self._bytes_left += taken

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The request body is larger than {self._max_bytes} bytes")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Result of `work`, which is cancelled when the client hangs up; then ClientGone. The body must have been read."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return await task
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, one ASGI message a frame.

    frames: complete events as bytes. What it raises before anything was sent becomes an ordinary error answer; after
    it, an event made by `error_frame`. `closing` is the last frame in any case.
    keep_alive_s: after so long without a frame a comment is sent, before the first one, too, which then decides the
    status; proxies cut connections that say nothing. 0: never.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        error_frame: Callable[[Exception], bytes],
        closing: bytes,
        keep_alive_s: float,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._error_frame = error_frame
        self._closing = closing
        self._keep_alive_s = keep_alive_s
        self._begun = False
        self._last_time = time.monotonic()
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        keeper = asyncio.ensure_future(self._keep_alive(send)) if self._keep_alive_s else None
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    await self._send(send, frame)
        except Exception as error:
            if not self._begun:
                raise
            await self._send(send, self._error_frame(error))
        finally:
            if keeper is not None:
                keeper.cancel()
        await self._send(send, self._closing, more=False)

    async def _send(self, send: Send, frame: bytes, *, more: bool = True) -> None:
        async with self._sending:  # a comment of the keeper's must not come between the head and the first frame
            if not self._begun:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                self._begun = True
            await send({"type": "http.response.body", "body": frame, "more_body": more})
            self._last_time = time.monotonic()

    async def _keep_alive(self, send: Send) -> None:
        while True:
            silence_s = time.monotonic() - self._last_time
            if silence_s >= self._keep_alive_s:
                await self._send(send, KEEP_ALIVE)
            else:
                await asyncio.sleep(self._keep_alive_s - silence_s)
