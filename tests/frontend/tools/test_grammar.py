"""tool_choice "required" and named: whatever is sampled under the grammar is a call that the parser reads."""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from server.errors import InvalidRequest
from server.frontend.tools import (
    HERMES,
    LLAMA3,
    MISTRAL,
    ToolFormat,
    ToolParser,
    tool_grammar,
    with_tool_instructions,
)
from server.structured import GrammarCompiler
from server.tokenizer import Tokenizer, load_tokenizer
from server.weights.locate import locate
from tests.structured.conftest import PADDED_VOCABULARY
from tests.structured.walks import walk

TOOLS: list[dict[str, Any]] = [
    {
        "name": "get_weather",
        "description": "Weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 10},
                "unit": {"enum": ["C", "F"]},
                "place": {"$ref": "#/$defs/place"},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"place": {"type": "string", "format": "int32", "maxLength": 3}},
        },
    },
    {"name": "now"},
    {
        "name": 'odd"name',
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False},
    },
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(locate(""))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, vocab_size=PADDED_VOCABULARY)
    yield compiler
    compiler.close()


@pytest.mark.parametrize("format_", [HERMES, LLAMA3, MISTRAL], ids=lambda format_: format_.name)
@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "single"])
def test_every_output_is_a_call(
    tokenizer: Tokenizer, compiler: GrammarCompiler, format_: ToolFormat, parallel: bool
) -> None:
    """Guards tool_choice "required": names, arguments and count are right on every try, with no text around them."""
    spec = tool_grammar(format_, TOOLS, tokenizer, parallel=parallel)
    schemas = {tool["name"]: tool.get("parameters", {"maxProperties": 0}) for tool in TOOLS}
    seen = set()
    for seed in range(20):
        ids = walk(compiler.start(spec), tokenizer, random.Random(seed))
        assert ids[-1] in tokenizer.end_token_ids
        parser = ToolParser(format_, tool_names=schemas)
        parts = [parser.push(tokenizer.decode(ids)), parser.finish()]
        assert "".join(part.content for part in parts) == ""
        assert parser.num_calls >= 1 if parallel else parser.num_calls == 1
        calls: dict[int, list[str]] = {}
        for part in (call for delta in parts for call in delta.tool_calls):
            call = calls.setdefault(part.index, [part.name or "", ""])
            call[1] += part.arguments
        for name, arguments in calls.values():
            jsonschema.validate(json.loads(arguments), schemas[name])
            seen.add(name)
    assert seen == set(schemas)


def test_named(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Guards a named tool_choice: that tool and no other."""
    spec = tool_grammar(HERMES, TOOLS[1:2], tokenizer, parallel=False)
    ids = walk(compiler.start(spec), tokenizer, random.Random(0))
    text = "".join(tokenizer.decode(ids).split())
    assert text == '<tool_call>{"name":"now","arguments":{}}</tool_call>'


def test_marker_that_is_a_control_token(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Guards formats whose marker is one token: the grammar asks for it, and decoding must show it to the parser."""
    format_ = ToolFormat("test", begin="<jupyter_code>", listed=True)
    assert format_.uses_control_tokens(tokenizer)
    assert not HERMES.uses_control_tokens(tokenizer)
    spec = tool_grammar(format_, TOOLS[1:2], tokenizer, parallel=False)
    ids = walk(compiler.start(spec), tokenizer, random.Random(0))
    assert ids[0] == tokenizer.token_to_id("<jupyter_code>")
    parser = ToolParser(format_)
    assert parser.push(tokenizer.decode(ids, skip_special_tokens=False)).tool_calls[0].name == "now"


@pytest.mark.parametrize(("parameters", "message"), [(5, "JSON object"), ({"type": "banana"}, "banana")])
def test_bad_parameters(tokenizer: Tokenizer, compiler: GrammarCompiler, parameters: Any, message: str) -> None:
    """Guards the 400 of a tool whose parameters are no schema."""
    tools = [{"name": "f", "parameters": parameters}]
    with pytest.raises(InvalidRequest, match=message):
        asyncio.run(compiler.check(tool_grammar(HERMES, tools, tokenizer, parallel=True)))


def test_instructions() -> None:
    """Guards models whose template knows no tools: they are told of them, and calls and results become plain text."""
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What time is it?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    told = with_tool_instructions(messages, [{"type": "function", "function": TOOLS[1]}])
    assert told[0]["content"].startswith("Be brief.\n\nYou can call functions")
    assert '{"type": "function", "function": {"name": "now"}}' in told[0]["content"]
    assert told[1] == messages[1]
    expected = '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'
    assert told[2] == {"role": "assistant", "content": expected}
    assert told[3] == {"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"}
    assert with_tool_instructions(messages[1:], [])[0]["role"] == "system"
