"""How much memory the running requests will need at most, if they write as much of what they may as others lately did.

Admitting by what is free now runs the most requests and preempts them one by one when they grow: what they computed is
lost, which matters where computing is dear. Reserving all that they may write leaves most of it empty. In between,
requests end at different times: while the last ones grow, the memory of the first is free again. (The idea of a memory
peak in the future: Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", 2025.)
"""

import math
from collections import deque
from collections.abc import Iterable

from server.scheduler.request import Request

_MEMORY = 16
"""Requests that have ended lately."""
_FIRST_GUESS = 256
"""Tokens of an answer, where max_tokens allows more."""


class Forecast:
    """Written by: Scheduler, whenever a request ends."""

    def __init__(self) -> None:
        self._share = 1.0
        """Of the tokens that a request may write, how many it is expected to."""
        self._num_learned = 1
        self._lengths = deque([_FIRST_GUESS], maxlen=_MEMORY)
        """Of the newest answers, in tokens: one that may be thousands is expected to be no longer than these."""

    def learn(self, request: Request) -> None:
        """The request has ended, by itself or from outside: a stop string, to the engine, is an abort."""
        if request.num_output_tokens:
            self._num_learned = min(self._num_learned + 1, _MEMORY)
            share = request.num_output_tokens / request.sampling.max_tokens
            self._share += (share - self._share) / self._num_learned
            self._lengths.append(request.num_output_tokens)

    def growth(self, running: Iterable[Request], candidate: Request, num_new_tokens: int) -> int:
        """Tokens that the requests will hold at the peak beyond what the running ones hold now, the candidate included.

        num_new_tokens: of the candidate's, those that are not in shared blocks.
        """
        now = peak = held = 0
        longest = max(self._lengths)
        entries = [(self._remaining(candidate, longest), num_new_tokens)]
        for request in running:
            num_own = request.num_tokens - request.num_hit_tokens
            entries.append((self._remaining(request, longest), num_own))
            now += num_own
        entries.sort(reverse=True)
        for count, (remaining, num_own) in enumerate(entries, start=1):
            held += num_own  # when this one ends, it and those with more to come have all grown so much
            peak = max(peak, held + count * remaining)
        return peak - now

    def _remaining(self, request: Request, longest: int) -> int:
        expected = min(math.ceil(self._share * request.sampling.max_tokens), longest) - request.num_output_tokens
        return min(max(expected, 0), request.max_num_tokens - len(request.token_ids))
