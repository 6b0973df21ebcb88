"""tools and tool_choice -> what the template shows, what the grammar forces, and who reads the calls."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from server.api.chat_prompt import chat_template_of
from server.api.schemas import ChatTemplateFields
from server.api.service import RawPrompt, Service
from server.api.structured import closed
from server.errors import InvalidRequest, UnsupportedFeature
from server.frontend.tools import (
    HERMES,
    AnswerParser,
    ParsedDelta,
    ReasoningSplitter,
    ToolParser,
    begins_in_reasoning,
    format_of_template,
    tool_grammar,
)
from server.protocol import GrammarSpec

_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
_MAX_TOOLS = 128


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """What a client asks about tools, checked. Empty tools: the model must not call any."""

    tools: tuple[dict[str, Any], ...] = ()
    must_call: bool = False
    only: str | None = None
    """The one function that may be called."""
    parallel: bool = True
    asked_parallel: bool = False
    """The client said so itself. Else a forced call is one call: a small model would never stop adding more."""

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]


def read_tools(tools: list[dict[str, Any]] | None, choice: Any, parallel: bool | None) -> ToolRequest:
    """Raises InvalidRequest that names the field."""
    checked = [_read_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools or ())]
    names = [tool["function"]["name"] for tool in checked]
    if len(checked) > _MAX_TOOLS:
        raise InvalidRequest(f"{len(checked)} tools, at most {_MAX_TOOLS}", param="tools")
    if len(set(names)) < len(names):
        raise InvalidRequest("two tools have the same name", param="tools")
    must_call, only = _read_choice(choice)
    if only is not None and only not in names:
        raise InvalidRequest(f"tool_choice names {only[:80]!r}, which is not among the tools", param="tool_choice")
    if must_call and not checked:
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    if choice == "none" or not checked:
        return ToolRequest()
    return ToolRequest(
        tuple(checked),
        must_call,
        only,
        parallel=parallel is not False,
        asked_parallel=bool(parallel) and only is None,
    )


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """How the answer is constrained, and how it is read."""

    grammar: GrammarSpec | None
    make_parser: Callable[[], AnswerParser] | None
    """A parser a choice; None: all of the text is content."""
    keeps_control_tokens: bool = False
    """The markers of calls are control tokens, so the detokenizer must not leave those out."""


async def plan_reading(
    request: ToolRequest, body: ChatTemplateFields, prompt: RawPrompt, grammar: GrammarSpec | None, service: Service
) -> ReadingPlan:
    """grammar: of the response format. Raises InvalidRequest for parameters that are no usable schema."""
    template = chat_template_of(body, service)
    # Hermes' way is also the one that instructions outside the template teach.
    format_ = service.tool_format or format_of_template(template.tool_source) or HERMES
    if request.must_call:
        functions = [t["function"] for t in request.tools if request.only in (None, t["function"]["name"])]
        tools = [{**function, "parameters": closed(function["parameters"])} for function in functions]
        grammar = tool_grammar(format_, tools, service.tokenizer, parallel=request.asked_parallel)
        await service.grammars.check(grammar, param="tools")
    thinks = "<think>" in template.source and grammar is None  # a grammar leaves no room for it
    if not request.tools and not thinks:
        return ReadingPlan(grammar, None)
    inside = begins_in_reasoning(prompt.text or "")

    def make_parser() -> AnswerParser:
        kind = _CallsOnly if request.must_call else AnswerParser
        return kind(
            reasoning=ReasoningSplitter(inside=inside) if thinks else None,
            tools=ToolParser(format_, tool_names=request.names, parallel=request.parallel) if request.tools else None,
        )

    keeps = bool(request.tools) and format_.uses_control_tokens(service.tokenizer)
    return ReadingPlan(grammar, make_parser, keeps)


class _CallsOnly(AnswerParser):
    """For forced calls: what is no call is markup that max_tokens cut off."""

    def push(self, text: str) -> ParsedDelta:
        delta = super().push(text)
        delta.content = ""
        return delta

    def finish(self) -> ParsedDelta:
        delta = super().finish()
        delta.content = ""
        return delta


def _read_tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise UnsupportedFeature(f"{where}.type must be function", param=f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where}.function must be an object", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}.function.name must be 1 to 128 letters, digits and _ - . :", param=f"{where}.function.name"
        )
    if not isinstance(function.get("description"), str | None):
        raise InvalidRequest(f"{where}.function.description must be a string", param=f"{where}.function.description")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise InvalidRequest(f"{where}.function.parameters must be a schema", param=f"{where}.function.parameters")
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _read_choice(choice: Any) -> tuple[bool, str | None]:
    """Whether a call is forced, and of which function."""
    if choice is None or choice in ("none", "auto"):
        return False, None
    if choice == "required":
        return True, None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest("tool_choice must be none, auto, required or name a function", param="tool_choice")
    return True, name
