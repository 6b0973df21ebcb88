"""One choice's text to content, reasoning and tool calls: the two parsers, one behind the other."""

from server.frontend.tools.deltas import ParsedDelta
from server.frontend.tools.parser import ToolParser
from server.frontend.tools.reasoning import ReasoningSplitter


class AnswerParser:
    """Written by: whoever reads that choice, through push and finish. Without parsers it passes content through."""

    def __init__(self, *, reasoning: ReasoningSplitter | None = None, tools: ToolParser | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def num_calls(self) -> int:
        """Tool calls announced so far; more than zero makes the finish reason "tool_calls"."""
        return 0 if self._tools is None else self._tools.num_calls

    def push(self, text: str) -> ParsedDelta:
        delta = ParsedDelta(content=text) if self._reasoning is None else self._reasoning.push(text)
        return self._find_calls(delta)

    def finish(self) -> ParsedDelta:
        """The answer is over: what was held back comes out."""
        delta = ParsedDelta() if self._reasoning is None else self._reasoning.finish()
        delta = self._find_calls(delta)
        if self._tools is not None:
            last = self._tools.finish()
            delta.content += last.content
            delta.tool_calls += last.tool_calls
        return delta

    def _find_calls(self, delta: ParsedDelta) -> ParsedDelta:
        if self._tools is None or not delta.content:
            return delta
        found = self._tools.push(delta.content)
        found.reasoning = delta.reasoning
        return found
