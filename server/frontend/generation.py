"""The one path by which every endpoint generates: prompts x choices -> a single stream of pieces.

A Generation owns the sequences of one HTTP request. Leaving it early, by an exception, a cancellation or aclose(),
aborts in the engine whatever is still running.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from server.errors import EngineRestarting, Overloaded, RequestTimeout, StepFailed
from server.frontend.client import EngineClient
from server.frontend.output import OutputProcessor, Piece
from server.frontend.params import derive_seed
from server.frontend.tools import AnswerParser
from server.metrics.prometheus import Metrics, SequenceObserver
from server.protocol import FinishReason, GenerateRequest, OutputDelta, SamplingParams
from server.tokenizer import IncrementalDetokenizer, StopMatcher, Tokenizer

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    token_ids: list[int]
    sampling: SamplingParams
    """max_tokens depends on the prompt's length, so each prompt has its own."""
    text: str | None = None
    """As the client sent it; None where it sent token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What an endpoint wants generated. Everything is validated."""

    request_id: str
    prompts: Sequence[Prompt]
    arrival_time: float
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    """Keep the stop string, or the client's stop token, in the text."""
    skip_special_tokens: bool = True
    client_stop_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    client: str = ""
    """Whose it is: clients take turns, and share the queue."""
    deadline: float | None = None
    make_parser: Callable[[], AnswerParser] | None = None
    """Splits each choice's text into text, reasoning and tool calls; None leaves it whole."""
    log: dict[str, Any] = field(default_factory=dict)
    """What the request's log line says of it in the end. Written by: Generation."""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


@dataclass(slots=True)
class Usage:
    """Written by: the Generation, as pieces come. Each prompt counts once, however many choices it has."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class Generation:
    """Iterate over pieces(), once. Written by: itself.

    Pieces of one choice come in order; those of different choices as they arrive. After a choice's piece with a finish
    reason it gives no more.
    """

    def __init__(self, job: Job, *, client: EngineClient, tokenizer: Tokenizer, metrics: Metrics) -> None:
        self.job = job
        self.usage = Usage(prompt_tokens=sum(len(p.token_ids) for p in job.prompts))
        self._client = client
        self._tokenizer = tokenizer
        self._metrics = metrics

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Raises Overloaded or EngineRestarting before the first piece, StepFailed and RequestTimeout at any time."""
        job = self.job
        sequences = [self._sequence(index) for index in range(job.num_choices)]
        served = turned_away = False
        try:
            async with aclosing(sequences[0] if len(sequences) == 1 else merge(sequences)) as pieces:
                async for piece in pieces:
                    served = True
                    yield piece
        except (Overloaded, EngineRestarting):
            turned_away = not served
            raise
        finally:
            if not turned_away:
                self._metrics.observe_request(num_choices=job.n, max_tokens=job.prompts[0].sampling.max_tokens)
            usage = self.usage
            job.log.update(
                id=job.request_id,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
            )

    async def _sequence(self, index: int) -> AsyncGenerator[Piece, None]:
        job = self.job
        prompt, sample = job.prompts[index // job.n], index % job.n
        request_id = job.request_id if job.num_choices == 1 else f"{job.request_id}-{index}"
        sampling = prompt.sampling
        if sample:
            sampling = msgspec.structs.replace(sampling, seed=derive_seed(sampling.seed, sample))
        request = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            arrival_time=job.arrival_time,
            priority=job.priority,
            cache_salt=job.cache_salt,
            client=job.client,
            deadline=job.deadline,
        )
        processor = self._processor(index, prompt)
        parser = None if job.make_parser is None else job.make_parser()
        observer = self._metrics.begin_sequence(
            arrival_time=job.arrival_time, num_prompt_tokens=len(prompt.token_ids), counts_prompt=not sample
        )
        reason: FinishReason | None = FinishReason.ABORT
        deltas = self._client.generate(request)
        try:
            async for delta in deltas:
                if delta.finish_reason in _FAILURES:
                    reason = delta.finish_reason
                    raise _failure(delta)
                piece = self._digest(delta, processor, observer, counts_prompt=not sample)
                reason = piece.finish_reason or reason
                if parser is not None:
                    self._parse(piece, parser)
                yield piece
                if piece.finish_reason is not None:
                    return
            reason = FinishReason.ERROR
            raise StepFailed("the engine gave no end to this request")
        except (Overloaded, EngineRestarting):
            if not observer.started:
                reason = None  # turned away at the door: that is counted as a rejection
            raise
        finally:
            await _close(deltas)
            if reason is not None:
                observer.end(reason)

    def _processor(self, index: int, prompt: Prompt) -> OutputProcessor:
        job = self.job
        return OutputProcessor(
            index=index,
            detokenizer=IncrementalDetokenizer(
                self._tokenizer, prompt_ids=prompt.token_ids, skip_special_tokens=job.skip_special_tokens
            ),
            stop=StopMatcher(job.stop, include_stop=job.include_stop) if job.stop else None,
            min_tokens=prompt.sampling.min_tokens,
            show_stop_token=job.include_stop,
            client_stop_ids=job.client_stop_ids,
            want_logprobs=prompt.sampling.logprobs is not None,
        )

    def _digest(
        self, delta: OutputDelta, processor: OutputProcessor, observer: SequenceObserver, *, counts_prompt: bool
    ) -> Piece:
        num_before = processor.num_tokens
        piece = processor.push(delta)
        num_new = processor.num_tokens - num_before
        num_cached = delta.num_cached_tokens if counts_prompt else None
        self.usage.completion_tokens += num_new
        self.usage.cached_tokens += num_cached or 0
        observer.on_tokens(num_new, scheduled_time=delta.scheduled_time, num_cached_tokens=num_cached)
        return piece

    def _parse(self, piece: Piece, parser: AnswerParser) -> None:
        """Moves what is not plain text to where it belongs. A choice that calls tools ends with that as its reason."""
        parts = [parser.push(piece.text)]
        if piece.finish_reason is not None:
            parts.append(parser.finish())
        piece.text = "".join(part.content for part in parts)
        piece.reasoning = "".join(part.reasoning for part in parts)
        piece.tool_calls = [call for part in parts for call in part.tool_calls]
        if piece.reasoning and not piece.text:
            self.usage.reasoning_tokens += len(piece.token_ids)
        if piece.finish_reason is FinishReason.STOP and parser.num_calls:
            piece.finish_reason = FinishReason.TOOL_CALLS


_FAILURES = (FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.ABORT)


def _failure(delta: OutputDelta) -> Exception:
    if delta.finish_reason is FinishReason.TIMEOUT:
        return RequestTimeout(delta.error or "the request's own time limit passed")
    if delta.finish_reason is FinishReason.ABORT:
        return EngineRestarting(delta.error or "the server is shutting down", retry_after=1.0)
    return StepFailed(delta.error or "the engine failed on this request")


async def _close(deltas: AsyncIterator[Any]) -> None:
    if isinstance(deltas, AsyncGenerator):
        await deltas.aclose()


async def merge(streams: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[_T, None]:
    """All items in order of arrival. One stream's exception ends them all."""
    queue: asyncio.Queue[tuple[_T] | Exception | None] = asyncio.Queue(maxsize=1)

    async def pump(stream: AsyncGenerator[_T, None]) -> None:
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    await queue.put((item,))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            entry = await queue.get()
            if entry is None:
                num_open -= 1
            elif isinstance(entry, Exception):
                raise entry
            else:
                yield entry[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
