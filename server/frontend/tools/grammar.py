"""Grammars that let a model write nothing but calls of the tools it was given."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from server.frontend.tools.formats import ToolFormat
from server.protocol import GrammarSpec
from server.structured import embedded_schema
from server.tokenizer import Tokenizer

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_grammar(
    format_: ToolFormat, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, *, parallel: bool
) -> GrammarSpec:
    """A grammar for one call of these tools, or where parallel, for one or more: what ToolParser then reads.

    tools: OpenAI's function objects: {"name", "parameters", ...}. One tool is tool_choice "named", all are "required".
    Raises InvalidRequest where a tool's parameters are no usable schema.
    """
    rules = []
    for index, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool["name"])}, "{format_.arguments_key}": '
        schema = embedded_schema(tool.get("parameters") or _NO_ARGUMENTS, param=f"tools[{index}].function.parameters")
        rules += [f'call_{index}: {_literal(head)} arguments_{index} "}}"', f"arguments_{index}: %json {schema}"]
    choice = " | ".join(f"call_{index}" for index in range(len(tools)))
    before, behind = _frame(format_, tokenizer)
    if format_.end:
        call = f'{before} "\\n" call "\\n" {behind}'
        more = f" ({_literal(format_.separator)} {call})*" if parallel else ""
        start = f"start: {call}{more}"
    else:
        more = f" ({_literal(format_.separator)} call)*" if parallel else ""
        start = f'start: {before} "[" call{more} "]"' if format_.listed else f"start: call{more}"
    return GrammarSpec("grammar", "\n".join([start, f"call: {choice}", *rules]))


def _frame(format_: ToolFormat, tokenizer: Tokenizer) -> tuple[str, str]:
    """The markers as terminals: a control token by its id, for as text it could not be written."""
    terminals = []
    for marker in (format_.begin, format_.end):
        is_control = marker in tokenizer.special_spellings
        terminals.append(f"<[{tokenizer.token_to_id(marker)}]>" if is_control else _literal(marker))
    return terminals[0], terminals[1]


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
