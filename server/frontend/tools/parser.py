"""Finds tool calls in an answer as it is written."""

import enum
from collections.abc import Collection

from server.frontend.tools.deltas import NewId, ParsedDelta, ToolCallDelta
from server.frontend.tools.formats import ToolFormat
from server.frontend.tools.json_call import CallScanner, ValueScanner
from server.tokenizer import StopMatcher

_SPACE = frozenset(" \t\n\r")
_SEPARATORS = _SPACE | frozenset(",;")
_ARGS = "[ARGS]"
_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


class _Mode(enum.Enum):
    START = enum.auto()
    """Nothing but white space so far, and an answer may be a call without a marker."""
    CONTENT = enum.auto()
    BETWEEN = enum.auto()
    """Behind a marker, or behind a call, and in no call."""
    CALL = enum.auto()
    NAMED = enum.auto()
    """In the arguments of a call whose name stood in front."""


class ToolParser:
    """Splits one choice's text into content and calls. Written by: whoever reads that choice, through push and finish.

    How the text is cut into pieces makes no difference to the sum of the deltas. A call is announced as soon as its
    name is known; its arguments follow as they come. What looked like a call and is none comes out as content. White
    space around calls is dropped.

    tool_names: the request's; without a marker in front, only an object that names one of them is a call. parallel:
    where False, calls behind the first are dropped.
    """

    def __init__(
        self,
        format_: ToolFormat,
        *,
        tool_names: Collection[str] = (),
        parallel: bool = True,
        new_id: NewId | None = None,
    ) -> None:
        self._format = format_
        self._tool_names = frozenset(tool_names)
        self._parallel = parallel
        self._new_id = new_id or format_.new_id
        self._mode = _Mode.START if format_.bare else _Mode.CONTENT
        self._marker = StopMatcher([format_.begin])
        self._content = _Content()
        self._marked = False
        self._lead = ""  # from the marker on, as long as no call came of it: it is content after all if none does
        self._pending = ""  # in BETWEEN: what may still become a marker or a name
        self._scanner = CallScanner()
        self._value = ValueScanner()
        self._announced = False
        self.num_calls = 0

    def push(self, text: str) -> ParsedDelta:
        """What the text adds."""
        delta = ParsedDelta()
        pos = 0
        while pos < len(text):
            if self._mode is _Mode.CONTENT:
                text, pos = self._push_content(text[pos:], delta), 0
                continue
            char = text[pos]
            taken = True
            match self._mode:
                case _Mode.START:
                    taken = self._push_start(char)
                case _Mode.BETWEEN:
                    taken = self._push_between(char, delta)
                case _Mode.CALL:
                    self._push_call(char, delta)
                case _Mode.NAMED:
                    taken = self._push_named(char, delta)
            pos += taken
        return delta

    def finish(self) -> ParsedDelta:
        """The answer is over: what was held back comes out."""
        delta = ParsedDelta()
        match self._mode:
            case _Mode.START:
                self._content.write(self._lead, delta)
            case _Mode.CONTENT:
                self._content.write(self._marker.flush(), delta)
            case _Mode.BETWEEN:
                rest = "" if self._format.end.startswith(self._pending) else self._pending
                self._content.write(self._lead or rest, delta)
            case _Mode.CALL if not self._announced:
                self._content.write(self._lead + self._scanner.raw, delta)
        if not self.num_calls:
            self._content.flush(delta)
        return delta

    # ------------------------------------------------------------------------------------------------------ the modes

    def _push_start(self, char: str) -> bool:
        if char in _SPACE:
            self._lead += char
        elif char == "{":
            self._mode = _Mode.BETWEEN
            return False
        else:
            self._mode = _Mode.CONTENT
            self._content.hold(self._lead)
            self._lead = ""
            return False
        return True

    def _push_content(self, text: str, delta: ParsedDelta) -> str:
        """Returns what is left to read."""
        emitted, found = self._marker.feed(text)
        self._content.write(emitted, delta)
        if found is None:
            return ""
        rest = self._marker.rest
        self._marker = StopMatcher([self._format.begin])
        self._marked = True
        self._mode, self._lead, self._pending = _Mode.BETWEEN, found, ""
        return rest

    def _push_between(self, char: str, delta: ParsedDelta) -> bool:
        pending = self._pending
        if not pending and (char in _SEPARATORS or (self._marked and char == "]")):
            self._lead += char if self._lead else ""
        elif char == "{" and (not pending or pending == "["):
            self._lead += pending if self._lead else ""
            self._mode, self._scanner, self._pending = _Mode.CALL, CallScanner(), ""
            return False
        elif self._format.named and (name := self._name(pending, char)):
            self._pending, self._value = "", ValueScanner()
            self._mode = _Mode.NAMED
            self._announce(name, delta)
            return False
        elif self._marked and self._may_continue(pending + char):
            self._pending += char
            self._lead += char if self._lead else ""
            if self._pending == self._format.end:
                self._leave_region(delta, "")
            elif self._pending == self._format.begin:
                self._pending = ""
        elif pending == "[" and char in _SPACE:
            self._pending = "["
            self._lead += char if self._lead else ""
        else:
            self._leave_region(delta, pending)
            return False
        return True

    def _may_continue(self, pending: str) -> bool:
        """Whether this may become a marker, a list, or, where the format has that, a name and what stands behind it."""
        if pending == "[" or self._format.end.startswith(pending) or self._format.begin.startswith(pending):
            return True
        name, bracket, tail = pending.partition("[")
        is_name = bool(name) and _NAME_CHARS.issuperset(name)
        return self._format.named and is_name and _ARGS.startswith(bracket + tail)

    def _name(self, pending: str, char: str) -> str:
        """The name in front of arguments that begin with this char, or an empty string."""
        head = pending.removesuffix(_ARGS)
        begins = char == "{" or (head != pending and char not in _SPACE)
        return head if begins and head and _NAME_CHARS.issuperset(head) else ""

    def _leave_region(self, delta: ParsedDelta, rest: str) -> None:
        """Back to content. rest: what was read of it already."""
        self._content.write(self._lead or rest, delta)
        self._mode, self._lead, self._pending = _Mode.CONTENT, "", ""

    def _push_call(self, char: str, delta: ParsedDelta) -> None:
        scanner = self._scanner
        scanner.push(char)
        if scanner.name is not None and not self._announced:
            if not self._marked and self._tool_names and scanner.name not in self._tool_names:
                scanner.broken = True
            else:
                self._announce(scanner.name, delta)
        if self._announced:
            self._send(scanner.take_arguments(), delta)
        if scanner.done or (scanner.broken and self._announced):
            self._end_call()
        elif scanner.broken:
            self._content.write(self._lead + scanner.raw, delta)
            self._mode, self._lead = _Mode.CONTENT, ""

    def _push_named(self, char: str, delta: ParsedDelta) -> bool:
        taken = self._value.push(char)
        if taken and self._value.first:
            self._send(char, delta)
        if self._value.done:
            self._end_call()
        return taken

    # ---------------------------------------------------------------------------------------------------------- calls

    def _announce(self, name: str, delta: ParsedDelta) -> None:
        self._announced, self._lead = True, ""
        self._content.drop_space()
        self.num_calls += 1
        if not self._is_muted:
            delta.tool_calls.append(ToolCallDelta(self.num_calls - 1, self._new_id(), name))

    def _send(self, arguments: str, delta: ParsedDelta) -> None:
        if not arguments or self._is_muted:
            return
        index = self.num_calls - 1
        last = delta.tool_calls[-1] if delta.tool_calls else None
        if last is None or last.index != index or last.name is not None:
            delta.tool_calls.append(ToolCallDelta(index, arguments=arguments))
        else:
            last.arguments += arguments

    def _end_call(self) -> None:
        self._mode, self._announced = _Mode.BETWEEN, False

    @property
    def _is_muted(self) -> bool:
        return not self._parallel and self.num_calls > 1


class _Content:
    """Content without the white space that surrounds calls. Written by: the parser."""

    def __init__(self) -> None:
        self._space = ""
        self._skips_space = False

    def write(self, text: str, delta: ParsedDelta) -> None:
        """White space at the end is held back until more follows."""
        if self._skips_space:
            text = text.lstrip()
        kept = text.rstrip()
        if kept:
            delta.content += self._space + kept
            self._space, self._skips_space = "", False
        self._space += text[len(kept) :]

    def hold(self, space: str) -> None:
        self._space += space

    def drop_space(self) -> None:
        """A call comes: space on both its sides is none of the content's."""
        self._space, self._skips_space = "", True

    def flush(self, delta: ParsedDelta) -> None:
        delta.content += self._space
        self._space = ""
