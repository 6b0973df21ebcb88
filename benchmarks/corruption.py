"""Broken model files, made to order: what disks, half downloads and hostile hands do to GGUF and safetensors files.

Each function takes an intact file's beginning and a random generator and gives one broken variant. `must_fail` says
that no loader may accept it; random damage can also land where nobody could tell (in a word of the vocabulary).
"""

import json
import random
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

HUGE = (1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 63) + 8, (1 << 64) - 1)


class Broken(NamedTuple):
    """head: the file's first bytes; size: its length (what lies behind the head is zeros)."""

    what: str
    must_fail: bool
    head: bytes
    size: int


# ----------------------------------------------------------------------------------------------------------------- any


def _damaged(head: bytes, size: int, rng: random.Random) -> Broken:
    """Flipped bits, overwritten or zeroed spans, bytes lost or added, somewhere in the head."""
    kind = rng.choice(("flipped bits", "random span", "zeroed span", "bytes lost", "bytes added"))
    data = bytearray(head)
    at = rng.randrange(len(data)) if rng.random() < 0.7 else rng.randrange(min(len(data), 512))
    length = rng.choice((1, 4, 8, 64, 1024))
    if kind == "flipped bits":
        for _ in range(rng.choice((1, 2, 8))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "random span":
        data[at : at + length] = rng.randbytes(len(data[at : at + length]))
    elif kind == "zeroed span":
        data[at : at + length] = bytes(len(data[at : at + length]))
    elif kind == "bytes lost":
        del data[at : at + length]
    else:
        data[at:at] = rng.randbytes(length)
    return Broken(kind, False, bytes(data), size + len(data) - len(head))


def _cut(head: bytes, size: int, rng: random.Random) -> Broken:
    at = rng.randrange(len(head)) if rng.random() < 0.6 else rng.randrange(len(head), max(size - 64, len(head) + 1))
    return Broken("truncated", True, head[:at], at)


def _replaced(head: bytes, size: int, at: int, new: bytes, what: str) -> Broken:
    return Broken(what, True, head[:at] + new + head[at + len(new) :], size)


# ---------------------------------------------------------------------------------------------------------------- GGUF


def break_gguf(head: bytes, size: int, rng: random.Random) -> Broken:
    """head: up to the tensor data; size: the whole file's."""
    breaker: Callable[[bytes, int, random.Random], Broken] = rng.choice(
        (_damaged, _cut, _gguf_counts, _gguf_string, _gguf_tensor, _gguf_tensor)
    )
    return breaker(head, size, rng)


def _gguf_counts(head: bytes, size: int, rng: random.Random) -> Broken:
    at, what = rng.choice(((0, "magic"), (4, "version"), (8, "number of tensors"), (16, "number of keys")))
    new = rng.randbytes(4) if at < 8 else struct.pack("<Q", rng.choice(HUGE))
    return _replaced(head, size, at, new, f"absurd {what}")


def _gguf_string(head: bytes, size: int, rng: random.Random) -> Broken:
    key = rng.choice((b"general.architecture", b"tokenizer.ggml.tokens", b"tokenizer.ggml.model"))
    at = head.find(key)
    return _replaced(head, size, at - 8, struct.pack("<Q", rng.choice(HUGE)), "absurd string length")


def _gguf_tensor(head: bytes, size: int, rng: random.Random) -> Broken:
    """One row of the tensor table: name | dimensions u32 | extents u64... | type u32 | offset u64."""
    name = rng.choice(
        (b"token_embd.weight", b"blk.0.attn_q.weight", b"blk.1.ffn_down.weight", b"blk.0.attn_norm.weight")
    )
    at = head.find(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    (num_dims,) = struct.unpack_from("<I", head, at)
    extents, type_at = at + 4, at + 4 + 8 * num_dims
    what = rng.choice(("number of dimensions", "extent", "type", "other type", "offset"))
    if what == "number of dimensions":
        new, at = struct.pack("<I", rng.choice((0, 5, 1 << 31))), at
    elif what == "extent":
        new, at = struct.pack("<Q", rng.choice((0, 3, *HUGE))), extents + 8 * rng.randrange(num_dims)
    elif what == "type":
        new, at = struct.pack("<I", rng.choice((99, 1 << 31))), type_at
    elif what == "other type":
        (old,) = struct.unpack_from("<I", head, type_at)
        new, at = struct.pack("<I", rng.choice([t for t in (0, 1, 2, 8, 14, 28) if t != old])), type_at
    else:
        new, at = struct.pack("<Q", rng.choice((7, size, *HUGE))), type_at + 4
    return _replaced(head, size, at, new, f"wrong {what} of a tensor")


# --------------------------------------------------------------------------------------------------------- safetensors


def break_safetensors(data: bytes, rng: random.Random) -> Broken:
    """data: a whole small file."""
    (length,) = struct.unpack_from("<Q", data)
    head = data[: 8 + length]
    kind = rng.randrange(6)
    if kind == 0:
        cut = rng.randrange(len(data))
        return Broken("truncated", True, data[:cut], cut)
    if kind == 1:
        new = struct.pack("<Q", rng.choice((0, 1, length - 1, length + 1, len(data), *HUGE)))
        return Broken("absurd header length", True, new + data[8:], len(data))
    if kind == 2:
        broken = _damaged(head, len(data), rng)
        return Broken(broken.what, False, broken.head + data[len(head) :], broken.size)
    if kind == 3:
        text = rng.choice((b"[" * 100_000, b'{"a":' * 100_000, b"{}", b"null", b"", rng.randbytes(100)))
        return _with_header(text, data[len(head) :], "another header")
    table: dict[str, Any] = json.loads(data[8 : 8 + length])
    name = rng.choice([key for key in table if key != "__metadata__"])
    entry = table[name]
    what = rng.choice(("dtype", "shape", "data_offsets", "no entry"))
    begin, end = entry["data_offsets"]
    if what == "dtype":
        entry["dtype"] = rng.choice(("F16", "I64", "F64", "BOOL", "U8", "X9", 7, None))
    elif what == "shape":
        entry["shape"] = rng.choice(([], [1], [1 << 62, 4], [-1, 64], ["64"], "64", [s + 1 for s in entry["shape"]]))
    elif what == "data_offsets":
        entry["data_offsets"] = rng.choice(([end, begin], [begin, end + 4], [1 << 62, 1 << 63], [0, 0], [begin], None))
    else:
        del table[name]
    return _with_header(json.dumps(table).encode(), data[len(head) :], f"wrong {what} of a tensor")


def _with_header(header: bytes, body: bytes, what: str) -> Broken:
    data = struct.pack("<Q", len(header)) + header + body
    return Broken(what, True, data, len(data))


# ---------------------------------------------------------------------------------------------------------------- JSON


def break_json(text: bytes, rng: random.Random) -> Broken:
    """A configuration with one value of a wrong kind, or a file that is no JSON any more."""
    if rng.random() < 0.3:
        return _damaged(text, len(text), rng)
    if rng.random() < 0.2:
        cut = rng.randrange(len(text.rstrip()))
        return Broken("truncated", True, text[:cut], cut)
    content: dict[str, Any] = json.loads(text)
    table = rng.choice([content, content, *(value for value in content.values() if isinstance(value, dict) and value)])
    key = rng.choice(list(table))
    table[key] = rng.choice((None, -1, 0, 7, 10**9, 10**30, 1.5, float("nan"), "x", "", [], [1], {}, {"a": 1}, True))
    data = json.dumps(content).encode()
    return Broken(f"another {key}", False, data, len(data))
