"""The official Python client beyond the first day: its helpers, its other endpoint, and its async form."""

import asyncio
import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.conftest import DEFAULT_MODEL

ASK = {"model": DEFAULT_MODEL, "temperature": 0}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Of a city", "parameters": WEATHER}}
SEA = [{"role": "user", "content": "Tell me about the sea in one sentence."}]
FRANCE = "What is the capital of France? Answer in one word."  # the model ends this answer by itself
PARIS = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]


class Animal(BaseModel):
    name: Literal["cat", "dog", "horse"]
    legs: Literal[2, 4]
    tame: bool


@pytest.mark.anyio
async def test_async_streams_run_side_by_side(client, server):
    """Streams of one connection pool that wait for each other, or pieces that reach the wrong one."""
    alone = [_text(client, f"Count from {n}.") for n in (1, 5)]
    async with server.async_client() as many:

        async def read(n: int) -> str:
            stream = await many.chat.completions.create(
                messages=_say(f"Count from {n}."), stream=True, max_tokens=12, **ASK
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

        assert await asyncio.gather(read(1), read(5)) == alone


def test_the_stream_helper_ends_with_the_whole_answer(client):
    """Chunks that the client's own accumulator can't put together."""
    with client.chat.completions.stream(messages=_say(FRANCE), **ASK) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content == _text(client, FRANCE)
    assert final.choices[0].finish_reason == "stop"


def test_logprobs_reach_the_helper_types(client):
    """Log-probabilities in a form that the client's types drop."""
    answer = client.chat.completions.create(messages=SEA, max_tokens=4, logprobs=True, top_logprobs=2, **ASK)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert all(len(entry.top_logprobs) == 2 and bytes(entry.bytes).decode() == entry.token for entry in content)


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_parse_gives_a_pydantic_model(client, temperature):
    """A strict schema, as the client writes it, that is refused or not followed."""
    ask = {"messages": _say("Name an animal."), "max_tokens": 60, "model": DEFAULT_MODEL, "temperature": temperature}
    answer = client.chat.completions.parse(response_format=Animal, **ask)
    assert isinstance(answer.choices[0].message.parsed, Animal)
    with client.chat.completions.stream(response_format=Animal, **ask) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Animal)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_tool_call_and_its_answer(client, choice):
    """Arguments that are no JSON, a call without an id, or a conversation with a tool's result that is refused."""
    answer = client.chat.completions.create(messages=PARIS, tools=[TOOL], tool_choice=choice, max_tokens=60, **ASK)
    message = answer.choices[0].message
    [call] = message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.id
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments).keys() == {"city", "unit"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
    follow_up = client.chat.completions.create(messages=[*PARIS, message, result], tools=[TOOL], max_tokens=8, **ASK)
    assert follow_up.choices[0].message.content


def test_streamed_tool_calls_equal_whole_ones(client):
    """Deltas of arguments that the client's accumulator can't join, or that differ from the plain answer."""
    ask = {"messages": PARIS, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60, **ASK}
    plain = client.chat.completions.create(**ask).choices[0].message.tool_calls[0].function
    with client.chat.completions.stream(**ask) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert (final.message.tool_calls[0].function.name, final.message.tool_calls[0].function.arguments) == (
        plain.name,
        plain.arguments,
    )


def test_responses_whole_and_streamed(client):
    """The newer endpoint's answer or order of events, as the client's types know them."""
    ask = {"model": DEFAULT_MODEL, "input": FRANCE, "temperature": 0}
    whole = client.responses.create(**ask)
    assert whole.output_text == _text(client, FRANCE)
    assert (whole.status, whole.usage.output_tokens > 1) == ("completed", True)
    with client.responses.stream(**ask) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert events[0].type == "response.created"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert [e.sequence_number for e in events] == sorted({e.sequence_number for e in events})
    assert final.output_text == whole.output_text


def test_responses_that_were_cut_off_say_so(client):
    """An answer at its token limit that looks complete; the stream's last event then has another name."""
    ask = {"model": DEFAULT_MODEL, "input": SEA[0]["content"], "temperature": 0, "max_output_tokens": 16}
    whole = client.responses.create(**ask)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 16
    *_, last = client.responses.create(**ask, stream=True)
    assert (last.type, last.response.output_text) == ("response.incomplete", whole.output_text)


def test_responses_parse_and_tools(client):
    """text.format and the flat form of tools are read as if they were those of chat completions."""
    ask = {"model": DEFAULT_MODEL, "temperature": 0, "max_output_tokens": 60}
    assert isinstance(client.responses.parse(input="Name an animal.", text_format=Animal, **ask).output_parsed, Animal)
    tool = {"type": "function", "strict": True, **TOOL["function"]}
    answer = client.responses.create(input=PARIS, tools=[tool], tool_choice="required", **ask)
    [call] = [item for item in answer.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments).keys()) == ("get_weather", {"city", "unit"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    history = [*PARIS, call.model_dump(exclude_none=True), result]
    assert client.responses.create(input=history, tools=[tool], **ask).output_text


def test_errors_arrive_as_the_client_s_exceptions(client):
    """A refusal that the client can only show as text."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=SEA, top_p=3, **ASK)
    assert (caught.value.param, caught.value.type) == ("top_p", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="another", input="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(messages=SEA, stream=True, temperature=-1, model=DEFAULT_MODEL)


def _say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _text(client: openai.OpenAI, content: str, *, max_tokens: int = 12) -> str:
    answer = client.chat.completions.create(messages=_say(content), max_tokens=max_tokens, **ASK)
    return answer.choices[0].message.content or ""
