"""The header of a GGUF file: its key/value metadata and its tensor table. No tensor data is touched.

Follows the published GGUF specification, versions 2 and 3, little endian:

    magic "GGUF" | version u32 | tensor count u64 | kv count u64 | kv pairs | tensor infos | padding | tensor data

Every count and length in the file is a claim: each is checked against the bytes that are left, and all of them together
against a budget, before anything is allocated.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from server.errors import ModelLoadError

_MAGIC = b"GGUF"
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 18
_MAX_ELEMENTS = 1 << 23
"""Array entries over the whole header. A large vocabulary has 262,144 tokens, types and scores and 500,000 merges."""
_MAX_HEADER_BYTES = 256 << 20
_MAX_NESTING = 3
_MAX_DIMS = 4

_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensorInfo:
    """One row of the tensor table.

    shape: as the file has it, fastest axis first (the reverse of torch's). type: ggml's type number.
    offset: bytes from GgufHeader.data_offset.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """metadata: keys in the file's order; values are bool, int, float, str or lists of these."""

    version: int
    metadata: dict[str, Any]
    tensors: tuple[GgufTensorInfo, ...]
    data_offset: int
    """Bytes from the start of the file to the tensor data."""
    file_size: int


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads a GGUF file's header. Raises ModelLoadError for anything that is not a well-formed one."""
    try:
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise ModelLoadError(f"{path} is not a GGUF file: it does not begin with {_MAGIC.decode()!r}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _HeaderReader(data, path).read()
    except OSError as error:
        raise ModelLoadError(f"can't read {path}: {error.strerror or error}") from error


class _HeaderReader:
    """A cursor over the mapped file. Used once."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._size = len(data)
        self._end = min(self._size, _MAX_HEADER_BYTES)
        self._pos = len(_MAGIC)
        self._elements_left = _MAX_ELEMENTS

    def read(self) -> GgufHeader:
        version = self._u32()
        if version not in (2, 3):
            big_endian = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
            raise self._error(f"GGUF version {version} is not supported, 2 and 3 are{big_endian}")
        num_tensors = self._count("tensors", limit=_MAX_TENSORS, min_bytes=24)
        num_keys = self._count("metadata keys", limit=_MAX_KEYS, min_bytes=13)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in metadata:
                raise self._error(f"metadata key {key!r} occurs twice")
            metadata[key] = self._value(self._u32(), depth=0)
        tensors = tuple(self._tensor_info() for _ in range(num_tensors))
        if len({info.name for info in tensors}) != num_tensors:
            raise self._error("a tensor name occurs twice")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._error(f"general.alignment is {alignment!r}, not a power of two")
        data_offset = -(-self._pos // alignment) * alignment
        for info in tensors:
            if data_offset + info.offset > self._size:
                raise self._error(f"tensor {info.name!r} begins behind the end of the file: it is truncated")
        return GgufHeader(version, metadata, tensors, data_offset, self._size)

    def _tensor_info(self) -> GgufTensorInfo:
        name = self._string()
        num_dims = self._u32()
        if num_dims > _MAX_DIMS:
            raise self._error(f"tensor {name!r} claims {num_dims} dimensions")
        shape = tuple(self._u64() for _ in range(num_dims))
        if any(extent == 0 or extent > 1 << 40 for extent in shape):
            raise self._error(f"tensor {name!r} claims the shape {shape}")
        return GgufTensorInfo(name, shape, self._u32(), self._u64())

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(depth + 1)
        dtype = self._scalar_type(kind)
        return np.frombuffer(self._take(dtype.itemsize), dtype)[0].item()

    def _array(self, depth: int) -> list[Any]:
        if depth > _MAX_NESTING:
            raise self._error("arrays are nested too deeply")
        kind = self._u32()
        if kind == _STRING:
            return self._strings(self._count("array entries", limit=self._elements_left, min_bytes=8))
        if kind == _ARRAY:
            count = self._count("array entries", limit=self._elements_left, min_bytes=12)
            self._elements_left -= count
            return [self._array(depth + 1) for _ in range(count)]
        dtype = self._scalar_type(kind)
        count = self._count("array entries", limit=self._elements_left, min_bytes=dtype.itemsize)
        self._elements_left -= count
        values: list[Any] = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        return values

    def _strings(self, count: int) -> list[str]:
        """The hot loop: a vocabulary and its merges are 100,000 strings."""
        self._elements_left -= count
        data, pos, end = self._data, self._pos, self._end
        unpack = _U64.unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                start = pos + 8
                pos = start + unpack(data, pos)[0]
                if pos > end:
                    raise self._truncated()
                strings.append(data[start:pos].decode())
        except (struct.error, UnicodeDecodeError) as error:
            raise self._error(f"a string in an array is broken ({error})") from error
        self._pos = pos
        return strings

    def _string(self) -> str:
        raw = self._take(self._u64())
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._error(f"a string is not UTF-8 ({error.reason})") from error

    def _count(self, what: str, *, limit: int, min_bytes: int) -> int:
        count = self._u64()
        if count > limit or count * min_bytes > self._end - self._pos:
            raise self._error(f"the header claims {count} {what}, more than the file can hold or this server takes")
        return count

    def _scalar_type(self, kind: int) -> np.dtype[Any]:
        dtype = _SCALARS.get(kind)
        if dtype is None:
            raise self._error(f"unknown metadata type {kind}")
        return dtype

    def _u32(self) -> int:
        value: int = _U32.unpack(self._take(4))[0]
        return value

    def _u64(self) -> int:
        value: int = _U64.unpack(self._take(8))[0]
        return value

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > self._end - self._pos:
            raise self._truncated()
        start = self._pos
        self._pos += num_bytes
        return self._data[start : self._pos]

    def _truncated(self) -> ModelLoadError:
        if self._end < self._size:
            return self._error(f"the header is larger than {_MAX_HEADER_BYTES >> 20} MiB")
        return self._error("the header reaches beyond the end of the file: it is truncated or corrupt")

    def _error(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path}: {message} (at byte {self._pos})")
