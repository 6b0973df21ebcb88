"""HTTP/1.1 connections with limits on what uvicorn leaves open: slow senders, stuck readers, endless headers."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

_LINGER_S = 5.0
_LINGER_BYTES = 64 << 20


class _HeadTooLong(Exception):
    """Ends the parsing of a request."""


class _LingeringTransport:
    """A transport whose close() lets a peer finish that is still sending, so that it reads its answer.

    A socket closed with bytes unread is reset, and a reset throws away what the peer has not read yet. So the answer's
    end is sent, and what still comes is thrown away, up to _LINGER_BYTES and for _LINGER_S. Written by: itself.
    """

    def __init__(self, transport: asyncio.Transport, *, still_sends: Callable[[], bool]) -> None:
        self._transport = transport
        self._still_sends = still_sends
        self._timer: asyncio.TimerHandle | None = None
        self._bytes_left = _LINGER_BYTES

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def lingers(self) -> bool:
        return self._timer is not None

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if not self.lingers:
            self._transport.write(data)

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._still_sends():
            self._transport.close()
            return
        self._timer = asyncio.get_running_loop().call_later(_LINGER_S, self._transport.abort)
        self._transport.write_eof()
        self._transport.resume_reading()

    def discard(self, data: bytes) -> None:
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            self._transport.abort()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which cuts a connection

    - that has not sent a whole request `read_timeout_s` after it was opened, or after the request's first byte;
    - whose reader has let full buffers stand for `write_timeout_s`;
    - whose request line and headers are longer than `max_header_bytes` (answer: 431).

    Cutting is an abort: a close would wait for the very peer that does not read.
    """

    read_timeout_s = 60.0
    write_timeout_s = 60.0
    max_header_bytes = 64 << 10

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._in_head = self._in_body = False
        self._num_head_bytes = 0
        """Of the request line and the headers that are complete."""
        self._num_raw_bytes = 0
        """Of all that has come of a head."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._lingering = _LingeringTransport(
            cast(asyncio.Transport, transport),  # uvloop's is one in all but name
            still_sends=lambda: self._in_head or self._in_body,
        )
        super().connection_made(cast(asyncio.Transport, self._lingering))
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._read_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._lingering.stop()
        super().connection_lost(exc)

    # ------------------------------------------------------------------------------------------------------ requests

    def data_received(self, data: bytes) -> None:
        if self._lingering.lingers:
            self._lingering.discard(data)
            return
        if self._read_timer is None:
            self._await_request()
        was_in_body = self._in_body
        super().data_received(data)
        if self._in_head and not was_in_body and not self.transport.is_closing():
            self._num_raw_bytes += len(data)
            if self._num_raw_bytes > self.max_header_bytes:
                self._refuse_head()

    def on_message_begin(self) -> None:
        self._in_head = True
        self._num_head_bytes = self._num_raw_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers behind a body count, too."""
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._count(len(self.parser.get_method()) + len(b"  HTTP/1.1\r\n\r\n"))
        self._in_head, self._in_body = False, True
        super().on_headers_complete()

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self.max_header_bytes:
            raise _HeadTooLong

    def on_message_complete(self) -> None:
        self._in_body = False
        self._stop_read_timer()
        super().on_message_complete()

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _await_request(self) -> None:
        self._read_timer = self.loop.call_later(self.read_timeout_s, self._on_slow_request)

    def _on_slow_request(self) -> None:
        if self.pipeline:  # it is we who stopped reading, until the request before is answered
            self._await_request()
        else:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when the parser has stopped."""
        if self._num_head_bytes > self.max_header_bytes:
            self._refuse_head()
        else:
            self._refuse(400, msg)

    def _refuse_head(self) -> None:
        self._refuse(431, f"The request's headers are longer than {self.max_header_bytes} bytes")

    def _refuse(self, status: int, message: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete and not self._in_body:
            # Answers keep their order: the requests before get theirs, and the connection ends behind the last one.
            self.cycle.keep_alive = False
            self._stop_read_timer()
            return
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = msgspec.json.encode({"error": error})
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    # ------------------------------------------------------------------------------------------------------- answers

    def pause_writing(self) -> None:
        self._write_timer = self.loop.call_later(self.write_timeout_s, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()


def limited_protocol(*, read_timeout_s: float, write_timeout_s: float, max_header_bytes: int) -> type[LimitedProtocol]:
    """The class with these limits: uvicorn makes the instances."""
    limits = {
        "read_timeout_s": read_timeout_s,
        "write_timeout_s": write_timeout_s,
        "max_header_bytes": max_header_bytes,
    }
    return type("LimitedProtocol", (LimitedProtocol,), limits)
