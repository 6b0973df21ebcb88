"""Outputs that would run out of tokens: they come to a valid end before."""

import json
import random
from typing import Any

import pytest

from server.protocol import GrammarSpec
from server.structured import GrammarCompiler, GrammarState
from server.tokenizer import Tokenizer
from tests.structured.walks import allowed_tokens

STRING = {"type": "string"}
NESTED = {
    "type": "object",
    "properties": {
        "name": STRING,
        "tags": {"type": "array", "items": STRING, "minItems": 1},
        "age": {"type": "integer"},
        "color": {"enum": ["red", "green"]},
        "day": {"type": "string", "format": "date"},
        "inner": {"type": "object", "properties": {"x": {"type": "string", "minLength": 5}}, "required": ["x"]},
    },
    "required": ["name", "tags", "age", "color", "day", "inner"],
    "additionalProperties": False,
}


def schema(value: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(value))


def no_quote(allowed: list[int], tokenizer: Tokenizer, rng: random.Random) -> int:
    """Any token but one that ends a string, as far as the model has a choice."""
    few = rng.choices(allowed, k=30) if len(allowed) > 30 else allowed
    return rng.choice([id_ for id_ in few if b'"' not in tokenizer.token_bytes(id_)] or few)


def ramble(state: GrammarState, tokenizer: Tokenizer, rng: random.Random, max_tokens: int) -> tuple[str, bool]:
    """What a model that never ends of its own accord writes, and whether it came to its end."""
    output: list[int] = []
    for _ in range(max_tokens):
        token = no_quote(allowed_tokens(state), tokenizer, rng)
        if token in tokenizer.end_token_ids:
            return tokenizer.decode(output), True
        output.append(token)
        state.advance([token])
    return tokenizer.decode(output), False


@pytest.mark.parametrize("max_tokens", [75, 140])
@pytest.mark.parametrize("seed", range(3))
def test_a_rambling_model_still_gives_whole_json(
    compiler: GrammarCompiler, tokenizer: Tokenizer, max_tokens: int, seed: int
) -> None:
    """Guards callers from half an object where max_tokens comes first, whatever the model would rather write."""
    state = compiler.start(schema(NESTED), max_tokens=max_tokens)
    text, ended = ramble(state, tokenizer, random.Random(seed), max_tokens)
    assert ended, text
    assert set(json.loads(text)) == set(NESTED["required"])


@pytest.mark.parametrize(
    ("spec", "max_tokens"),
    [
        (GrammarSpec("json_object"), 30),
        (GrammarSpec("regex", "[a-z ]{3,500}"), 20),
        (
            GrammarSpec("grammar", 'start: "call " %json {"type": "object", "properties": {"a": {"type": "string"}}}'),
            30,
        ),
        (schema({"type": "array", "items": STRING}), 25),
        (schema(STRING), 20),
    ],
)
def test_other_grammars(compiler: GrammarCompiler, tokenizer: Tokenizer, spec: GrammarSpec, max_tokens: int) -> None:
    """Guards the kinds whose ending is no list of required properties."""
    for seed in range(3):
        text, ended = ramble(compiler.start(spec, max_tokens=max_tokens), tokenizer, random.Random(seed), max_tokens)
        assert ended, text


def test_room_is_left_alone(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Guards answers that fit: far from the limit, nothing that the grammar allows is taken away."""
    free = compiler.start(schema(NESTED))
    bounded = compiler.start(schema(NESTED), max_tokens=2000)
    for token in tokenizer.encode('{"name": "Ada'):
        assert allowed_tokens(free) == allowed_tokens(bounded)
        free.advance([token])
        bounded.advance([token])


def test_too_little_for_any_ending(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Guards max_tokens below the shortest ending: tokens are still allowed, and the cut is the caller's to see."""
    _, ended = ramble(compiler.start(schema(NESTED), max_tokens=10), tokenizer, random.Random(0), 10)
    assert not ended


def test_resumed_output_goes_on_as_it_would_have(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Guards resumption: where an output is taken up again, the same tokens are allowed."""
    lived = compiler.start(schema(NESTED), max_tokens=90)
    rng, output = random.Random(3), list[int]()
    while True:
        allowed = allowed_tokens(lived)
        if len(output) % 8 == 0:
            assert allowed_tokens(compiler.start(schema(NESTED), output, max_tokens=90)) == allowed
        token = no_quote(allowed, tokenizer, rng)
        if token in tokenizer.end_token_ids:
            return
        output.append(token)
        lived.advance([token])
