"""An engine that counts instead of computing: token k of a request is 100 + k, whatever engine produces it.

It dies, hangs or stalls on command, so that the supervisor's whole life can be played through on one event loop.
"""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from dataclasses import dataclass, field

from server.config import EngineConfig
from server.engine.channel import ChannelClosed, EngineChannel
from server.frontend.engine_client import SupervisedEngine
from server.frontend.launcher import EngineHandle, ThreadLauncher
from server.protocol import (
    AbortRequests,
    EngineStats,
    FinishReason,
    GenerateRequest,
    Inspect,
    Inspection,
    Loading,
    MemoryLedger,
    OutputDelta,
    Ready,
    SamplingParams,
    Shutdown,
    StartupFailed,
    StepBegun,
    StepOutput,
)

READY = Ready(
    max_model_len=512, num_blocks=64, block_size=16, max_num_seqs=8, max_num_batched_tokens=64, vocab_size=1000,
    device="cpu", dtype="float32", backend="scripted", ledger=MemoryLedger(0, 0, 0, 0, 0),
)  # fmt: skip

POISON, POISON_LATER = 666, 667
"""Prompt tokens that end the engine in the request's first step, or once it has produced three tokens."""


@dataclass
class Script:
    """What the engines of one test do. Shared by all of them, so that only the first one dies of `die_at_step`."""

    die_at_step: int | None = None
    """Die inside this step of an engine's life."""
    deaths_left: int = 1
    startup_failures: int = 0
    loads: bool = False
    """Say how loading goes, as real engines do."""
    die_before_ready: int = 0
    hang_at_step: int | None = None
    hold: threading.Event = field(default_factory=threading.Event)
    """Steps wait for it."""
    ahead: bool = False
    """Begin a step before the output of the one before is out, as an engine on a GPU does."""
    engines: int = 0
    received: list[GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    steps: list[list[str]] = field(default_factory=list)


class Died(Exception):
    pass


def request(
    request_id: str, *, prompt: list[int] | None = None, max_tokens: int = 8, **fields: object
) -> GenerateRequest:
    return GenerateRequest(
        request_id, prompt or [1, 2, 3], SamplingParams(max_tokens=max_tokens, seed=1), time.monotonic(), **fields
    )  # fmt: skip


class ScriptedEngine:
    def __init__(self, script: Script, sock: socket.socket) -> None:
        self.script = script
        self.channel = EngineChannel(sock)
        self.open: dict[str, GenerateRequest] = {}
        self.produced: dict[str, list[int]] = {}
        self.num_steps = 0
        self.unsent: StepOutput | None = None

    def run(self) -> None:
        self.channel.receive_first(5)
        self.script.engines += 1
        if self.script.startup_failures:
            self.script.startup_failures -= 1
            self.channel.send(StartupFailed("no such model"))
            return
        if self.script.die_before_ready and self.script.engines > 1:
            self.script.die_before_ready -= 1
            return
        if self.script.loads:
            self.channel.send(Loading("warming up", 0.5))
        self.channel.send(READY)
        while True:
            if self.unsent and not self.open:
                self.send_last_output()
            for command in self.channel.receive(0 if self.open else 5):
                match command:
                    case GenerateRequest():
                        self.script.received.append(command)
                        self.open[command.request_id] = command
                        self.produced[command.request_id] = list(command.resumed_token_ids)
                    case AbortRequests(request_ids):
                        self.script.aborted += request_ids
                        for request_id in request_ids:
                            self.open.pop(request_id, None)
                    case Inspect(token):
                        self.channel.send(Inspection(token, b'{"pages": 1}'))
                    case Shutdown():
                        return
            if self.open:
                self.step()

    def step(self) -> None:
        while not self.script.hold.is_set():
            time.sleep(0.001)
        alone = [r for r in self.open.values() if r.run_alone]
        batch = alone[:1] if alone else list(self.open.values())
        self.script.steps.append([r.request_id for r in batch])
        self.channel.send(StepBegun(self.num_steps, [r.request_id for r in batch]))
        if self.unsent:
            self.send_last_output()
        if self.script.hang_at_step == self.num_steps and self.script.deaths_left:
            self.script.deaths_left -= 1
            for _ in range(2000):
                time.sleep(0.005)
                self.channel.receive(0)
        if self.script.die_at_step == self.num_steps and self.script.deaths_left:
            self.script.deaths_left -= 1
            raise Died
        if any(self.is_poison(r) for r in batch):
            raise Died
        self.unsent = StepOutput(self.num_steps, [self.advance(r) for r in batch], EngineStats(len(batch)), 0.0)
        if not self.script.ahead:
            self.send_last_output()
        self.num_steps += 1

    def send_last_output(self) -> None:
        assert self.unsent is not None
        self.channel.send(self.unsent)
        self.unsent = None

    def is_poison(self, r: GenerateRequest) -> bool:
        return POISON in r.prompt_token_ids or (
            POISON_LATER in r.prompt_token_ids and len(self.produced[r.request_id]) >= 3
        )

    def advance(self, r: GenerateRequest) -> OutputDelta:
        tokens = self.produced[r.request_id]
        tokens.append(100 + len(tokens))
        self.open[r.request_id] = GenerateRequest(
            r.request_id, r.prompt_token_ids, r.sampling, r.arrival_time, r.resumed_token_ids
        )
        finished = len(tokens) >= r.sampling.max_tokens
        if finished:
            del self.open[r.request_id]
        return OutputDelta(
            r.request_id,
            tokens[-1:],
            FinishReason.LENGTH if finished else None,
            num_cached_tokens=0,
            scheduled_time=1.0,
        )


def launcher(script: Script) -> ThreadLauncher:
    def engine_main(sock: socket.socket) -> None:
        with contextlib.suppress(Died, ChannelClosed):
            ScriptedEngine(script, sock).run()

    return ThreadLauncher(engine_main)


CONFIG = EngineConfig()


class FailingLauncher:
    """Launches scripted engines, or raises: each launch takes the next of errors, None is none."""

    def __init__(self, script: Script, errors: Iterable[Exception | None]) -> None:
        self._launcher = launcher(script)
        self._errors = iter(errors)

    def launch(self, config: EngineConfig) -> EngineHandle:
        if failure := next(self._errors):
            raise failure
        return self._launcher.launch(config)


def run(main: Coroutine[None, None, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await main

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def started(
    script: Script, *, max_queue: int = 100, step_timeout_s: float = 20
) -> AsyncIterator[SupervisedEngine]:
    client = SupervisedEngine(launcher(script), CONFIG, max_queue=max_queue, step_timeout_s=step_timeout_s)
    await client.start()
    await client.wait_ready()
    try:
        yield client
    finally:
        script.hold.set()
        await client.stop()


async def collect(client: SupervisedEngine, r: GenerateRequest) -> list[OutputDelta]:
    return [delta async for delta in client.generate(r)]


def tokens(deltas: list[OutputDelta]) -> list[int]:
    return [t for delta in deltas for t in delta.token_ids]


def expected(n: int) -> list[int]:
    return [100 + k for k in range(n)]
