"""Schemas as the grammar engine takes them: checked, within limits, and such that a small model comes to an end.

A schema leaves a model choices that it can lose itself in: white space anywhere, digits without end, one more property
of its own invention. We take those away, which makes the set of outputs smaller but never invalid. JSON is written on
one line with at most a space behind a comma or a colon. Where the schema sets no closer bounds, integers stay within
what every JSON reader holds exactly (2**53), numbers too, with nine decimals and no exponent. An object whose
properties are listed has no others, unless the schema says that it may.
"""

import copy
import json
from collections.abc import Iterator
from typing import Any

from server.errors import InvalidRequest

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_MAX_EXACT = 2**53 - 1
_DECIMALS = 1e-9
_MIN_RANGE = 1e-6
"""A range that is narrower may hold no number of nine decimals."""
_MAX_DEPTH = 64
_MAX_PROPERTIES = 1000
"""Over the whole schema: the engine's tables grow faster than their number."""
_KNOWN_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLES = ("items", "additionalProperties")
_COMPOSITION = frozenset({"allOf", "anyOf", "oneOf", "$ref", "patternProperties"})

Schema = dict[str, Any]


def embedded_schema(schema: Any, *, param: str) -> str:
    """The schema as JSON text, ready for llguidance, also as `%json` within a Lark grammar.

    Raises InvalidRequest with this param. Keywords that the engine lacks are found when it compiles.
    """
    if not isinstance(schema, dict):
        raise InvalidRequest("a schema must be a JSON object", param=param)
    num_properties = 0
    for depth, node in _nodes(schema):
        if depth > _MAX_DEPTH:
            raise InvalidRequest(f"the schema is nested more than {_MAX_DEPTH} levels deep", param=param)
        if isinstance(properties := node.get("properties"), dict):
            num_properties += len(properties)
    if num_properties > _MAX_PROPERTIES:
        raise InvalidRequest(f"the schema has {num_properties} properties; the most is {_MAX_PROPERTIES}", param=param)
    try:
        schema = copy.deepcopy(schema)
    except RecursionError as error:
        raise InvalidRequest("the schema holds data that is nested too deeply", param=param) from error
    closes = not any(_composes_objects(node) for _, node in _nodes(schema))
    for _, node in _nodes(schema):
        if isinstance(format_ := node.get("format"), str) and format_ not in _KNOWN_FORMATS:
            del node["format"]  # JSON Schema: a format that is not known says nothing
        _bound_numbers(node)
        if closes:
            _close_object(node)
    return json.dumps(schema | {"x-guidance": _LAYOUT})


def _nodes(schema: Schema) -> Iterator[tuple[int, Schema]]:
    """The schema and all schemas within it, each with its depth. A property may be called "type": it is none."""
    stack: list[tuple[int, Any]] = [(0, schema)]
    while stack:
        depth, node = stack.pop()
        if not isinstance(node, dict):
            continue
        yield depth, node
        inner = [node.get(key) for key in _SINGLES]
        inner += [entry for key in _MAPS if isinstance(map_ := node.get(key), dict) for entry in map_.values()]
        inner += [entry for key in _LISTS if isinstance(list_ := node.get(key), list) for entry in list_]
        stack += [(depth + 1, entry) for entry in inner]


def _composes_objects(node: Schema) -> bool:
    """Whether an object's properties may stand in several schemas, so that none of them lists all."""
    return "allOf" in node or ("properties" in node and not _COMPOSITION.isdisjoint(node))


def _close_object(node: Schema) -> None:
    properties, required = node.get("properties"), node.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or "additionalProperties" in node:
        return
    if all(isinstance(name, str) and name in properties for name in required):
        node["additionalProperties"] = False


def _bound_numbers(node: Schema) -> None:
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not ("integer" in kinds or "number" in kinds) or "enum" in node or "const" in node:
        return
    low = _bound(node, ("minimum", "exclusiveMinimum"), max)
    high = _bound(node, ("maximum", "exclusiveMaximum"), min)
    if low is None and (high is None or high > -_MAX_EXACT):
        node["minimum"] = low = -_MAX_EXACT
    if high is None and (low is None or low < _MAX_EXACT):
        node["maximum"] = high = _MAX_EXACT
    narrow = low is not None and high is not None and high - low < _MIN_RANGE
    if "number" in kinds and "multipleOf" not in node and not narrow:
        node["multipleOf"] = _DECIMALS


def _bound(node: Schema, keys: tuple[str, ...], closest: Any) -> float | None:
    values = [value for key in keys if isinstance(value := node.get(key), int | float) and not isinstance(value, bool)]
    return closest(values) if values else None
