"""From what a request asks for to the grammar engine's own notation, with the checks that need no engine."""

import json

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from server.errors import InvalidRequest
from server.protocol import GrammarSpec
from server.structured.json_schema import embedded_schema

_ANY_OBJECT = '{"type": "object"}'
_MAX_CHOICES = 10_000


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
