"""Tool calls and reasoning in a model's text. Pure text: no HTTP, no engine.

A request with tools: `format_of_template(template.source)` (or FORMATS by name); where it is None, the template knows
no tools: render `with_tool_instructions(messages, tools)` and use HERMES. tool_choice "required" or a named one:
`tool_grammar(...)` as the request's grammar. Where a marker is a control token (`format.uses_control_tokens`),
detokenize with skip_special_tokens=False. Then an `AnswerParser` a choice.
"""

from server.frontend.tools.answer import AnswerParser
from server.frontend.tools.deltas import ParsedDelta, ToolCallDelta
from server.frontend.tools.formats import FORMATS, HERMES, LLAMA3, MISTRAL, ToolFormat, format_of_template
from server.frontend.tools.grammar import tool_grammar
from server.frontend.tools.parser import ToolParser
from server.frontend.tools.prompt import with_tool_instructions
from server.frontend.tools.reasoning import ReasoningSplitter, begins_in_reasoning

__all__ = [
    "FORMATS",
    "HERMES",
    "LLAMA3",
    "MISTRAL",
    "AnswerParser",
    "ParsedDelta",
    "ReasoningSplitter",
    "ToolCallDelta",
    "ToolFormat",
    "ToolParser",
    "begins_in_reasoning",
    "format_of_template",
    "tool_grammar",
    "with_tool_instructions",
]
