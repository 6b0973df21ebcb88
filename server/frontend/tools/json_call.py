"""Reads {"name": ..., "arguments": {...}} as it arrives, so that arguments can go out before they are complete."""

import enum
import json
from typing import Any

_SPACE = " \t\n\r"
_CLOSERS = {"{": "}", "[": "]"}
_ARGUMENT_KEYS = ("arguments", "parameters")


class ValueScanner:
    """Finds where one JSON value ends. Written by: its owner, through push.

    It follows brackets and strings and trusts the rest: what is wrong inside a value is the reader's to find.
    """

    def __init__(self) -> None:
        self.first = ""
        """The value's first character; empty as long as only white space came."""
        self.done = False
        self._chars: list[str] = []
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False

    @property
    def text(self) -> str:
        return "".join(self._chars)

    def push(self, char: str) -> bool:
        """Whether the character belongs to the value; where it does not, a number or a word ended before it."""
        if self._in_string:
            self._push_in_string(char)
        elif not self.first and char in _SPACE:
            return True
        elif self.first and not self._open and (char in ',:]}"{[' or char in _SPACE):
            self.done = True
            return False
        elif char == '"':
            self._in_string = True
        elif char in _CLOSERS:
            self._open.append(_CLOSERS[char])
        elif self._open and char == self._open[-1]:
            self._open.pop()
            self.done = not self._open
        self.first = self.first or char
        self._chars.append(char)
        return True

    def _push_in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            self.done = not self._open


class _At(enum.Enum):
    BEGIN = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()


class CallScanner:
    """One call. Written by: its owner, through push and take_arguments.

    name: None until it was read. done: the object is complete. broken: it is none, or has no name.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self.broken = False
        self._at = _At.BEGIN
        self._raw: list[str] = []
        self._key = ""
        self._value = ValueScanner()
        self._arguments: list[str] = []
        self._has_arguments = False

    @property
    def raw(self) -> str:
        """All that was pushed."""
        return "".join(self._raw)

    def take_arguments(self) -> str:
        """The arguments' JSON text as far as it is new since the last call."""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def push(self, char: str) -> None:
        """Takes the next character. Not to be called once done or broken."""
        self._raw.append(char)
        if self._at in (_At.KEY, _At.VALUE) and self._scan(char):
            return
        if self.broken or char in _SPACE:
            return
        match self._at, char:
            case _At.BEGIN, "{":
                self._expect(_At.KEY)
            case _At.COLON, ":":
                self._expect(_At.VALUE)
            case _At.COMMA, ",":
                self._expect(_At.KEY)
            case ((_At.COMMA | _At.KEY), "}"):
                self._finish()
            case _:
                self.broken = True

    def _expect(self, at: _At) -> None:
        self._at = at
        self._value = ValueScanner()

    def _scan(self, char: str) -> bool:
        """In a key or a value, or in front of one. Whether the character was part of it."""
        value = self._value
        if not value.first and char in (',:]}"' if self._at is _At.VALUE else ",:]}{[") and char != '"':
            return False
        taken = value.push(char)
        is_arguments = self._at is _At.VALUE and self._key in _ARGUMENT_KEYS
        if is_arguments and value.first == "{":
            self._has_arguments = True
            self._arguments.append(char)
        if value.done:
            self._take(value, is_arguments)
        return taken

    def _take(self, value: ValueScanner, is_arguments: bool) -> None:
        if self._at is _At.KEY:
            key = _loads(value.text)
            self.broken = not isinstance(key, str)
            self._key = str(key)
            self._expect(_At.COLON)
            return
        if is_arguments and value.first != "{":
            self._take_odd_arguments(value.text)
        elif self._key == "name":
            name = _loads(value.text)
            if isinstance(name, str) and name:
                self.name = name
            else:
                self.broken = True
        self._expect(_At.COMMA)

    def _take_odd_arguments(self, text: str) -> None:
        """No object: null, or the object's text as a string, which some models write."""
        value = _loads(text)
        self._has_arguments = True
        self._arguments.append("{}" if value is None else value if isinstance(value, str) else text)

    def _finish(self) -> None:
        self.broken = self.name is None
        self.done = not self.broken
        if not self._has_arguments:
            self._arguments.append("{}")


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # also numbers of more digits than Python reads
        return None
