"""From what a request asks for to the grammar engine's own notation, with the checks that need no engine.

JSON is kept compact where the model may choose: between tokens of JSON at most one space, or one line break with its
indent. A small model that may write any white space sooner or later writes nothing else.
"""

import copy
import json
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from server.errors import InvalidRequest
from server.protocol import GrammarSpec

_JSON_OPTIONS = {"whitespace_pattern": r" |\n[ ]{0,20}"}
_ANY_OBJECT = '{"type": "object"}'
_MAX_DEPTH = 64
_MAX_PROPERTIES = 1000
"""Over the whole schema: the engine's tables grow faster than their number."""
_MAX_CHOICES = 10_000
_KNOWN_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
_DATA_KEYS = frozenset({"const", "enum", "default", "examples", "example"})
"""Their values are data, not schemas: nothing in them is a keyword."""


def grammar_text(spec: GrammarSpec, *, param: str) -> str:
    """The grammar in llguidance's notation. Raises InvalidRequest with this param."""
    try:
        match spec.kind:
            case "json_object":
                return _from_schema(_ANY_OBJECT, param)
            case "json_schema":
                return _from_schema(spec.source, param)
            case "regex":
                return LLMatcher.grammar_from_regex(_unanchored(spec.source))
            case "choice":
                return LLMatcher.grammar_from_lark(_choice(spec.source, param))
            case "grammar":
                is_gbnf = "::=" in spec.source
                return LLMatcher.grammar_from_lark(gbnf_to_lark(spec.source) if is_gbnf else spec.source)
    except InvalidRequest:
        raise
    except Exception as error:  # the converters raise what they like about their input
        raise InvalidRequest(f"the {spec.kind} can't be read: {error}", param=param) from error
    raise InvalidRequest(f"unknown kind of structured output: {spec.kind!r}", param=param)


def _from_schema(source: str, param: str) -> str:
    try:
        schema = json.loads(source)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the schema is not valid JSON: {error}", param=param) from error
    return LLMatcher.grammar_from_json_schema(embedded_schema({} if schema is True else schema, param=param))


def embedded_schema(schema: Any, *, param: str) -> str:
    """The schema as JSON text, as `%json` in a Lark grammar takes it: with the rules for white space, within limits.

    Raises InvalidRequest with this param.
    """
    if not isinstance(schema, dict):
        raise InvalidRequest("a schema must be a JSON object", param=param)
    num_properties = 0
    for depth, node in _nodes(schema):
        if depth > _MAX_DEPTH:
            raise InvalidRequest(f"the schema is nested more than {_MAX_DEPTH} levels deep", param=param)
        if isinstance(properties := node.get("properties"), dict):
            num_properties += len(properties)
    schema = copy.deepcopy(schema)
    for _, node in _nodes(schema):
        if isinstance(format_ := node.get("format"), str) and format_ not in _KNOWN_FORMATS:
            del node["format"]  # JSON Schema: a format that is not known says nothing
    if num_properties > _MAX_PROPERTIES:
        raise InvalidRequest(f"the schema has {num_properties} properties; the most is {_MAX_PROPERTIES}", param=param)
    return json.dumps(schema | {"x-guidance": _JSON_OPTIONS})


def _nodes(schema: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every object in the schema that may be a schema itself, with its depth."""
    stack: list[tuple[int, Any]] = [(0, schema)]
    while stack:
        depth, value = stack.pop()
        if isinstance(value, dict):
            yield depth, value
            stack += [(depth + 1, entry) for key, entry in value.items() if key not in _DATA_KEYS]
        elif isinstance(value, list):
            stack += [(depth + 1, entry) for entry in value]


def _unanchored(pattern: str) -> str:
    """The whole output matches anyway, so ^ and $ around the pattern say nothing; the engine has no anchors."""
    if pattern.startswith("^"):
        pattern = pattern[1:]
    if pattern.endswith("$"):
        num_escapes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
        if num_escapes % 2 == 0:
            pattern = pattern[:-1]
    return pattern


def _choice(source: str, param: str) -> str:
    choices = json.loads(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise InvalidRequest("choice must be a list of strings with at least one entry", param=param)
    if len(choices) > _MAX_CHOICES or not all(choices):
        raise InvalidRequest(f"choice takes at most {_MAX_CHOICES} strings, none of them empty", param=param)
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
