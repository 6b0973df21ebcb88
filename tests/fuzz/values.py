"""Random values: plain ones, odd ones, and whole JSON schemas."""

import math
import random
from collections.abc import Callable
from typing import Any

ODD_NUMBERS: tuple[Any, ...] = (
    0,
    -0.0,
    -1,
    1e-320,
    1e308,
    -1e308,
    math.inf,
    -math.inf,
    math.nan,
    2**31,
    2**53 + 1,
    2**63,
    -(2**63) - 1,
    2**64,
    10**40,
    10**400,
)
ODD_TEXTS = (
    "",
    " ",
    "\x00",
    "a\x00b",
    "\ud800",
    "x\udfff\ud800y",
    "\ufeff",
    "\u202e\u0301\u0301",
    "👩‍👩‍👧",
    "e\u0301" * 40,
    "\uffff\U0010ffff",
    "<|im_start|>system\n<|im_end|>",
    "<think></tool_call><tool_call>",
    "{{ 7 * 7 }}{% for x in range(9**9) %}x{% endfor %}",
    "../../etc/passwd",
    "' OR 1=1 --",
    "\\u0041\\",
    "auto",
    "null",
    "((((a{1,9}){1,9}){1,9}){1,9})",
    "[",
)
NAMES = ("type", "function", "name", "text", "role", "content", "schema", "properties", "items", "id", "$ref", "")


def odd_text(rng: random.Random) -> str:
    if rng.random() < 0.7:
        return rng.choice(ODD_TEXTS)
    if rng.random() < 0.1:
        return rng.choice("aé한🙂 ") * rng.choice((300, 5000, 70_000))
    return "".join(chr(rng.randrange(1 << rng.choice((7, 11, 16, 20)))) for _ in range(rng.randrange(12)))


def odd_value(rng: random.Random, depth: int = 3) -> Any:
    """Any JSON value at all, and the literals that Python's json adds to JSON."""
    kind = rng.randrange(8 if depth else 6)
    if kind < 2:
        return odd_text(rng)
    if kind == 2:
        return rng.choice(ODD_NUMBERS)
    if kind == 3:
        return rng.randrange(-5, 50_000)
    if kind == 4:
        return rng.choice((None, True, False, [], {}))
    if kind == 5:
        return rng.uniform(-3, 3)
    if kind == 6:
        return [odd_value(rng, depth - 1) for _ in range(rng.choice((1, 2, 4, 30)))]
    return {rng.choice((*NAMES, odd_text(rng))): odd_value(rng, depth - 1) for _ in range(rng.randrange(1, 5))}


def nested(depth: int, rng: random.Random) -> str:
    """JSON text of brackets within brackets."""
    if rng.random() < 0.5:
        return "[" * depth + "]" * depth
    return '{"a":' * depth + "1" + "}" * depth


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of an object whose every value is bounded, so that an answer ends: what people send to strict mode."""
    return _object(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(("name", "age", "tags", "kind", "ok", "at", "pets", "größe", "a b", "x-1", "note", "sum"), 5)
    properties = {name: _schema(rng, depth - 1) for name in names[: rng.randrange(1, 5)]}
    required = list(properties) if rng.random() < 0.7 else [n for n in properties if rng.random() < 0.5]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves: tuple[Callable[[random.Random], dict[str, Any]], ...] = (_text, _integer, _number, _choice, _flag, _pattern)
    if depth <= 0 or rng.random() < 0.55:
        return rng.choice(leaves)(rng)
    kind = rng.randrange(4)
    if kind == 0:
        return _object(rng, depth)
    if kind == 1:
        low = rng.randrange(3)
        return {"type": "array", "items": _schema(rng, depth - 1), "minItems": low, "maxItems": low + rng.randrange(3)}
    if kind == 2:
        return {"anyOf": [rng.choice(leaves)(rng), {"type": "null"}]}
    return {"anyOf": [_schema(rng, depth - 1), _schema(rng, depth - 1)]}


def _text(rng: random.Random) -> dict[str, Any]:
    return {"type": "string", "maxLength": rng.randrange(1, 24)}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randrange(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.choice((0, 1, 9, 5000))}


def _number(rng: random.Random) -> dict[str, Any]:
    low = rng.uniform(-10, 10)
    return {"type": "number", "minimum": round(low, 2), "maximum": round(low + 5, 2)}


def _choice(rng: random.Random) -> dict[str, Any]:
    options: list[Any] = ["red", "blue", 'a "b"', "한국", "", 1, -2.5, None, True, "line\nbreak"]
    return {"enum": rng.sample(options, rng.randrange(1, 5))} if rng.random() < 0.7 else {"const": rng.choice(options)}


def _flag(_rng: random.Random) -> dict[str, Any]:
    return {"type": "boolean"}


def _pattern(rng: random.Random) -> dict[str, Any]:
    pattern = rng.choice((r"^[A-Z]{2}-\d{3}$", r"^(north|south)$", r"^\d{4}-\d{2}-\d{2}$", r"^[a-f0-9]{8}$"))
    return {"type": "string", "pattern": pattern}
