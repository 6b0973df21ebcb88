"""response_format (OpenAI's) and structured_outputs (vLLM's) -> the grammar that the output must follow."""

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
_COMPOSED = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "unevaluatedProperties"})


async def checked_grammar(
    response_format: Any, structured_outputs: dict[str, Any] | None, compiler: GrammarCompiler
) -> GrammarSpec | None:
    """None: any text will do. Raises InvalidRequest that says what is wrong with the schema, pattern or grammar."""
    by_format = _of_response_format(response_format)
    by_option = _of_structured_outputs(structured_outputs)
    if by_format is not None and by_option is not None:
        raise InvalidRequest("response_format and structured_outputs exclude each other", param="structured_outputs")
    if by_format is not None:
        await compiler.check(by_format, param="response_format")
    if by_option is not None:
        await compiler.check(by_option, param="structured_outputs")
    return by_format or by_option


def as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def closed(schema: Any) -> Any:
    """The schema without properties that it does not list, where it leaves that open: what follows it follows both.

    A small model that may invent properties goes on inventing them until its tokens run out. Schemas that are put
    together from others stay as they are: what one part does not list, another may.
    """
    if not isinstance(schema, dict):
        return schema
    shut = dict(schema)
    for keyword in ("properties", "$defs", "definitions"):
        if isinstance(entries := schema.get(keyword), dict):
            shut[keyword] = {name: closed(entry) for name, entry in entries.items()}
    if "items" in schema:
        shut["items"] = closed(schema["items"])
    if "properties" in schema and not _COMPOSED & schema.keys():
        shut.setdefault("additionalProperties", False)
    return shut


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
            return GrammarSpec("json_schema", as_json(closed(schema)))
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
    if key == "choice":
        return GrammarSpec(key, as_json(value))
    if key == "json":
        return GrammarSpec("json_schema", as_json(closed(_parsed(value))))
    if not isinstance(value, str):
        raise InvalidRequest(f"structured_outputs.{key} must be a string", param=f"structured_outputs.{key}")
    return GrammarSpec(_KINDS[key], value)


def _parsed(schema: Any) -> Any:
    """A schema may come as an object or as JSON text."""
    if not isinstance(schema, str):
        return schema
    try:
        return msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"structured_outputs.json is not JSON: {error}", param="structured_outputs.json") from None
