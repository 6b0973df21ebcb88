"""Separates a model's thinking from its answer."""

from server.frontend.tools.deltas import ParsedDelta
from server.tokenizer import StopMatcher

OPEN, CLOSE = "<think>", "</think>"


def begins_in_reasoning(prompt: str) -> bool:
    """Whether the prompt itself opened the thinking, as some chat templates do."""
    return prompt.rstrip().endswith(OPEN)


class ReasoningSplitter:
    """Splits one choice's text. Written by: whoever reads that choice, through push and finish.

    Thinking stands at the beginning, between <think> and </think>; white space around both parts is dropped. inside:
    the prompt has opened it already.
    """

    def __init__(self, *, inside: bool = False) -> None:
        self._inside = inside
        self._outside = False  # for good
        self._lead = ""  # what may become the opening tag
        self._close = StopMatcher([CLOSE])
        self._space = ""  # held back: it is dropped where the thinking ends
        self._stripping = True  # at the beginning of a part

    def push(self, text: str) -> ParsedDelta:
        """What the text adds, to reasoning or content."""
        delta = ParsedDelta()
        if not self._inside and not self._outside:
            text = self._read_lead(text)
        if self._inside:
            text = self._read_reasoning(text, delta)
        if self._outside:
            delta.content = self._strip(text)
        return delta

    def finish(self) -> ParsedDelta:
        """The answer is over: what was held back comes out."""
        delta = ParsedDelta()
        if self._inside:
            self._write(self._close.flush(), delta)
        elif not self._outside:
            delta.content = self._lead
        return delta

    def _read_lead(self, text: str) -> str:
        """Returns the text behind the opening tag, or all of it where there is none."""
        self._lead += text
        begun = self._lead.lstrip()
        if begun.startswith(OPEN):
            self._inside = True
            return begun[len(OPEN) :]
        if not OPEN.startswith(begun):
            self._outside, self._stripping = True, False
            return self._lead
        return ""

    def _read_reasoning(self, text: str, delta: ParsedDelta) -> str:
        """Returns the text behind the closing tag."""
        emitted, found = self._close.feed(text)
        self._write(emitted, delta)
        if found is None:
            return ""
        self._inside, self._outside, self._stripping = False, True, True
        return self._close.rest

    def _write(self, text: str, delta: ParsedDelta) -> None:
        text = self._space + self._strip(text)
        kept = text.rstrip()
        self._space = text[len(kept) :]
        delta.reasoning += kept

    def _strip(self, text: str) -> str:
        """Drops white space at the beginning of a part."""
        if self._stripping:
            text = text.lstrip()
            self._stripping = not text
        return text
