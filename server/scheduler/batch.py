"""What the scheduler hands to the runner: one step's work, as plain integers."""

from dataclasses import dataclass

from server.protocol import SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledItem:
    """One request's share of a step. Written by: nobody.

    token_ids: the tokens at positions start .. start + len - 1, whose KV this step computes.
    samples: whether the logits of the last one are sampled, i.e. all known tokens are computed after this step.
    """

    request_id: str
    row: int
    start: int
    token_ids: list[int]
    samples: bool

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class AdmittedRow:
    """A request that enters a row with this step, new or resumed. The runner builds the row's sampling state from it."""

    request_id: str
    row: int
    sampling: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step. Items come in row-independent order; released rows are free before admitted ones are filled."""

    step_id: int
    items: list[ScheduledItem]
    admitted: list[AdmittedRow]
    released_rows: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)

    def __bool__(self) -> bool:
        return bool(self.items)


@dataclass(frozen=True, slots=True)
class SampledRow:
    """The runner's answer for one item that samples.

    logprobs, prompt_logprobs: protocol.TokenLogprobs, where the request asked for them. A prompt's are delivered in the
    step that completes the prompt.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list | None = None
    prompt_logprobs: list | None = None


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A finished step's results, one entry an item with samples=True, in the batch's order."""

    step_id: int
    rows: list[SampledRow]
    failed: dict[str, str]
    """Requests that this step could not serve (request_id -> message), though it served the others."""
