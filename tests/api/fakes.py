"""A scripted engine behind the EngineClient protocol: what it is told to say, a token a step."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.protocol import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    Loading,
    MemoryLedger,
    OutputDelta,
    Ready,
    TokenLogprobs,
)

Script = Callable[[GenerateRequest], Sequence[int]]

READY = Ready(
    max_model_len=2048,
    num_blocks=256,
    block_size=16,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    vocab_size=49152,
    device="cpu",
    dtype="float32",
    backend="fake",
    ledger=MemoryLedger(weights=1000, kv_cache=2000, activations=300, free=4000, total=7300),
)


@dataclass
class FakeState:
    phase: str = "ready"
    loading: Loading | None = None
    ready: Ready | None = READY
    stats: EngineStats = field(default_factory=EngineStats)
    num_waiting: int = 0
    last_step_time: float | None = None
    num_restarts: int = 0
    num_resumed: int = 0


class FakeEngine:
    """script: the tokens of a request's answer. error: raised at the door. hold: waits before each token."""

    def __init__(self, script: Script) -> None:
        self.state = FakeState()
        self.script = script
        self.requests: list[GenerateRequest] = []
        self.closed: list[str] = []
        """Requests whose iterator ended or was closed, in order."""
        self.unfinished: list[str] = []
        """Those of them that had not been finished: the ones a real engine aborts."""
        self.error: Exception | None = None
        self.fail_after: tuple[int, FinishReason] | None = None
        """After so many tokens, end with this reason."""
        self.hold: asyncio.Event | None = None
        self.tokens_per_delta = 1
        self.num_cached_tokens = 0
        self.loose_end = False
        """End the stream of deltas without a finish reason."""

    async def start(self) -> None: ...

    async def wait_ready(self) -> Ready:
        return READY

    async def generate(self, request: GenerateRequest) -> AsyncIterator[OutputDelta]:
        if self.error is not None:
            raise self.error
        self.requests.append(request)
        finished = False
        try:
            async for delta in self._deltas(request):
                finished = delta.finish_reason is not None
                yield delta
        finally:
            self.closed.append(request.request_id)
            if not finished:
                self.unfinished.append(request.request_id)

    async def _deltas(self, request: GenerateRequest) -> AsyncIterator[OutputDelta]:
        sampling = request.sampling
        tokens, reason, stop_token = self._answer(request)
        size = self.tokens_per_delta
        chunks = [tokens[i : i + size] for i in range(0, len(tokens), size)] or [[]]
        for number, chunk in enumerate(chunks):
            if self.hold is not None:
                await self.hold.wait()
            await asyncio.sleep(0)
            last = number == len(chunks) - 1
            if last and self.loose_end:
                return
            yield OutputDelta(
                request.request_id,
                chunk,
                finish_reason=reason if last else None,
                stop_token_id=stop_token if last else None,
                num_cached_tokens=self.num_cached_tokens if number == 0 else None,
                scheduled_time=request.arrival_time + 0.001 if number == 0 else None,
                logprobs=None if sampling.logprobs is None else [_logprobs(t, sampling.logprobs) for t in chunk],
                prompt_logprobs=self._prompt_logprobs(request) if number == 0 else None,
                error="broken on purpose" if last and reason is FinishReason.ERROR else None,
            )

    def _answer(self, request: GenerateRequest) -> tuple[list[int], FinishReason, int | None]:
        sampling = request.sampling
        tokens = list(self.script(request))[: sampling.max_tokens]
        if self.fail_after is not None and self.fail_after[0] < len(tokens):
            return tokens[: self.fail_after[0]], self.fail_after[1], None
        for position, token in enumerate(tokens):
            if token in sampling.stop_token_ids and position >= sampling.min_tokens:
                return tokens[: position + 1], FinishReason.STOP, token
        return tokens, FinishReason.LENGTH, None

    def _prompt_logprobs(self, request: GenerateRequest) -> list[TokenLogprobs | None] | None:
        k = request.sampling.prompt_logprobs
        if k is None:
            return None
        return [None, *(_logprobs(token, k) for token in request.prompt_token_ids[1:])]

    def abort(self, request_ids: list[str]) -> None:
        raise AssertionError("closing the iterator aborts")

    async def inspect(self) -> dict[str, Any]:
        return {"pages": {"0": [1, 2]}, "requests": [{"request_id": "a"}]}

    async def reset_prefix_cache(self) -> None: ...

    async def drain(self, timeout_s: float) -> None: ...

    async def stop(self) -> None: ...


def _logprobs(token: int, k: int) -> TokenLogprobs:
    """The token at -0.5, then the ids behind it, each a half less."""
    others = [token, *range(token + 1, token + k)][:k]
    return TokenLogprobs(token, -0.5, 1, others, [-0.5 * (i + 1) for i in range(len(others))])
