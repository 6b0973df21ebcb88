"""LiteLLM, as a library: both of its ways to name a server like this one.  python litellm_client.py URL MODEL"""

import asyncio
import json
import sys

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}


def main(url: str, model: str) -> None:
    at = {"api_base": f"{url}/v1", "api_key": "none"}
    ask = {"messages": [{"role": "user", "content": "Tell me about the sea."}], "temperature": 0, "max_tokens": 24}
    whole = litellm.completion(f"openai/{model}", **at, **ask)
    text = whole.choices[0].message.content
    assert whole.usage.completion_tokens == 24
    assert litellm.completion(f"hosted_vllm/{model}", **at, **ask).choices[0].message.content == text
    stream = litellm.completion(f"openai/{model}", stream=True, stream_options={"include_usage": True}, **at, **ask)
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert any(getattr(c, "usage", None) for c in chunks)
    assert asyncio.run(litellm.acompletion(f"openai/{model}", **at, **ask)).choices[0].message.content == text

    ask["max_tokens"] = 60
    called = litellm.completion(f"hosted_vllm/{model}", tools=[TOOL], tool_choice="required", **at, **ask)
    [call] = called.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city"}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    shaped = litellm.completion(f"openai/{model}", response_format=wanted, **at, **ask)
    assert 0 <= json.loads(shaped.choices[0].message.content)["n"] <= 9

    old = litellm.text_completion(model=f"text-completion-openai/{model}", prompt="1, 2, 3,", max_tokens=4, **at)
    assert old.choices[0].text
    assert _refusal(f"openai/{model}", top_p=7, **at, **ask).startswith("litellm.BadRequestError")
    claude = {"api_base": url, "api_key": "none"}
    assert litellm.completion(f"anthropic/{model}", **claude, **ask).choices[0].message.content


def _refusal(model: str, **ask: object) -> str:
    try:
        litellm.completion(model, num_retries=0, **ask)
    except litellm.BadRequestError as error:
        return str(error)
    return "it was taken"


if __name__ == "__main__":
    main(*sys.argv[1:])
