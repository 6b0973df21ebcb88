"""Stop strings on a stream of text."""

import re
from collections import deque
from collections.abc import Iterable

_Node = dict[str, int]


class StopMatcher:
    """Finds the stop string that is complete first; of several that end together, the longest.

    The result does not depend on how the text is cut into pieces. Aho and Corasick's automaton ("Efficient string
    matching", 1975): its depth is the length of the longest end of the text so far that begins some stop string, which
    is just what must be held back. Cost: one step a character, however many stop strings there are.
    Written by: whoever reads the stream.
    """

    def __init__(self, stops: Iterable[str], include_stop: bool = False) -> None:
        stops = list(dict.fromkeys(stops))
        if not all(stops):
            raise ValueError("a stop string can't be empty")
        self._include_stop = include_stop
        self._goto: list[_Node] = [{}]
        self._depth = [0]
        self._found: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._fail = self._link()
        self._first = re.compile(f"[{''.join(re.escape(char) for char in self._goto[0])}]") if stops else None
        self._state = 0
        self._held = ""
        self.rest = ""
        """What came behind the stop string in the piece that completed it."""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Returns the text that is certain to be outside any stop string, and the stop string where one is complete.

        Once one was found, the stream is over: what follows it is in `rest`, and feed must not be called again.
        """
        if self._first is None:
            return text, None
        buffer = self._held + text
        pos = len(self._held)
        state = self._state
        goto, fail, found = self._goto, self._fail, self._found
        while pos < len(buffer):
            if state == 0:
                match = self._first.search(buffer, pos)
                if match is None:
                    break
                pos = match.start()
            char = buffer[pos]
            while state and char not in goto[state]:
                state = fail[state]
            state = goto[state].get(char, 0)
            pos += 1
            stop = found[state]
            if stop is not None:
                self._held, self.rest = "", buffer[pos:]
                return buffer[: pos if self._include_stop else pos - len(stop)], stop
        self._state = state
        keep = len(buffer) - self._depth[state]
        self._held = buffer[keep:]
        return buffer[:keep], None

    def flush(self) -> str:
        """The end has come: what was held back is text after all."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self._goto[node]:
                self._goto[node][char] = len(self._goto)
                self._goto.append({})
                self._depth.append(self._depth[node] + 1)
                self._found.append(None)
            node = self._goto[node][char]
        self._found[node] = stop

    def _link(self) -> list[int]:
        """Failure links, breadth first; a node also finds what the end of its text finds."""
        fail = [0] * len(self._goto)
        queue = deque(self._goto[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._goto[node].items():
                link = fail[node]
                while link and char not in self._goto[link]:
                    link = fail[link]
                fail[child] = self._goto[link].get(char, 0)
                if self._found[child] is None:
                    self._found[child] = self._found[fail[child]]
                queue.append(child)
        return fail
