"""What changes one row's logits before temperature: penalties, then logit_bias, then the ban on early stop tokens."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from server.protocol import SamplingParams
from server.transfer import upload


class Penalties:
    """repetition_penalty over prompt and output as transformers has it (Keskar et al., 2019); presence_penalty and
    frequency_penalty over the output as OpenAI documents them. Written by: the row that owns it.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        *,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)  # of output tokens
        self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._ones = torch.ones(len(output_ids) + 1, device=device)
        [known] = upload([np.array([*prompt_ids, *output_ids], dtype=np.int64)], device)
        self._seen.index_fill_(0, known, True)
        output = known[len(prompt_ids) :]
        self._counts.index_add_(0, output, self._ones[:-1])

    def append(self, token_id: torch.Tensor) -> None:
        """token_id: i64[1], on the device."""
        self._seen.index_fill_(0, token_id, True)
        self._counts.index_add_(0, token_id, self._ones[:1])

    def apply(self, logits: torch.Tensor) -> None:
        """logits: float32[V], changed in place."""
        if self._repetition != 1.0:
            penalised = torch.where(logits < 0, logits * self._repetition, logits / self._repetition)
            torch.where(self._seen, penalised, logits, out=logits)
        if self._frequency != 0.0:
            logits.sub_(self._counts, alpha=self._frequency)
        if self._presence != 0.0:
            logits.sub_((self._counts > 0).to(logits.dtype), alpha=self._presence)


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class LogitBias:
    """A fixed addition to some tokens' logits."""

    def __init__(self, bias: Mapping[int, float], *, vocab_size: int, device: torch.device) -> None:
        """Raises ValueError for a token that the vocabulary does not have."""
        unknown = [token_id for token_id in bias if not 0 <= token_id < vocab_size]
        if unknown:
            raise ValueError(f"logit_bias names token {unknown[0]}, but the vocabulary has {vocab_size} tokens")
        ids = np.array(list(bias.keys()), dtype=np.int64)
        values = np.array(list(bias.values()), dtype=np.float32)
        self._ids, self._values = upload([ids, values], device)

    def apply(self, logits: torch.Tensor) -> None:
        """logits: float32[V], changed in place."""
        logits.index_add_(0, self._ids, self._values)
