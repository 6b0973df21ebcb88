"""Answers that a program reads: the model is small and knows little, the form must be right all the same."""

import json

import pytest

from tests.e2e.conftest import DEFAULT_MODEL

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 16}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_json_follows_its_schema(client, temperature):
    """A mask that is applied a token late, or forgotten when another request joins the batch."""
    answer = client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=say("Invent a person."),
        max_tokens=60,
        temperature=temperature,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
    )
    person = json.loads(answer.choices[0].message.content)
    assert set(person) == {"name", "age"}
    assert 0 <= person["age"] <= 150
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called(client, stream):
    """Arguments that aren't JSON, or a stream whose pieces don't add up to them."""
    ask = {
        "model": DEFAULT_MODEL,
        "messages": say("What is the weather in Seoul?"),
        "tools": [WEATHER],
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": 60,
    }
    if stream:
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**ask, stream=True) if chunk.choices]
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        name, arguments = calls[0].function.name, "".join(call.function.arguments or "" for call in calls)
        reason = chunks[-1].finish_reason
    else:
        choice = client.chat.completions.create(**ask).choices[0]
        [call] = choice.message.tool_calls
        name, arguments, reason = call.function.name, call.function.arguments, choice.finish_reason
    assert (name, reason) == ("get_weather", "tool_calls")
    assert set(json.loads(arguments)) == {"city"}


def test_a_choice_is_one_of_them(client):
    """A regular expression that lets half a word through."""
    answer = client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=say("Is water wet?"),
        max_tokens=8,
        extra_body={"structured_outputs": {"choice": ["certainly", "hardly"]}},
    )
    assert answer.choices[0].message.content in {"certainly", "hardly"}


def test_logprobs_describe_the_greedy_answer(client):
    """Log-probabilities of another position, or of logits after temperature."""
    answer = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=say("Count to three."), max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert len(choice.logprobs.content) > 0
    for token in choice.logprobs.content:
        assert token.token == token.top_logprobs[0].token
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    assert "".join(token.token for token in choice.logprobs.content).startswith(choice.message.content)
