"""Anthropic's official client against /v1/messages."""

from typing import Literal

import anthropic
import pytest
from pydantic import BaseModel

from tests.e2e.conftest import DEFAULT_MODEL

# Newer clients no longer name the temperature; the endpoint has it still.
ASK = {"model": DEFAULT_MODEL, "extra_body": {"temperature": 0}}
SEA = [{"role": "user", "content": "Tell me about the sea in one sentence."}]
TOOL = {
    "name": "get_weather",
    "description": "Of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Animal(BaseModel):
    name: Literal["cat", "dog", "horse"]
    legs: Literal[2, 4]


def test_a_message_says_what_a_chat_says(claude, client):
    """A thin endpoint that renders another prompt, or counts otherwise than the one it stands on."""
    message = claude.messages.create(messages=SEA, max_tokens=12, system="Be brief.", **ASK)
    chat = client.chat.completions.create(
        messages=[{"role": "system", "content": "Be brief."}, *SEA], max_tokens=12, **ASK
    )
    assert [block.text for block in message.content] == [chat.choices[0].message.content]
    assert (message.role, message.stop_reason) == ("assistant", "max_tokens")
    assert message.usage.output_tokens == 12
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == chat.usage.prompt_tokens


def test_a_stream_grows_into_the_same_message(claude):
    """Events that the client's accumulator refuses or misses."""
    plain = claude.messages.create(messages=SEA, max_tokens=12, **ASK)
    with claude.messages.stream(messages=SEA, max_tokens=12, **ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == plain.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)


def test_a_stop_sequence_is_named(claude):
    """stop_sequences that are ignored, or a stop_reason that hides them."""
    text = claude.messages.create(messages=SEA, max_tokens=12, **ASK).content[0].text
    stop = text[5:9]
    message = claude.messages.create(messages=SEA, max_tokens=12, stop_sequences=[stop], **ASK)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in message.content) == text[: text.index(stop)]


def test_tokens_are_counted_before_they_are_paid_for(claude):
    """count_tokens that leaves out the system prompt, the tools or the template's own tokens."""
    message = claude.messages.create(messages=SEA, max_tokens=1, system="Be brief.", tools=[TOOL], **ASK)
    counted = claude.messages.count_tokens(messages=SEA, system="Be brief.", tools=[TOOL], model=DEFAULT_MODEL)
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_is_used_and_answered(claude, choice):
    """tool_use whose input is text, or a tool_result that is refused; streamed otherwise than whole."""
    ask = {"messages": SEA, "max_tokens": 60, "tools": [TOOL], "tool_choice": choice, **ASK}
    message = claude.messages.create(**ask)
    [call] = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use"
    assert (call.name, call.input.keys()) == ("get_weather", {"city"})
    with claude.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    assert [(b.name, b.input) for b in streamed.content] == [(call.name, call.input)]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"}]}
    history = [*SEA, {"role": "assistant", "content": message.content}, result]
    assert claude.messages.create(messages=history, tools=[TOOL], max_tokens=8, **ASK).content


def test_parse_gives_a_pydantic_model(claude):
    """output_config.format is taken for an unknown field, and the answer is prose."""
    question = [{"role": "user", "content": "Name an animal."}]
    hot = {"model": DEFAULT_MODEL, "extra_body": {"temperature": 1.3}}
    message = claude.messages.parse(messages=question, max_tokens=40, output_format=Animal, **hot)
    assert isinstance(message.parsed_output, Animal)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"model": "another"}, anthropic.NotFoundError),
        ({"messages": []}, anthropic.BadRequestError),
        ({"extra_body": {"top_p": 7}}, anthropic.BadRequestError),
    ],
)
def test_refusals_are_the_client_s_exceptions(claude, change, error):
    """An OpenAI error body where this client reads its own."""
    with pytest.raises(error) as caught:
        claude.messages.create(**({"messages": SEA, "max_tokens": 4, **ASK} | change))
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["message"]
