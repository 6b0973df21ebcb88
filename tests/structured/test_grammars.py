"""What grammars let through is valid, whatever is sampled under their mask."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from server.protocol import GrammarSpec
from server.structured import GrammarCompiler
from server.tokenizer import Tokenizer
from tests.structured.walks import allowed_tokens, may_end, walk

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "minItems": 1, "maxItems": 3},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {"place": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}]}},
}


def outputs(compiler: GrammarCompiler, tokenizer: Tokenizer, spec: GrammarSpec, count: int) -> list[str]:
    """Texts of finished walks."""
    texts = []
    for seed in range(count):
        ids = walk(compiler.start(spec), tokenizer, random.Random(seed))
        if ids[-1] in tokenizer.end_token_ids:
            texts.append(tokenizer.decode(ids))
    return texts


def json_spec(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Schemas such as clients send; bounded, so that walks end."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "date"]
    if depth < 3:
        kinds += ["object", "object", "array", "anyOf", "tuple"]
    match rng.choice(kinds):
        case "object":
            names = rng.sample(["id", "name", "größe", "x y", "items", 'q"uote'], rng.randint(0, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth + 1) for name in names},
                "required": rng.sample(names, rng.randint(0, len(names))),
                "additionalProperties": False,
            }
        case "array":
            low = rng.randint(0, 2)
            return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": low, "maxItems": low + 1}
        case "tuple":
            items = [random_schema(rng, depth + 1) for _ in range(2)]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
        case "enum":
            return {"enum": rng.sample(["a", "b", 1, 2.5, None, True, {"k": [1]}], 3)}
        case "const":
            return {"const": rng.choice(["only", 7, False])}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^a+b?$", "^[0-9]{2,4}$", "x|y"]), "maxLength": 20}
        case "date":
            return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4", "made-up"])}
        case "string":
            return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 8)}
        case "number":
            return {"type": "number", "minimum": -5, "maximum": 5.5}
        case kind:
            return {"type": kind}


@pytest.mark.parametrize("block", range(4))
def test_random_schemas(compiler: GrammarCompiler, tokenizer: Tokenizer, block: int) -> None:
    """Guards JSON schemas of all common kinds: every finished walk is an instance."""
    rng = random.Random(block)
    num_texts = 0
    for _ in range(25):
        schema = random_schema(rng)
        validator = jsonschema.Draft202012Validator(schema)
        for text in outputs(compiler, tokenizer, json_spec(schema), 2):
            validator.validate(json.loads(text))
            num_texts += 1
    assert num_texts >= 48


def test_schema_with_everything(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Guards definitions, references, bounds, and no property beyond those allowed."""
    texts = outputs(compiler, tokenizer, json_spec(PERSON), 10)
    assert len(texts) >= 9
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


def test_json_object(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Guards json_object: always an object, of whatever content."""
    texts = outputs(compiler, tokenizer, GrammarSpec("json_object"), 12)
    assert len(texts) >= 4
    assert all(isinstance(json.loads(text), dict) for text in texts)


@pytest.mark.parametrize(
    ("schema", "text", "allowed"),
    [
        ({}, '{"a": [1, 2],"b":{"c": null}}', True),
        ({}, "{ }", False),
        ({}, '{"a":  1}', False),
        ({}, '{"a":\n1}', False),
        ({"type": "integer"}, "9007199254740991", True),
        ({"type": "integer"}, "9007199254740992", False),
        ({"type": "integer", "minimum": 10**17}, "100000000000000000", True),
        ({"type": ["integer", "null"]}, "99999999999999999", False),
        ({"type": "number"}, "-1.123456789", True),
        ({"type": "number"}, "1.1234567891", False),
        ({"type": "number"}, "1.50000000000", False),
        ({"type": "number", "minimum": 1e-12, "maximum": 2e-12}, "0.0000000000015", True),
        ({"type": "number", "multipleOf": 0.25}, "0.75", True),
        ({"type": "integer", "enum": [10**17]}, "100000000000000000", True),
        ({"type": "object", "properties": {"type": {"type": "integer"}}}, '{"type":1}', True),
        ({"type": "object", "properties": {"a": {}}}, '{"b":1}', False),
        ({"type": "object", "properties": {"properties": {"type": "null"}}}, '{"properties":null}', True),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, '{"b":1}', True),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, '{"b":1}', True),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}, "required": ["b"]}]}, '{"b":1}', True),
        ({"allOf": [{"type": "number"}, {"type": "integer", "exclusiveMinimum": 3}]}, "4", True),
    ],
)
def test_no_endless_choices(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, text: str, allowed: bool
) -> None:
    """Guards against models that write spaces, digits or properties for ever; and bounds of the schema's own."""
    ids = tokenizer.encode(text)
    if allowed:
        assert may_end(compiler.start(json_spec(schema), ids), tokenizer)
    else:
        with pytest.raises(RuntimeError):
            compiler.start(json_spec(schema), ids)


@pytest.mark.parametrize(
    ("pattern", "check"),
    [
        (r"\d{3}-[a-c]{1,4}", r"\d{3}-[a-c]{1,4}"),
        (r"^(yes|no)$", r"yes|no"),
        (r"a\$", r"a\$"),
        (r"[가-힣]{2}😀", r"[가-힣]{2}😀"),
        (r"(?i)ok!?", r"(?i)ok!?"),
    ],
)
def test_regex(compiler: GrammarCompiler, tokenizer: Tokenizer, pattern: str, check: str) -> None:
    """Guards patterns, with and without anchors around them, escaped ones included."""
    texts = outputs(compiler, tokenizer, GrammarSpec("regex", pattern), 8)
    assert texts
    assert all(re.fullmatch(check, text) for text in texts)


def test_choice(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Guards choices: quotes, line breaks, prefixes of one another; every one can be reached."""
    choices = ["yes", "yes, but", 'say "no"', "line\nbreak", "세계", "back\\slash"]
    spec = GrammarSpec("choice", json.dumps(choices))
    assert set(outputs(compiler, tokenizer, spec, 20)) <= set(choices)
    for choice in choices:
        state = compiler.start(spec, tokenizer.encode(choice))
        assert may_end(state, tokenizer)


@pytest.mark.parametrize("source", ['start: "a" digit+\ndigit: /[0-9]/', 'root ::= "a" digit+\ndigit ::= [0-9]'])
def test_grammar(compiler: GrammarCompiler, tokenizer: Tokenizer, source: str) -> None:
    """Guards grammars in Lark's and in GBNF's notation."""
    texts = outputs(compiler, tokenizer, GrammarSpec("grammar", source), 6)
    assert texts
    assert all(re.fullmatch("a[0-9]+", text) for text in texts)


def test_control_tokens_are_never_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Guards a free string in a grammar: it can't hold a control token, nor an id beyond the vocabulary."""
    state = compiler.start(GrammarSpec("regex", "(.|\n)*"))
    allowed = set(allowed_tokens(state))
    assert allowed & tokenizer.special_ids == set(tokenizer.end_token_ids)
    assert max(allowed) < tokenizer.vocab_size


def test_state_follows_the_output(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Guards resumed requests: a state built from the output so far allows what the lived one does."""
    rng = random.Random(3)
    lived = compiler.start(json_spec(PERSON))
    output = walk(lived, tokenizer, rng, max_tokens=15)
    rebuilt = compiler.start(json_spec(PERSON), output)
    allowed = allowed_tokens(lived)
    assert allowed_tokens(rebuilt) == allowed
    rebuilt.advance(allowed[:1])
    assert allowed_tokens(lived) == allowed


def test_refuses_other_tokens(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Guards against an output that left the grammar, and is noticed later or never."""
    state = compiler.start(GrammarSpec("regex", "abc"))
    with pytest.raises(RuntimeError) as caught:
        state.advance(tokenizer.encode("xyz"))
    assert "<" not in str(caught.value), "the library's own markup"
    with pytest.raises(RuntimeError):
        compiler.start(GrammarSpec("regex", "abc"), tokenizer.encode("xyz"))


def test_behind_the_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Guards ignore_eos: behind a complete output only end tokens come, as many as the client wants."""
    state = compiler.start(GrammarSpec("regex", "abc"), tokenizer.encode("abc"))
    end = min(tokenizer.end_token_ids)
    state.advance([end, end])
    assert state.is_terminated
    assert allowed_tokens(state) == [end]
    with pytest.raises(RuntimeError):
        state.advance(tokenizer.encode("x"))
