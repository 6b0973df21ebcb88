"""GGUF headers, true and corrupt."""

import random
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from server.errors import ModelLoadError
from server.weights.gguf_metadata import read_gguf_header


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of metadata, and two tensors."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 255)
    writer.add_int8("a.i8", -1)
    writer.add_uint16("a.u16", 65535)
    writer.add_int16("a.i16", -2)
    writer.add_int32("a.i32", -3)
    writer.add_uint64("a.u64", 1 << 63)
    writer.add_int64("a.i64", -(1 << 60))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "한국어")
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.texts", ["", "é", "x" * 300])
    writer.add_array("a.flags", [True, False])
    writer.add_tensor("one.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("two.weight", np.ones(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_equals_the_reference_reader(small: Path) -> None:
    """Guards our parser against the gguf package's, value for value and tensor for tensor."""
    header, reference = read_gguf_header(small), GGUFReader(small)
    expected = {key: field.contents() for key, field in reference.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == expected
    assert header.metadata["a.text"] == "한국어"
    for ours, theirs in zip(header.tensors, reference.tensors, strict=True):
        assert (ours.name, ours.shape, ours.type) == (theirs.name, tuple(theirs.shape), theirs.tensor_type)
        assert header.data_offset + ours.offset == theirs.data_offset


def patched(small: Path, tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    return path


HUGE = struct.pack("<Q", 1 << 62)


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"GGML", "not a GGUF"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, HUGE, "tensors"),
        (16, HUGE, "metadata keys"),
        (24, HUGE, "truncated"),
        (32, b"\xff\xff", "not UTF-8"),
        (52, struct.pack("<I", 77), "unknown metadata type"),
        (56, HUGE, "truncated"),
    ],
)
def test_absurd_fields(small: Path, tmp_path: Path, offset: int, data: bytes, message: str) -> None:
    """Guards against believing a count or a length: each is checked before anything is allocated."""
    content = bytearray(small.read_bytes())
    content[offset : offset + len(data)] = data
    with pytest.raises(ModelLoadError, match=message):
        read_gguf_header(patched(small, tmp_path, bytes(content)))


def array_of(kind: int, count: int, body: bytes) -> bytes:
    """A header with one key whose value is an array."""
    key = struct.pack("<Q", 1) + b"k"
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<IIQ", 9, kind, count) + body


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (array_of(0, 1 << 40, b""), "claims"),
        (array_of(8, 1 << 23, b""), "claims"),
        (array_of(8, 2, HUGE + b"x" * 64), "truncated"),
        (array_of(8, 1, struct.pack("<Q", 2) + b"\xff\xfe"), "broken"),
        (array_of(9, 1, struct.pack("<IQ", 9, 1) * 40), "nested"),
        (array_of(9, 1 << 20, b""), "claims"),
        (b"GGUF", "truncated"),
        (b"", "not a GGUF"),
    ],
)
def test_absurd_arrays(small: Path, tmp_path: Path, data: bytes, message: str) -> None:
    """Guards arrays: counts beyond the file, broken strings, nesting, nothing at all."""
    with pytest.raises(ModelLoadError, match=message):
        read_gguf_header(patched(small, tmp_path, data))


def test_any_truncation(small: Path, tmp_path: Path) -> None:
    """Guards a download that broke off anywhere in the header."""
    content = small.read_bytes()
    header_end = read_gguf_header(small).data_offset
    for length in range(0, header_end - 32, 7):
        with pytest.raises(ModelLoadError):
            read_gguf_header(patched(small, tmp_path, content[:length]))


def test_random_damage(small: Path, tmp_path: Path) -> None:
    """Guards against any other exception than ModelLoadError, whatever bytes are damaged."""
    rng = random.Random(5)
    content = small.read_bytes()
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(4, len(damaged))] = rng.choice((0, 255, rng.randrange(256)))
        try:
            header = read_gguf_header(patched(small, tmp_path, bytes(damaged)))
        except ModelLoadError:
            continue
        assert header.file_size == len(content)


def test_missing_file(tmp_path: Path) -> None:
    """Guards the start-up error of a file that is not there, or is a folder."""
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelLoadError, match="can't read"):
            read_gguf_header(path)
