"""A grammar that follows one request's output."""

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from server.structured.ending import Budget
from server.structured.grammar import CompiledGrammar, reason_of


class GrammarState:
    """Where in the grammar an output is. Written by: the runner, through advance.

    A grammar too complex for the engine's limits fails in fill_bitmask or advance, with RuntimeError: that ends the one
    request, not the step.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        matcher: LLMatcher,
        *,
        end_token_ids: Collection[int],
        budget: Budget | None = None,
    ) -> None:
        """matcher: the grammar's, a copy of its own. budget: brings the output to its end before its tokens run out."""
        self._grammar = grammar
        self._matcher = matcher
        self._end_token_ids = end_token_ids
        self._budget = budget

    def fill_bitmask(self, row: npt.NDArray[np.int32]) -> None:
        """Sets bit t % 32 of word t // 32 where token t may come next, and clears the others.

        row: int32[ceil(V / 32)], contiguous, V the model's vocabulary. End tokens may come where the output is
        complete; where it can't go on, nothing else may.
        """
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()
        if self._budget is not None:
            self._budget.narrow(row, self._matcher)

    def advance(self, token_ids: Sequence[int]) -> None:
        """The output grew by these tokens. Raises RuntimeError where the grammar does not allow them.

        End tokens behind a complete output are let through: a client may have switched their effect off.
        """
        for token_id in token_ids:
            if self.is_terminated and token_id in self._end_token_ids:
                continue
            self._grammar.num_tokens += 1
            self._matcher.consume_token(token_id)
            self._check()
            if self._budget is not None:
                self._budget.spend(token_id, self._matcher)

    @property
    def is_terminated(self) -> bool:
        """Nothing but an end token can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RuntimeError(reason_of(self._matcher) or "nothing that may follow satisfies the grammar")
