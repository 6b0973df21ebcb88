"""The engine's end of the stream to the API process. Single-threaded; a send never blocks a step."""

import select
import socket

import msgspec

from server.protocol import Command, Event
from server.protocol.wire import FrameBuffer, encode_frame

_CHUNK_BYTES = 1 << 16


class ChannelClosed(Exception):
    """The API process is gone."""


class EngineChannel:
    """Reads commands, writes events. Owns the socket.

    What the socket doesn't take at once waits in a buffer. It can't grow without bound: an event says at most what one
    step added to the open requests, and those are bounded by the API process's own queue limit.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._frames = FrameBuffer()
        self._received: list[bytes] = []
        self._unsent = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Command)

    def receive(self, timeout: float | None) -> list[Command]:
        """Commands that have arrived. timeout: seconds to wait for the first; 0 doesn't wait, None waits for ever.

        Raises ChannelClosed.
        """
        self._await_frames(timeout)
        payloads, self._received = self._received, []
        return [self._decoder.decode(payload) for payload in payloads]

    def receive_first(self, timeout: float) -> bytes:
        """The first frame, undecoded: the engine's configuration. Raises ChannelClosed, TimeoutError."""
        self._await_frames(timeout)
        if not self._received:
            raise TimeoutError("no configuration arrived")
        return self._received.pop(0)

    def send(self, event: Event) -> None:
        """Raises ChannelClosed."""
        self._unsent += encode_frame(event)
        self._flush()

    def close(self, *, linger_s: float = 1.0) -> None:
        """Gives what is unsent a last chance, then closes."""
        try:
            while self._unsent and select.select([], [self._socket], [], linger_s)[1]:
                self._flush()
        except ChannelClosed:
            pass
        self._socket.close()

    def _await_frames(self, timeout: float | None) -> None:
        """Returns when a frame is there, or nothing happened for so long."""
        while True:
            self._flush()
            self._read()
            if self._received or timeout == 0:
                return
            readable, writable, _ = select.select([self._socket], [self._socket] if self._unsent else [], [], timeout)
            if not readable and not writable:
                return

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ChannelClosed from error

    def _read(self) -> None:
        try:
            while data := self._socket.recv(_CHUNK_BYTES):
                self._received += self._frames.feed(data)
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosed from error
        raise ChannelClosed
