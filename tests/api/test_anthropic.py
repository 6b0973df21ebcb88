"""POST /v1/messages: shapes that Anthropic's clients parse."""

import json
from typing import Any

import pytest

from server.errors import Overloaded
from server.protocol import FinishReason
from server.tokenizer import ChatTemplate
from tests.api.conftest import REPLY, Server, ok

pytestmark = pytest.mark.anyio

PATH = "/v1/messages"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "alias", "max_tokens": 64, "messages": [{"role": "user", "content": "Hi"}], **fields}


async def test_plain_answer(server: Server) -> None:
    """Guards the message's shape, and that cached tokens are counted apart from the other input."""
    server.engine.num_cached_tokens = 4
    message = ok(await server.post(PATH, body(system="Be brief.")))
    assert message["type"] == "message"
    assert message["content"] == [{"type": "text", "text": REPLY}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    num_prompt = len(server.engine.requests[-1].prompt_token_ids)
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == num_prompt
    assert message["usage"]["cache_read_input_tokens"] == 4


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["wide"]}, "stop_sequence", "wide"),
    ],
)
async def test_stop_reasons(server: Server, fields: dict[str, Any], reason: str, sequence: str | None) -> None:
    """Guards why an answer ended, in Anthropic's words."""
    message = ok(await server.post(PATH, body(**fields)))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


async def test_event_sequence(server: Server) -> None:
    """Guards the order and the `event:` lines that the official client reads."""
    response = await server.post(PATH, body(stream=True))
    blocks = [block.split("\n") for block in response.text.split("\n\n") if block]
    assert all(len(b) == 2 and b[0].startswith("event: ") and b[1].startswith("data: ") for b in blocks)
    events = [json.loads(b[1].removeprefix("data: ")) for b in blocks]
    kinds = [event["type"] for event in events]
    assert [b[0].removeprefix("event: ") for b in blocks] == kinds
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == REPLY
    assert events[0]["message"]["content"] == []
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    assert events[-2]["usage"]["output_tokens"] > 5


async def test_blocks(server: Server) -> None:
    """Guards blocks of text, and results of tools as turns of their own."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "add"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "calling"},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}]},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    ok(await server.post(PATH, body(messages=messages, system=system)))
    prompt = server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    turns = [turn.partition("\n")[0] for turn in prompt.split("<|im_start|>")[1:]]
    assert turns == ["system", "user", "assistant", "tool", "user", "assistant"]
    assert "42" in prompt


async def test_count_tokens(server: Server) -> None:
    """Guards that the count is what the message then uses."""
    counted = ok(await server.post(f"{PATH}/count_tokens", {"messages": body()["messages"]}))
    message = ok(await server.post(PATH, body()))
    assert counted == {"input_tokens": message["usage"]["input_tokens"]}


async def test_errors_have_anthropics_shape(server: Server) -> None:
    """Guards clients that read error.type, plain and in a stream."""
    response = await server.post(PATH, body(messages=[{"role": "system", "content": "x"}]))
    assert response.status_code == 400
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "invalid_request_error"
    server.engine.error = Overloaded("full", retry_after=1)
    response = await server.post(PATH, body(stream=True))
    assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
    server.engine.error = None
    server.engine.fail_after = (3, FinishReason.ERROR)
    last = (await server.post(PATH, body(stream=True))).text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\n")


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": ["x"]}]},
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"tool_choice": {"type": "banana"}},
        {"mcp_servers": [{}]},
        {"container": "c"},
        {"speed": "fast"},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "between_tools"}},
        {"thinking": {"type": "adaptive", "display": "loud"}},
        {"output_format": {"type": "xml"}},
        {"stop_sequences": "x"},
    ],
)
async def test_refused(server: Server, fields: dict[str, Any]) -> None:
    """Guards against a 500, or silence, for what is wrong or more than text and tools."""
    response = await server.post(PATH, body(**fields))
    assert response.status_code == 400, response.text


@pytest.mark.parametrize("field", ["output_config", "output_format"])
async def test_an_output_format_holds_a_schema(server: Server, field: str) -> None:
    """Guards against prose where the client's own parse() asked for an object, by today's name or yesterday's."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    wanted = {"type": "json_schema", "schema": schema}
    ok(await server.post(PATH, body(**{field: wanted if field == "output_format" else {"format": wanted}})))
    grammar = server.engine.requests[-1].sampling.grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.source)["properties"]) == ("json_schema", schema["properties"])


@pytest.mark.parametrize(
    ("output_config", "param"),
    [
        ({"format": {"type": "xml"}}, "output_config.format.type"),
        ({"format": {"type": "json_schema"}}, "output_config.format.schema"),
        ({"effort": "high"}, "output_config.effort"),
        ({"effort": 3}, "output_config.effort"),
        ({"verbosity": "low"}, "output_config.verbosity"),
    ],
)
async def test_output_config_that_cannot_be_honored(server: Server, output_config: dict[str, Any], param: str) -> None:
    """Guards against options of the answer's form that are dropped in silence."""
    response = await server.post(PATH, body(output_config=output_config))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("template", "thinking", "shown"),
    [
        ("{{ messages[-1].content }}{% if enable_thinking %}[think]{% endif %}", {"type": "enabled"}, "Hi[think]"),
        ("{{ messages[-1].content }}{% if enable_thinking %}[think]{% endif %}", {"type": "disabled"}, "Hi"),
        ("{{ messages[-1].content }}{% if enable_thinking %}[think]{% endif %}", {"type": "adaptive"}, "Hi"),
        ("{{ messages[-1].content }}<think>", {"type": "enabled", "budget_tokens": 1024}, "Hi<think>"),
        ("{{ messages[-1].content }}", {"type": "disabled"}, "Hi"),
        ("{{ messages[-1].content }}", {"type": "adaptive"}, "Hi"),
    ],
)
async def test_thinking(server: Server, template: str, thinking: dict[str, Any], shown: str) -> None:
    """Regression: thinking that was asked for, accepted, and never told to the model."""
    server.app.state.service.chat_template = ChatTemplate(template)
    ok(await server.post(PATH, body(thinking=thinking)))
    assert server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids) == shown


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_can_be_left_out_of_the_answer(server: Server, stream: bool) -> None:
    """Regression: thoughts shown to a client that asked for none of them."""
    server.app.state.service.chat_template = ChatTemplate("{{ messages[-1].content }}<think>")
    server.say("secret</think>public")
    answer = await server.post(PATH, body(thinking={"type": "adaptive", "display": "omitted"}, stream=stream))
    assert "secret" not in answer.text
    assert "public" in answer.text
    assert '"type":"thinking"' in answer.text
