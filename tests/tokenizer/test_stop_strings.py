"""Stop strings on a stream."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.tokenizer import StopMatcher

LETTERS = st.text(alphabet="abc", max_size=40)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=5)


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    """All text that comes out, and the stop that ended it."""
    text = ""
    for piece in pieces:
        emitted, stop = matcher.feed(piece)
        text += emitted
        if stop is not None:
            return text, stop
    return text + matcher.flush(), None


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By definition: the first end of any stop string; the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 40), max_size=8), include=st.booleans())
def test_any_cut_gives_the_same(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    """Guards streamed == not streamed == the definition, for overlapping stop strings and any cuts."""
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(edges)]
    assert run(StopMatcher(stops, include), pieces) == expected(text, stops, include)


@given(text=LETTERS, stops=STOPS)
def test_holds_back_what_may_become_a_stop(text: str, stops: list[str]) -> None:
    """Guards against text that is sent and then turns out to begin a stop string, and against holding back more."""
    matcher, sent = StopMatcher(stops), ""
    for index, char in enumerate(text):
        emitted, stop = matcher.feed(char)
        sent += emitted
        if stop is not None:
            return
        held = text[len(sent) : index + 1]
        assert any(s.startswith(held) for s in stops) or not held
        longer = [text[begin : index + 1] for begin in range(len(sent))]
        assert not any(s.startswith(tail) for s in stops for tail in longer)


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "stop"),
    [
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        (["END"], ["xEN", "Dy"], "x", "END"),
        (["END"], ["xEN"], "xEN", None),
        (["세계"], ["안녕 세", "계!"], "안녕 ", "세계"),
        (["]", "^-"], ["a^", "-]"], "a", "^-"),
        ([], ["any", "thing"], "anything", None),
    ],
)
def test_cases(stops: list[str], pieces: list[str], text: str, stop: str | None) -> None:
    """Guards stops across pieces, unfinished ones at the end, characters special to regular expressions, no stops."""
    assert run(StopMatcher(stops), pieces) == (text, stop)


def test_empty_stop_is_refused() -> None:
    """Guards against a stop string that matches everywhere."""
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
