"""HTTP/1.1 connections with limits on what uvicorn leaves open: slow senders, stuck readers, endless headers."""

import asyncio
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol


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
        self._in_body = False
        self._num_header_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))  # uvloop's is one in all but name
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._read_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    # ------------------------------------------------------------------------------------------------------ requests

    def data_received(self, data: bytes) -> None:
        if self._read_timer is None:
            self._await_request()
        super().data_received(data)
        if self._in_body or self._read_timer is None or self.transport.is_closing():
            return
        self._num_header_bytes += len(data)
        if self._num_header_bytes > self.max_header_bytes:
            self._refuse(431, f"The request's headers are longer than {self.max_header_bytes} bytes")

    def on_headers_complete(self) -> None:
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        self._num_header_bytes = 0
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
        super().on_message_complete()

    def _await_request(self) -> None:
        self._read_timer = self.loop.call_later(self.read_timeout_s, self._on_slow_request)

    def _on_slow_request(self) -> None:
        if self.pipeline:  # it is we who stopped reading, until the request before is answered
            self._await_request()
        else:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for bytes that are not HTTP."""
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
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
