"""Our end of the stream to one engine, on the event loop."""

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import msgspec

from server.config import EngineConfig
from server.protocol import Command, Event
from server.protocol.wire import FrameBuffer, encode_frame, frame


class EngineConnection(asyncio.Protocol):
    """Turns bytes into events and commands into bytes. lost: done when the engine's end is closed."""

    def __init__(self, on_event: "OnEvent") -> None:
        self._on_event = on_event
        self._frames = FrameBuffer()
        self._decoder = msgspec.msgpack.Decoder(Event)
        self._transport: asyncio.Transport | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, sock: socket.socket, config: EngineConfig, on_event: "OnEvent") -> "EngineConnection":
        """Takes over the socket and sends the configuration as the first frame."""
        connection = cls(on_event)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=sock)
        connection._write(frame(msgspec.json.encode(config)))
        return connection

    def send(self, command: Command) -> None:
        self._write(encode_frame(command))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _write(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            self._on_event(self, self._decoder.decode(payload))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)


OnEvent = Callable[[EngineConnection, Event], None]
