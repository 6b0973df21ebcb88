"""A request as the scheduler sees it: tokens, of which some are computed."""

import enum
from dataclasses import dataclass, field

from paging import BlockHash
from server.protocol import FinishReason, GenerateRequest, SamplingParams

NO_ROW = -1


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    """In the queue, nothing computed: never run yet, or preempted."""
    RUNNING = "running"
    """Has a row and blocks."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """Written by: server.scheduler only.

        token_ids   | prompt ................ | output ........ | (awaited)
                    | computed .......................... | to run       |

    There is no prefill state and no decode state. What a step may run are the tokens behind the computed ones: a whole
    prompt, the rest of one, or the single token that was sampled last. Preemption sets the mark back to 0.

    What the step under way computes counts as computed: the device works in order, so whatever is scheduled next finds
    it done. The token which that step samples is awaited: it has a place and can be run, but nobody knows it yet.
    """

    request_id: str
    order: tuple[int, float, int]
    """Who is served first: (priority or 0, its client's turn, number of arrival)."""
    client: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    max_num_tokens: int
    """Length at which it ends; within the model's context, or it would have been refused."""
    min_num_tokens: int
    """Length up to which a stop token does not end it."""
    arrival_time: float
    cache_salt: str
    deadline: float | None
    run_alone: bool

    status: RequestStatus = RequestStatus.WAITING
    row: int = NO_ROW
    num_computed_tokens: int = 0
    num_awaited_tokens: int = 0
    num_hit_tokens: int = 0
    """In blocks that the prefix cache had when it was admitted last: others may hold them, too."""
    num_committed_blocks: int = 0
    block_hashes: list[BlockHash] = field(default_factory=list)
    """Of the leading full blocks; hashed when first needed."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the prefix cache held when it was first admitted."""
    scheduled_time: float | None = None
    first_token_time: float | None = None
    is_announced: bool = False
    """A delta has told num_cached_tokens and scheduled_time."""
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    """Computed when it was preempted, and to be computed again."""
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Known and awaited ones."""
        return len(self.token_ids) + self.num_awaited_tokens

    @property
    def num_tokens_to_run(self) -> int:
        """0 where the awaited token is the last that it may have: that one ends it, and is never run."""
        num_tokens = len(self.token_ids) + self.num_awaited_tokens
        if self.num_awaited_tokens and num_tokens >= self.max_num_tokens:
            return 0
        return num_tokens - self.num_computed_tokens

    @property
    def must_know_its_token(self) -> bool:
        """Whether its next step can't be launched before its newest token is known: a grammar follows it on the host,
        and a suspect runs step by step."""
        return self.num_awaited_tokens > 0 and (self.run_alone or self.sampling.grammar is not None)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def owes_prompt_logprobs(self) -> bool:
        """They go out with the first token, so a request that has one does not owe them again."""
        return self.sampling.prompt_logprobs is not None and len(self.token_ids) == self.num_prompt_tokens

    def finish_reason_now(self) -> FinishReason | None:
        """What the newest output token ends, if anything."""
        length = len(self.token_ids)
        if length > self.min_num_tokens and self.token_ids[-1] in self.stop_token_ids:
            return FinishReason.STOP
        if length >= self.max_num_tokens:
            return FinishReason.LENGTH
        return None


def make_request(message: GenerateRequest, *, order: tuple[int, float, int]) -> Request:
    """Resumed tokens are output like any other: they count for the limits and are computed with the prompt."""
    num_prompt_tokens = len(message.prompt_token_ids)
    sampling = message.sampling
    return Request(
        request_id=message.request_id,
        order=order,
        client=message.client,
        token_ids=[*message.prompt_token_ids, *message.resumed_token_ids],
        num_prompt_tokens=num_prompt_tokens,
        sampling=sampling,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        max_num_tokens=num_prompt_tokens + sampling.max_tokens,
        min_num_tokens=num_prompt_tokens + sampling.min_tokens,
        arrival_time=message.arrival_time,
        cache_salt=message.cache_salt,
        deadline=message.deadline,
        run_alone=message.run_alone,
    )
