"""POST /v1/responses: the official client's view of it."""

from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from server.protocol import FinishReason
from tests.api.conftest import MODEL, REPLY, Server, ok

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"


def client_of(server: Server) -> AsyncOpenAI:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://test/v1")
    return AsyncOpenAI(api_key="x", base_url="http://test/v1", http_client=http, max_retries=0)


async def test_plain_answer(server: Server) -> None:
    """Guards what the openai package makes of a response."""
    server.engine.num_cached_tokens = 2
    response = await client_of(server).responses.create(model=MODEL, input="Hi", instructions="Be brief.")
    assert response.output_text == REPLY
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 2
    prompt = server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert "system\nBe brief." in prompt
    assert prompt.count("user\nHi") == 1


async def test_event_sequence(server: Server) -> None:
    """Guards the order that the official client's helpers rely on, the numbering, and the text."""
    stream = await client_of(server).responses.create(model=MODEL, input="Hi", stream=True)
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == REPLY
    assert events[0].response.status == "in_progress"
    assert events[-1].response.output_text == REPLY
    async with client_of(server).responses.stream(model=MODEL, input="Hi") as manager:
        assert (await manager.get_final_response()).output_text == REPLY


async def test_cut_off(server: Server) -> None:
    """Guards status incomplete with its reason where max_output_tokens ended the answer."""
    response = ok(await server.post(PATH, {"input": "Hi", "max_output_tokens": 2}))
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_nothing_said(server: Server) -> None:
    """Guards clients that expect a message: an empty answer is an empty message."""
    server.say("")
    response = ok(await server.post(PATH, {"input": "Hi"}))
    assert [item["content"][0]["text"] for item in response["output"]] == [""]


async def test_whole_conversation(server: Server) -> None:
    """Guards that the items of earlier answers come back as the turns they were."""
    first = ok(await server.post(PATH, {"input": "one"}))
    items: list[Any] = [{"role": "user", "content": "one"}, *first["output"]]
    items.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "two"}]})
    ok(await server.post(PATH, {"input": items}))
    prompt = server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert f"user\none<|im_end|>\n<|im_start|>assistant\n{REPLY}<|im_end|>\n<|im_start|>user\ntwo<|im_end|>" in prompt


async def test_text_format(server: Server) -> None:
    """Guards that text.format constrains the output as response_format does."""
    schema = {"type": "object", "properties": {}}
    body = {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "t", "schema": schema}}}
    ok(await server.post(PATH, body))
    grammar = server.engine.requests[-1].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"


async def test_logprobs(server: Server) -> None:
    """Guards include = message.output_text.logprobs."""
    body = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = ok(await server.post(PATH, body))
    logprobs = response["output"][0]["content"][0]["logprobs"]
    assert b"".join(bytes(entry["bytes"]) for entry in logprobs).decode() == REPLY
    assert len(logprobs[0]["top_logprobs"]) == 2


async def test_failure_in_a_stream(server: Server) -> None:
    """Guards that a broken answer ends with response.failed, not with silence."""
    server.engine.fail_after = (3, FinishReason.ERROR)
    response = await server.post(PATH, {"input": "Hi", "stream": True})
    assert '"type":"response.failed"' in response.text.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, None),
        ({"input": []}, "messages"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, None),
        ({"input": [{"role": "al ien", "content": "x"}]}, "messages[0].role"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"store": True}, "store"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"max_output_tokens": 10**9}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)
async def test_refused(server: Server, fields: dict[str, Any], param: str | None) -> None:
    """Guards fields that need a server with a memory, or more than text: refused by name."""
    response = await server.post(PATH, {"input": "Hi", **fields})
    assert response.status_code == 400, response.text
    if param is not None:
        assert response.json()["error"]["param"] == param
