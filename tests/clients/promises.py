"""What is promised of constrained answers, tried many times: schemas are followed and forced tool calls parse."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai

from tests.fuzz.values import random_schema

SIDE_BY_SIDE = 8
MAX_TOKENS = 1000
"""More than any of the schemas lets an answer need."""


def broken_schemas(client: openai.OpenAI, model: str, *, seed: int, count: int) -> list[str]:
    """Asks for an answer by each of `count` random schemas at temperature 1. One line for each that doesn't follow."""
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(count)]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        return [line for line in pool.map(lambda job: _try_schema(client, model, *job), enumerate(schemas)) if line]


def _try_schema(client: openai.OpenAI, model: str, number: int, schema: dict[str, Any]) -> str | None:
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    choice = _ask(client, model, "Describe a traveler as JSON.", number, response_format=wanted)
    try:
        jsonschema.validate(json.loads(choice.message.content or ""), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return (
            f"{number}: {str(error)[:200]} | {json.dumps(schema)} | {choice.finish_reason} {choice.message.content!r}"
        )
    return None if choice.finish_reason == "stop" else f"{number}: ended by {choice.finish_reason}"


def broken_calls(client: openai.OpenAI, model: str, *, seed: int, count: int) -> list[str]:
    """Makes the model call one of two random tools, `count` times. One line for each answer that is no valid call."""
    rng = random.Random(seed)
    jobs = [(number, [random_schema(rng, 2), random_schema(rng, 2)]) for number in range(count)]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        return [line for line in pool.map(lambda job: _try_call(client, model, *job), jobs) if line]


def _try_call(client: openai.OpenAI, model: str, number: int, schemas: list[dict[str, Any]]) -> str | None:
    by_name = {f"tool_{i}": schema for i, schema in enumerate(schemas)}
    tools = [
        {"type": "function", "function": {"name": name, "description": f"Does {name}", "parameters": schema}}
        for name, schema in by_name.items()
    ]
    choice = _ask(client, model, "Use a tool.", number, tools=tools, tool_choice="required")
    try:
        for call in choice.message.tool_calls:
            jsonschema.validate(json.loads(call.function.arguments), by_name[call.function.name])
    except (TypeError, KeyError, ValueError, jsonschema.ValidationError) as error:
        return f"{number}: {type(error).__name__} {str(error)[:200]} | {json.dumps(by_name)} | {choice}"
    return None if choice.finish_reason == "tool_calls" else f"{number}: ended by {choice.finish_reason}"


def _ask(client: openai.OpenAI, model: str, text: str, seed: int, **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    answer = client.chat.completions.create(
        model=model, messages=messages, temperature=1, seed=seed, max_tokens=MAX_TOKENS, **fields
    )
    return answer.choices[0]
