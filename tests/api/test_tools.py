"""Tools and reasoning through all three endpoints that speak in messages."""

import json
from typing import Any

import pytest

from server.frontend.tools import FORMATS
from server.tokenizer import ChatTemplate
from tests.api.conftest import Server, ok

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALLS = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "sub", "arguments": {"a": 2}}\n</tool_call>'  # noqa: E501
EXPECTED = [("add", {"a": 1}), ("sub", {"a": 2})]


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS, **fields}}


TOOLS = [tool("add", description="Adds."), tool("sub")]


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "1 + 1?"}], "tools": TOOLS, **fields}


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 1000])
@pytest.mark.parametrize("prefix", ["", "Let me see."])
async def test_calls_plain_and_streamed(server: Server, tokens_per_delta: int, prefix: str) -> None:
    """Guards ids, names, JSON arguments and the finish reason, and that the stream adds up to the same calls."""
    server.engine.tokens_per_delta = tokens_per_delta
    server.say(prefix + CALLS)
    [choice] = ok(await server.post(CHAT, chat_body()))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == (prefix or None)
    calls = choice["message"]["tool_calls"]
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == EXPECTED
    assert len({c["id"] for c in calls}) == 2
    streamed: list[dict[str, Any]] = []
    content = ""
    events = (await server.events(CHAT, chat_body()))[:-1]
    for delta in (e["choices"][0]["delta"] for e in events):
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if call.get("id"):
                assert call["index"] == len(streamed)
                streamed.append({"name": call["function"]["name"], "arguments": ""})
            streamed[call["index"]]["arguments"] += call["function"]["arguments"]
    assert content == prefix
    assert [(c["name"], json.loads(c["arguments"])) for c in streamed] == EXPECTED
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_one_call_at_a_time(server: Server) -> None:
    """Guards parallel_tool_calls = false."""
    server.say(CALLS)
    [choice] = ok(await server.post(CHAT, chat_body(parallel_tool_calls=False)))["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


async def test_no_call(server: Server) -> None:
    """Guards plain answers where tools were offered, and tool_choice = none, which does not read calls at all."""
    server.say("Two.")
    [choice] = ok(await server.post(CHAT, chat_body()))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Two.", "stop")
    assert "tool_calls" not in choice["message"]
    server.say(CALLS)
    [choice] = ok(await server.post(CHAT, chat_body(tool_choice="none")))["choices"]
    assert choice["message"]["content"] == CALLS


async def test_what_the_model_is_told(server: Server) -> None:
    """Guards that the prompt holds the tools unless tool_choice is none, and that /tokenize counts the same."""
    counts = {}
    for choice in ("auto", "none", "required"):
        ok(await server.post(CHAT, chat_body(tool_choice=choice)))
        prompt = server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
        assert ("Adds." in prompt) is (choice != "none")
        counts[choice] = len(server.engine.requests[-1].prompt_token_ids)
    assert ok(await server.post("/tokenize", chat_body()))["count"] == counts["auto"]


async def test_a_conversation_with_calls_that_the_template_does_not_know(server: Server) -> None:
    """Guards what was said, and arguments sent as an object, on their way into text."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": True}}}
    said = {"role": "assistant", "content": [{"type": "text", "text": "Adding."}], "tool_calls": [call]}
    ok(await server.post(CHAT, chat_body(messages=[said, {"role": "tool", "tool_call_id": "c", "content": "2"}])))
    prompt = server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert 'Adding.\n<tool_call>\n{"name": "add", "arguments": {"a": true}}\n</tool_call>' in prompt
    assert "<tool_response>\n2\n</tool_response>" in prompt


@pytest.mark.parametrize("role", ["system", "tool"])
@pytest.mark.parametrize("content", [5, {"a": 1}, [{"type": "image_url", "image_url": {"url": "x"}}]])
async def test_content_that_no_text_can_hold(server: Server, role: str, content: Any) -> None:
    """Guards the check of content where tools are told in a system message: it was dropped, or a failure of ours."""
    messages = [{"role": role, "content": content}, {"role": "user", "content": "1 + 1?"}]
    response = await server.post(CHAT, chat_body(messages=messages))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith("messages[0].content")


async def test_forced_call_that_is_cut_off(server: Server) -> None:
    """Guards content from the half of a call that max_tokens left."""
    server.say(CALLS)
    [choice] = ok(await server.post(CHAT, chat_body(tool_choice="required", max_tokens=2)))["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("auto", None),
        ("required", {"add", "sub"}),
        ({"type": "function", "function": {"name": "sub"}}, {"sub"}),
    ],
)
async def test_forced_calls_are_grammars(server: Server, choice: Any, names: set[str] | None) -> None:
    """Guards that required and named calls are forced by a grammar, and only those."""
    ok(await server.post(CHAT, chat_body(tool_choice=choice)))
    grammar = server.engine.requests[-1].sampling.grammar
    if names is None:
        assert grammar is None
        return
    assert grammar is not None
    assert {name for name in ("add", "sub") if f'\\"{name}\\"' in grammar.source} == names


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": "nope"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("x", description=5)]}, "tools[0].function.description"),
        ({"tools": [tool("x", parameters=5)]}, "tools[0].function.parameters"),
        ({"tools": [tool("x"), tool("x")]}, "tools"),
        ({"tools": [tool(f"t{i}") for i in range(129)]}, "tools"),
        ({"tools": [tool("x", parameters={"type": "banana"})], "tool_choice": "required"}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "mul"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    """Guards against tools that can't be honoured reaching the template or the grammar engine."""
    response = await server.post(CHAT, chat_body(**fields))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)


async def test_responses(server: Server) -> None:
    """Guards function_call items and their events, and the way back: a call and its output are two turns."""
    server.say("Let me see." + CALLS)
    tools = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in ("add", "sub")]
    response = ok(await server.post("/v1/responses", {"input": "1 + 1?", "tools": tools}))
    assert [item["type"] for item in response["output"]] == ["message", "function_call", "function_call"]
    assert [(i["name"], json.loads(i["arguments"])) for i in response["output"][1:]] == EXPECTED
    streamed = await server.post("/v1/responses", {"input": "1 + 1?", "tools": tools, "stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
    done = [e for e in events if e["type"] == "response.function_call_arguments.done"]
    assert [(e["output_index"], json.loads(e["arguments"])) for e in done] == [(1, {"a": 1}), (2, {"a": 2})]
    pieces = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(pieces) == '{"a": 1}{"a": 2}'
    output = {"type": "function_call_output", "call_id": response["output"][1]["call_id"], "output": "42"}
    ok(await server.post("/v1/responses", {"input": [{"role": "user", "content": "?"}, *response["output"], output]}))
    assert "42" in server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)


async def test_anthropic(server: Server) -> None:
    """Guards tool_use blocks and their events, and the way back."""
    server.say("Let me see." + CALLS)
    tools = [{"name": name, "input_schema": PARAMETERS} for name in ("add", "sub")]
    body = {"max_tokens": 200, "tools": tools, "messages": [{"role": "user", "content": "1 + 1?"}]}
    message = ok(await server.post("/v1/messages", body))
    assert message["stop_reason"] == "tool_use"
    assert [block["type"] for block in message["content"]] == ["text", "tool_use", "tool_use"]
    assert [(b["name"], b["input"]) for b in message["content"][1:]] == EXPECTED
    streamed = await server.post("/v1/messages", {**body, "stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == ["text", "tool_use", "tool_use"]
    partial = [e["delta"].get("partial_json", "") for e in events if e["type"] == "content_block_delta"]
    assert "".join(partial) == '{"a": 1}{"a": 2}'
    result = {"type": "tool_result", "tool_use_id": message["content"][1]["id"], "content": "42"}
    turns = [*body["messages"], {"role": "assistant", "content": message["content"]}]
    ok(await server.post("/v1/messages", {**body, "messages": [*turns, {"role": "user", "content": [result]}]}))
    prompt = server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
    assert "42" in prompt
    assert '{"name": "add", "arguments": {"a":1}}' in prompt


@pytest.fixture
def thinking(server: Server) -> Server:
    """A model whose template knows <think>, as Qwen3's does."""
    source = (
        "{% for m in messages %}{{ m.content }}\n{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{# <think> #}"
    )
    server.app.state.service.chat_template = ChatTemplate(source)
    return server


async def test_reasoning(thinking: Server) -> None:
    """Guards that thinking never shows up in the content, in any of the three endpoints, and is counted."""
    thinking.say("<think>\nOne and one.\n</think>\n\nTwo.")
    answer = ok(await thinking.post(CHAT, chat_body(tools=None)))
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("One and one.", "Two.")
    assert 0 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < answer["usage"]["completion_tokens"]
    events = (await thinking.events(CHAT, chat_body(tools=None)))[:-1]
    deltas = [e["choices"][0]["delta"] for e in events]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "One and one."
    assert "".join(d.get("content", "") for d in deltas) == "Two."
    response = ok(await thinking.post("/v1/responses", {"input": "?"}))
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    body = {"max_tokens": 99, "messages": [{"role": "user", "content": "?"}]}
    blocks = ok(await thinking.post("/v1/messages", body))["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]


@pytest.mark.parametrize(
    "fields",
    [{"tools": None, "response_format": {"type": "json_object"}}, {"tool_choice": "required"}],
)
async def test_a_grammar_leaves_no_room_for_thinking(thinking: Server, fields: dict[str, Any]) -> None:
    """Guards constrained answers of thinking models from being written, and hidden, as thoughts."""
    ok(await thinking.post(CHAT, chat_body(**fields)))
    prompt = thinking.tokenizer.decode(thinking.engine.requests[-1].prompt_token_ids)
    assert prompt.endswith("<think></think>")
    thinking.app.state.service.chat_template = ChatTemplate("{{ messages[-1].content }}<think>\n")
    thinking.say('{"a": 1}')
    [choice] = ok(await thinking.post(CHAT, chat_body(tools=None, response_format={"type": "json_object"})))["choices"]
    assert choice["message"]["content"] == '{"a": 1}'
    prompt = thinking.tokenizer.decode(thinking.engine.requests[-1].prompt_token_ids)
    assert prompt.endswith("<think>\n</think>\n\n")


async def test_a_chosen_parser(server: Server) -> None:
    """Guards --tool-call-parser against being overruled by what the template seems to teach."""
    server.app.state.service.tool_format = FORMATS["mistral"]
    server.say('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]')
    [choice] = ok(await server.post(CHAT, chat_body()))["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["add"]


async def test_reasoning_effort(thinking: Server) -> None:
    """Guards that the effort reaches the template where it knows one, and is refused elsewhere."""
    ok(await thinking.post(CHAT, chat_body(tools=None, reasoning_effort="none")))
    prompt = thinking.tokenizer.decode(thinking.engine.requests[-1].prompt_token_ids)
    assert prompt.endswith("<think></think>")
    thinking.app.state.service.chat_template = ChatTemplate("{{ messages[0].content }}")
    response = await thinking.post(CHAT, chat_body(tools=None, reasoning_effort="high"))
    assert response.json()["error"]["param"] == "reasoning_effort"
