"""What the sampler keeps for one running request, between steps."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from server.protocol import SamplingParams
from server.sampling.penalties import LogitBias, Penalties, has_penalties
from server.transfer import upload


class Grammar(Protocol):
    """A constraint that follows the output. server.structured implements it."""

    def fill_bitmask(self, row: npt.NDArray[np.int32]) -> None:
        """Sets bit t % 32 of word t // 32 where token t may come next, and clears the others."""

    def advance(self, token_ids: Sequence[int]) -> object:
        """The output grew by these tokens. Raises where the grammar does not allow them."""


class SamplingRow:
    """One request's sampling state. Written by: the runner, through append and advance."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        *,
        vocab_size: int,
        device: torch.device,
        grammar: Grammar | None = None,
    ) -> None:
        """Raises ValueError for parameters that this vocabulary can't serve."""
        self.params = params
        self.grammar = grammar
        self.num_output_tokens = len(output_ids)
        self._penalties = None
        if has_penalties(params):
            self._penalties = Penalties(params, prompt_ids, output_ids, vocab_size=vocab_size, device=device)
        self._bias = LogitBias(params.logit_bias, vocab_size=vocab_size, device=device) if params.logit_bias else None
        stops = [token_id for token_id in params.stop_token_ids if 0 <= token_id < vocab_size]
        [self._stops] = upload([np.array(stops, dtype=np.int64)], device)
        if grammar is not None and output_ids:
            grammar.advance(output_ids)

    @property
    def bans_stops(self) -> bool:
        return self.num_output_tokens < self.params.min_tokens and len(self._stops) > 0

    @property
    def changes_logits(self) -> bool:
        """Grammar masks aside, which the sampler applies for all rows at once."""
        return self._penalties is not None or self._bias is not None or self.bans_stops

    def adjust(self, logits: torch.Tensor) -> None:
        """logits: float32[V], changed in place."""
        if self._penalties is not None:
            self._penalties.apply(logits)
        if self._bias is not None:
            self._bias.apply(logits)
        if self.bans_stops:
            kept = logits.index_select(0, self._stops)
            logits.index_fill_(0, self._stops, float("-inf"))
            # Where nothing is left the output is complete, says its grammar: min_tokens can't stretch it.
            nothing_left = logits.max() == float("-inf")
            logits.index_copy_(0, self._stops, torch.where(nothing_left, kept, float("-inf")))

    def append(self, token_ids: torch.Tensor, index: int) -> None:
        """The row's output grows by entry `index` of i64[S] on the device: maybe nobody on the host knows it yet."""
        self.num_output_tokens += 1
        if self._penalties is not None:
            self._penalties.append(token_ids[index : index + 1])

    def advance(self, token_id: int) -> None:
        """The appended token is known. Raises where the grammar does not allow it."""
        if self.grammar is not None:
            self.grammar.advance([token_id])
