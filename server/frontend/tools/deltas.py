"""What a parser makes of a piece of output."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class ToolCallDelta:
    """A call's beginning, with id and name, or more of its arguments (JSON text)."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class ParsedDelta:
    """The parts of an answer that a piece of text adds to."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


NewId = Callable[[], str]
