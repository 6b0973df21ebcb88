"""response_format (OpenAI's) and structured_outputs (vLLM's) -> the grammar that the output must follow."""

import asyncio
from typing import Any

import msgspec

from server.errors import InvalidRequest, UnsupportedFeature
from server.protocol import GrammarSpec
from server.structured import GrammarCompiler

_KINDS = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}


async def checked_grammar(
    response_format: Any, structured_outputs: dict[str, Any] | None, compiler: GrammarCompiler
) -> GrammarSpec | None:
    """None: any text will do. Raises InvalidRequest that says what is wrong with the schema, pattern or grammar."""
    by_format = _of_response_format(response_format)
    by_option = _of_structured_outputs(structured_outputs)
    if by_format is not None and by_option is not None:
        raise InvalidRequest("response_format and structured_outputs exclude each other", param="structured_outputs")
    if by_format is not None:
        await check(by_format, compiler, param="response_format")
    if by_option is not None:
        await check(by_option, compiler, param="structured_outputs")
    return by_format or by_option


async def check(spec: GrammarSpec, compiler: GrammarCompiler, *, param: str) -> None:
    """Compiles it, off the event loop."""
    await asyncio.to_thread(compiler.check, spec, param=param)


def as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _of_response_format(response_format: Any) -> GrammarSpec | None:
    if response_format is None:
        return None
    if not isinstance(response_format, dict):
        raise InvalidRequest("response_format must be an object", param="response_format")
    match response_format.get("type"):
        case "text":
            return None
        case "json_object":
            return GrammarSpec("json_object")
        case "json_schema":
            json_schema = response_format.get("json_schema")
            schema = json_schema.get("schema") if isinstance(json_schema, dict) else None
            if not isinstance(schema, dict):
                raise InvalidRequest(
                    "response_format.json_schema.schema must be an object", param="response_format.json_schema.schema"
                )
            return GrammarSpec("json_schema", as_json(schema))
        case "structural_tag":
            raise UnsupportedFeature("structural tags are not supported", param="response_format.type")
        case other:
            raise InvalidRequest(
                f"response_format.type must be text, json_object or json_schema, not {str(other)[:40]!r}",
                param="response_format.type",
            )


def _of_structured_outputs(options: dict[str, Any] | None) -> GrammarSpec | None:
    given = {key: value for key, value in (options or {}).items() if value is not None and value is not False}
    if unknown := given.keys() - _KINDS.keys():
        name = f"structured_outputs.{min(unknown)}"
        raise UnsupportedFeature(f"{name} is not supported", param=name)
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequest(
            f"structured_outputs takes one constraint, not {', '.join(sorted(given))}", param="structured_outputs"
        )
    [(key, value)] = given.items()
    if key == "json_object":
        return GrammarSpec("json_object")
    if key == "choice" or (key == "json" and not isinstance(value, str)):
        return GrammarSpec(_KINDS[key], as_json(value))
    if not isinstance(value, str):
        raise InvalidRequest(f"structured_outputs.{key} must be a string", param=f"structured_outputs.{key}")
    return GrammarSpec(_KINDS[key], value)
