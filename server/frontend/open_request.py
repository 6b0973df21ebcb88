"""A request that has not ended yet, as the API process keeps it: enough to start it over on another engine."""

import asyncio

import msgspec

from server.errors import Overloaded
from server.protocol import FinishReason, GenerateRequest, OutputDelta, TokenLogprobs

STRIKES_UNTIL_ALONE = 2
STRIKES_UNTIL_FAILED = 2


class OpenRequest:
    """Written by: SupervisedEngine only.

    Suspicion: an engine that dies inside a step accuses that step's requests. A request that is accused twice without
    having produced a token in between runs alone next; one that brings the engine down alone, twice, is guilty.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.produced: list[int] = list(request.resumed_token_ids)
        self.started = False
        """Seen in a step: it no longer counts as waiting."""
        self.finished = False
        self.refusal: Overloaded | None = None
        """Set where it had a place in the queue and lost it: what its reader is told."""
        self.submitted = False
        """An engine has had it."""
        self._strikes = 0
        self._strikes_alone = 0
        self._runs_alone = False
        self._first_delta_seen = False
        self._prompt_logprobs_seen = False
        self._unread: OutputDelta | None = None
        self._wake = asyncio.Event()

    # --------------------------------------------------------------------------------------------------- output

    def push(self, delta: OutputDelta) -> None:
        """Adds a delta from the engine. What the reader has not fetched yet is merged, so nothing piles up."""
        if self.finished:
            return
        if delta.token_ids:
            self.produced += delta.token_ids
            self._strikes = self._strikes_alone = 0
            self._runs_alone = False
        self._prompt_logprobs_seen |= delta.prompt_logprobs is not None
        if self._first_delta_seen:  # a resumed request reports its admission again
            delta = msgspec.structs.replace(delta, num_cached_tokens=None, scheduled_time=None)
        self._first_delta_seen = True
        self._unread = delta if self._unread is None else _merge(self._unread, delta)
        self.finished = delta.finish_reason is not None
        self._wake.set()

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Ends it from this side of the stream."""
        self.push(OutputDelta(self.request.request_id, [], reason, error=error))

    async def next_delta(self) -> OutputDelta:
        await self._wake.wait()
        self._wake.clear()
        delta, self._unread = self._unread, None
        assert delta is not None, "woken without a delta"
        return delta

    # ------------------------------------------------------------------------------------------------ resumption

    def to_submit(self) -> GenerateRequest:
        """The request as the next engine must see it: what was produced so far is part of it."""
        if not self.submitted:
            self.submitted = True
            return self.request
        self._runs_alone = self._strikes >= STRIKES_UNTIL_ALONE
        sampling = self.request.sampling
        if self._prompt_logprobs_seen:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return msgspec.structs.replace(
            self.request, sampling=sampling, resumed_token_ids=list(self.produced), run_alone=self._runs_alone
        )

    def accuse(self) -> bool:
        """The engine died in a step with this request. True: proven guilty, it must not run again."""
        self._strikes += 1
        self._strikes_alone += self._runs_alone
        return self._strikes_alone >= STRIKES_UNTIL_FAILED


def _merge(first: OutputDelta, second: OutputDelta) -> OutputDelta:
    """One delta that says what both said."""
    return msgspec.structs.replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        num_cached_tokens=first.num_cached_tokens,
        scheduled_time=first.scheduled_time,
        logprobs=_concatenate(first.logprobs, second.logprobs),
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
    )


def _concatenate(first: list[TokenLogprobs] | None, second: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
    return second if first is None else first + (second or [])
