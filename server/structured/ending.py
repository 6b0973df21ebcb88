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

_SLACK = 8
"""Tokens beyond the shortest ending where guidance begins: the walk takes the longest tokens, the model perhaps not."""
_TIGHT = 4
_NONE = 1
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
        self.digits = _bitmask([i for i, data in enumerate(token_bytes) if data.isdigit()], vocab_size)
        self.letter = _bitmask([i for i, data in enumerate(token_bytes) if data == b"z"], vocab_size)

    def in_string(self, allowed: Bitmask) -> bool:
        """Whether the output is inside a JSON string that may be closed."""
        return bool((allowed & self.quote).any() and (allowed & self.letter).any())

    def soonest(self, allowed: Bitmask, *, is_json: bool) -> Bitmask:
        """Of the allowed tokens, those that end the output soonest."""
        if (ends := allowed & self.end).any():
            return ends
        if not is_json:
            return allowed
        if self.in_string(allowed):
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
        spare = self._num_left - len(self._path)
        if spare > _TIGHT and self._is_json and self._tokens.in_string(allowed):
            return  # more text makes the ending no longer
        soonest = self._soonest(allowed, matcher)
        if spare > _TIGHT and self._is_json:
            soonest |= allowed & self._tokens.digits  # nor do more digits
        elif self._path and spare <= _TIGHT:
            soonest = self._alike(soonest, self._path[0]) if spare > _NONE else self._only(self._path[0], allowed)
        allowed[:] = soonest

    def _alike(self, candidates: Bitmask, token_id: int) -> Bitmask:
        """Those as long as this one: any digit for a digit, but no longer way round."""
        length = len(self._tokens.token_bytes[token_id])
        ids = [i for i in _first_ids(candidates) if len(self._tokens.token_bytes[i]) == length]
        return _bitmask([*ids, token_id], len(candidates) * 32)

    def _only(self, token_id: int, allowed: Bitmask) -> Bitmask:
        return _bitmask([token_id], len(allowed) * 32)

    def _soonest(self, allowed: Bitmask, matcher: LLMatcher) -> Bitmask:
        """What can only be written in one way, a property's name, is written with the fewest tokens."""
        forced = matcher.compute_ff_tokens()
        if forced:
            only = self._only(forced[0], allowed)
            if (only & allowed).any():
                return only
        return self._tokens.soonest(allowed, is_json=self._is_json)

    def _walk(self, matcher: LLMatcher) -> list[int]:
        """A short ending from here. Where there is none within the tokens left, as much as fits."""
        matcher = matcher.deep_copy()
        mask = np.zeros_like(self._tokens.end)
        path: list[int] = []
        while len(path) < min(_MAX_WALK, self._num_left):
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if (mask & self._tokens.end).any() or matcher.is_error():
                break
            candidates = _first_ids(self._soonest(mask, matcher))
            if not candidates:
                break
            token_id = max(candidates, key=self._reach)
            matcher.consume_token(token_id)
            path.append(token_id)
        return path

    def _reach(self, token_id: int) -> int:
        return len(self._tokens.token_bytes[token_id].strip())


def _bitmask(token_ids: Collection[int], vocab_size: int) -> Bitmask:
    bits = np.zeros((vocab_size + 31) // 32 * 32, dtype=np.uint8)
    bits[[id_ for id_ in token_ids if id_ < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _first_ids(mask: Bitmask, most: int = 64) -> list[int]:
    """The lowest token ids of a bitmask, without unpacking all of it."""
    ids: list[int] = []
    for word in np.flatnonzero(mask).tolist():
        bits = int(mask[word]) & 0xFFFFFFFF
        ids += [word * 32 + bit for bit in range(32) if bits >> bit & 1]
        if len(ids) >= most:
            break
    return ids
