"""Brings a constrained output to its end before its tokens run out: half an object helps nobody.

Nothing happens while there is room. When the tokens left come near the number that the shortest ending takes, only
tokens that lead there stay allowed: strings close, lists and objects close, optional properties are left out. The
shortest ending is found by walking it on a copy of the grammar's state; the less room, the more often that is done.
"""

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from server.protocol import GrammarSpec

Bitmask = npt.NDArray[np.int32]

_SLACK = 6
"""Tokens kept free beyond the shortest ending: the walk takes the longest tokens, the model perhaps not."""
_MAX_WALK = 512


class EndingTokens:
    """Bitmasks over a vocabulary: which tokens are nothing but the marks that close things. Written by: nobody."""

    def __init__(self, token_bytes: Sequence[bytes], end_token_ids: Collection[int], *, vocab_size: int) -> None:
        self.token_bytes = token_bytes
        marks = [(i, data) for i, data in enumerate(token_bytes) if data.strip(b" ") and not data.strip(b'"}]{[:, ')]
        self.end = _bitmask(end_token_ids, vocab_size)
        self.marks = _bitmask([i for i, _ in marks], vocab_size)
        self.closers = _bitmask([i for i, data in marks if not data.strip(b'"}]')], vocab_size)
        self.brackets = _bitmask([i for i, data in marks if not data.strip(b"}]")], vocab_size)
        self.leaves_string = self.closers & _bitmask([i for i, data in marks if data[:1] == b'"'], vocab_size)
        self.quote = _bitmask([i for i, data in marks if data == b'"'], vocab_size)
        self.letter = _bitmask([i for i, data in enumerate(token_bytes) if data == b"z"], vocab_size)

    def narrow(self, allowed: Bitmask, *, is_json: bool) -> Bitmask:
        """Of the allowed tokens, those that end the output soonest."""
        if (ends := allowed & self.end).any():
            return ends
        if not is_json:
            return allowed
        if (allowed & self.quote).any() and (allowed & self.letter).any():  # inside a string that may be closed
            return allowed & self.leaves_string
        for group in (self.brackets, self.closers, self.marks):
            if (narrowed := allowed & group).any():
                return narrowed
        return allowed


class Budget:
    """The tokens that one output may still take. Written by: its GrammarState, through spend.

    What it allows depends on the output so far and on nothing else, so that a resumed output goes on as it would have.
    """

    def __init__(self, spec: GrammarSpec, tokens: EndingTokens, matcher: LLMatcher, *, max_tokens: int) -> None:
        self._tokens = tokens
        self._is_json = spec.kind in ("json_object", "json_schema") or "%json" in spec.source
        self._num_left = max_tokens
        self._look_at = min(max_tokens, 64 + len(spec.source) // 3)
        """Look for the ending when so many tokens are left; more than any ending of this grammar is likely to take."""
        self._is_ending = False
        self._path: list[int] | None = None
        """The shortest ending from here, as far as known, without the end token."""
        self._look(matcher)

    def spend(self, token_id: int, matcher: LLMatcher) -> None:
        """The output grew by this token, and the matcher has it."""
        self._num_left -= 1
        follows = self._path is not None and self._path[:1] == [token_id]
        self._path = self._path[1:] if follows and self._path is not None else None
        self._look(matcher)

    def _look(self, matcher: LLMatcher) -> None:
        if self._is_ending or self._num_left > self._look_at:
            return
        self._path = self._walk(matcher)
        num_free = self._num_left - _SLACK - len(self._path)
        self._is_ending = num_free <= 0
        # A token takes one from what is left, and may add one to what the ending takes.
        self._look_at = self._num_left - max(1, num_free // 2)

    def narrow(self, allowed: Bitmask, matcher: LLMatcher) -> None:
        """Leaves in `allowed` what the tokens left permit."""
        if not self._is_ending:
            return
        if self._path is None:
            self._path = self._walk(matcher)
        if self._path and self._num_left <= len(self._path) + 2:
            allowed[:] = _bitmask(self._path[:1], len(allowed) * 32)
        else:
            allowed[:] = self._narrowed(allowed, matcher)

    def _narrowed(self, allowed: Bitmask, matcher: LLMatcher) -> Bitmask:
        """What can only be written in one way, a property's name, is written with the fewest tokens."""
        forced = matcher.compute_ff_tokens()
        if forced:
            only = _bitmask(forced[:1], len(allowed) * 32)
            if (only & allowed).any():
                return only
        return self._tokens.narrow(allowed, is_json=self._is_json)

    def _walk(self, matcher: LLMatcher) -> list[int]:
        """A short ending from here. Where there is none within the tokens left, as much as fits."""
        matcher = matcher.deep_copy()
        mask = np.zeros_like(self._tokens.end)
        path: list[int] = []
        while len(path) < min(_MAX_WALK, self._num_left):
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if (mask & self._tokens.end).any() or matcher.is_error():
                break
            allowed = np.flatnonzero(_bits(self._narrowed(mask, matcher)))
            if not len(allowed):
                break
            longest = int(max(allowed[:64], key=lambda id_: len(self._tokens.token_bytes[id_])))
            matcher.consume_token(longest)
            path.append(longest)
        return path

    def copy(self) -> "Budget":
        twin = object.__new__(Budget)
        twin.__dict__.update(self.__dict__)
        return twin


def _bitmask(token_ids: Collection[int], vocab_size: int) -> Bitmask:
    bits = np.zeros((vocab_size + 31) // 32 * 32, dtype=np.uint8)
    bits[[id_ for id_ in token_ids if id_ < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _bits(mask: Bitmask) -> npt.NDArray[np.uint8]:
    return np.unpackbits(mask.view(np.uint8), bitorder="little")
