"""What the scheduler hands to the runner, and what comes back: one step's work, as plain integers.

Structs rather than dataclasses: a step makes one a request, and these are made five times faster. gc=False: they hold
ints, strings and lists of them, so they are never part of a cycle.
"""

import msgspec

from server.protocol import SamplingParams, TokenLogprobs

AWAITED = -1
"""Stands for the token that the row's previous step samples: the scheduler does not know it yet, the runner will."""


class ScheduledItem(msgspec.Struct, frozen=True, gc=False):
    """One request's share of a step. Written by: nobody.

    token_ids: the tokens at positions start .. start + len - 1, whose KV this step computes; or [AWAITED].
    samples: whether the logits of the last one are sampled, i.e. all its tokens are computed after this step.
    """

    request_id: str
    row: int
    start: int
    token_ids: list[int]
    samples: bool

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class AdmittedRow(msgspec.Struct, frozen=True):
    """A request that enters a row with this step, new or resumed. The runner builds the row's sampling state from it.

    Where sampling.prompt_logprobs is set: they are due in the step that completes the prompt, unless output_token_ids
    holds something. Then they were delivered before, and the prompt may come from the prefix cache this time.
    """

    request_id: str
    row: int
    sampling: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]


class ScheduledBatch(msgspec.Struct, frozen=True):
    """One step. Items come in row-independent order, requests with one new token first.

    Released rows are free before admitted ones are filled.
    """

    step_id: int
    items: list[ScheduledItem]
    admitted: list[AdmittedRow]
    released_rows: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)

    def __bool__(self) -> bool:
        return bool(self.items)


class SampledRow(msgspec.Struct, frozen=True):
    """The runner's answer for one item that samples.

    logprobs, prompt_logprobs: where the request asked for them. A prompt's are delivered in the step that completes the
    prompt.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class SampledTokens(msgspec.Struct, frozen=True):
    """A finished step's results, one entry an item with samples=True, in the batch's order."""

    step_id: int
    rows: list[SampledRow]
    failed: dict[str, str]
    """Requests that this step could not serve (request_id -> message), though it served the others."""
