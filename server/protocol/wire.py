"""Frames on the byte stream between the two processes: a 4-byte little-endian length, then one msgpack message.

The stream is a socketpair (docs/adr/0002): nameless, so nothing is left behind and nobody else can connect, and its end
of file is the fastest possible news of a death.
"""

import struct
from collections.abc import Iterator

import msgspec

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20
"""Larger than any message; a longer length means that the stream is out of step."""

_encoder = msgspec.msgpack.Encoder()


def frame(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def encode_frame(message: msgspec.Struct) -> bytes:
    return frame(_encoder.encode(message))


class FrameBuffer:
    """Cuts a byte stream into frames. Written by: whoever reads the stream, through feed()."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the payload of each frame that is complete now. Raises ValueError where the stream is out of step."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes; the stream is out of step")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            yield bytes(self._buffer[start + _LENGTH.size : end])
            start = end
        del self._buffer[:start]
