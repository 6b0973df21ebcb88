"""response_format and structured_outputs: what reaches the engine, and what is refused at the door."""

from typing import Any

import pytest

from server.api.structured import closed
from server.protocol import GrammarSpec
from tests.api.conftest import Server

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SCHEMA_TEXT = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}'


def json_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": schema, "strict": True}}}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object")),
        (json_schema(SCHEMA), GrammarSpec("json_schema", SCHEMA_TEXT)),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarSpec("json_schema", SCHEMA_TEXT)),
        ({"structured_outputs": {"json": SCHEMA_TEXT}}, GrammarSpec("json_schema", SCHEMA_TEXT)),
        ({"structured_outputs": {"json_object": True}}, GrammarSpec("json_object")),
        ({"structured_outputs": {"regex": "[0-9]+"}}, GrammarSpec("regex", "[0-9]+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarSpec("choice", '["a","b"]')),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, GrammarSpec("grammar", 'start: "x"')),
    ],
)
async def test_what_reaches_the_engine(
    server: Server, path: str, fields: dict[str, Any], expected: GrammarSpec | None
) -> None:
    """Guards that a constraint is never dropped on its way."""
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **fields}
    response = await server.post(path, body)
    assert response.status_code == 200, response.text
    assert server.engine.requests[-1].sampling.grammar == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": "json"},
        {"response_format": {"type": "nonsense"}},
        {"response_format": {"type": ["text"]}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "t"}}},
        json_schema(5),
        json_schema({"type": "banana"}),
        json_schema({"type": "string", "pattern": "("}),
        json_schema({"$ref": "#/nowhere"}),
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"regex": 5}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"choice": "x"}},
        {"structured_outputs": {"grammar": "start: ("}},
        {"structured_outputs": {"json": {}, "regex": "x"}},
        {"structured_outputs": {"whitespace_pattern": " "}},
        {"structured_outputs": 5},
        {"structured_outputs": {"regex": "x" * 300_000}},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "x"}},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refused(server: Server, fields: dict[str, Any], stream: bool) -> None:
    """Guards the engine from broken grammars: a 400 that names the field, before anything runs."""
    body = {"prompt": "x", "max_tokens": 2, "stream": stream, **fields}
    response = await server.post("/v1/completions", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(("response_format", "structured_outputs"))
    assert server.engine.requests == []


OPEN = {"properties": {"a": {}}}
SHUT = {"properties": {"a": {}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OPEN, SHUT),
        ({**OPEN, "additionalProperties": True}, {**OPEN, "additionalProperties": True}),
        ({"properties": {"x": OPEN}}, {"properties": {"x": SHUT}, "additionalProperties": False}),
        ({"type": "array", "items": OPEN}, {"type": "array", "items": SHUT}),
        ({"$ref": "#/$defs/t", "$defs": {"t": OPEN}}, {"$ref": "#/$defs/t", "$defs": {"t": SHUT}}),
        ({"allOf": [OPEN]}, {"allOf": [OPEN]}),
        ({**OPEN, "anyOf": [OPEN]}, {**OPEN, "anyOf": [OPEN]}),
        ({"type": "object"}, {"type": "object"}),
        (True, True),
    ],
)
async def test_no_invented_properties(schema: Any, expected: Any) -> None:
    """Guards answers from properties without end, and composed schemas from being broken by that."""
    assert closed(schema) == expected
