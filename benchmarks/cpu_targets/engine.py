"""The real engine in this process: its own loop, on the real model, every step of it taken apart by a stopwatch."""

import random
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

import gguf

from server.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from server.engine.assemble import assemble
from server.engine.channel import EngineChannel
from server.engine.loop import EngineLoop
from server.protocol import Command, Event, GenerateRequest, SamplingParams, Shutdown
from server.runner import model_runner
from server.scheduler.batch import ScheduledBatch

FORWARD: Final = "forward pass"
"""From token ids to logits: the part that isn't overhead."""
LOOP: Final = "loop"
"""What no other part claims."""
NUM_BLOCKS: Final = 1024
MAX_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the engine's loop. seconds: all of it; parts: seconds by part, each without the parts in it."""

    num_requests: int
    num_tokens: int
    seconds: float
    parts: dict[str, float]

    @property
    def overhead(self) -> float:
        """The share of the step that is not the forward pass."""
        return 1 - self.parts.get(FORWARD, 0.0) / self.seconds


@dataclass(slots=True)
class Stopwatch:
    """Written by: the functions that it wraps, all on one thread."""

    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    batch: tuple[int, int] = (0, 0)
    """(requests, tokens) of the step under way."""
    _inner: list[float] = field(default_factory=lambda: [0.0])

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function; the time that it takes, less that of timed functions in it, goes to the part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                duration = time.perf_counter() - begin
                self.parts[part] += duration - self._inner.pop()
                self._inner[-1] += duration

        return call

    def noting(self, launch: Callable[[ScheduledBatch], object]) -> Callable[[ScheduledBatch], object]:
        def call(batch: ScheduledBatch) -> object:
            self.batch = len(batch.items), sum(len(item.token_ids) for item in batch.items)
            return launch(batch)

        return call


class Script(EngineChannel):
    """The engine's end of a real channel: requests come at once, the end when all are answered, and nobody reads the
    answers before the step is over. Written by: the loop."""

    def __init__(self, requests: Sequence[GenerateRequest], watch: Stopwatch) -> None:
        ours, self._far = socket.socketpair()
        super().__init__(ours)
        self._far.setblocking(False)
        self._commands: list[Command] = [*requests]
        self._watch = watch
        self._begin = 0.0
        self.steps: list[Step] = []

    def receive(self, timeout: float | None) -> list[Command]:
        self._end_step(time.perf_counter())
        self._drain()
        self._watch.parts.clear()
        self._watch.batch = (0, 0)
        self._begin = time.perf_counter()
        arrived = self._watch.timed("receive", super().receive)(0)
        commands, self._commands = self._commands, []
        return [*arrived, *commands] if commands or timeout is not None else [Shutdown()]

    def send(self, event: Event) -> None:
        self._watch.timed("send", super().send)(event)

    def close(self, *, linger_s: float = 0.0) -> None:
        super().close(linger_s=linger_s)
        self._far.close()

    def _end_step(self, now: float) -> None:
        if self._watch.batch != (0, 0):
            seconds, parts = now - self._begin, dict(self._watch.parts)
            parts[LOOP] = seconds - sum(parts.values())
            self.steps.append(Step(*self._watch.batch, seconds, parts))

    def _drain(self) -> None:
        try:
            while self._far.recv(1 << 20):
                pass
        except BlockingIOError:
            pass


class Engine:
    """One model in one format. Written by: itself."""

    def __init__(self, config: ModelConfig) -> None:
        """Raises StartupError where the model can't be loaded."""
        whole = EngineConfig(
            model=config,
            cache=CacheConfig(num_blocks=NUM_BLOCKS, prefix_cache=False),
            # all prompts in one step, so that all the others are decode steps of the whole batch
            scheduler=SchedulerConfig(max_num_batched_tokens=MAX_TOKENS, max_num_prefill_tokens=MAX_TOKENS),
        )
        self._core = assemble(whole, lambda phase, share: None)[0]
        self._random = random.Random(0)
        self._num_requests = 0

    def run(self, num_requests: int, *, prompt_len: int, output_len: int) -> list[Step]:
        """All steps of so many equal requests with random prompts, greedy."""
        watch = Stopwatch()
        channel = Script([self._request(prompt_len, output_len) for _ in range(num_requests)], watch)
        with self._watched(watch):
            EngineLoop(self._core, channel).run()
        channel.close()
        return channel.steps

    def _request(self, prompt_len: int, output_len: int) -> GenerateRequest:
        self._num_requests += 1
        prompt = [self._random.randrange(100, 40_000) for _ in range(prompt_len)]
        sampling = SamplingParams(max_tokens=output_len, seed=0, temperature=0.0)
        return GenerateRequest(f"request-{self._num_requests:08d}", prompt, sampling, arrival_time=time.monotonic())

    def _watched(self, watch: Stopwatch) -> ExitStack:
        """Wraps what a step calls. Nothing in the engine is made for this, so it reaches inside."""
        core, runner, scheduler = self._core, self._core._runner, self._core._scheduler
        assert isinstance(runner, model_runner.ModelRunner)
        wrapped: list[tuple[object, str, str]] = [
            (core, "schedule", "schedule"),
            (runner, "launch", "launch, the rest"),
            (model_runner, "build_inputs", "build inputs"),
            (runner._model, "forward", FORWARD),
            (runner._model, "logits", FORWARD),
            (model_runner, "choose", "sample"),
            (runner, "collect", "collect"),
            (scheduler, "update", "update"),
        ]
        stack = ExitStack()
        stack.enter_context(mock.patch.object(runner, "launch", watch.noting(runner.launch)))
        for owner, name, part in wrapped:
            stack.enter_context(mock.patch.object(owner, name, watch.timed(part, getattr(owner, name))))
        return stack


def decode_steps(steps: Sequence[Step], num_requests: int) -> list[Step]:
    """Those in which each of num_requests gets its next token, and nothing else happens."""
    return [step for step in steps if step.num_requests == step.num_tokens == num_requests]


def typical(steps: Sequence[Step]) -> Step:
    """Medians, part by part. Raises StatisticsError for none."""
    names = dict.fromkeys(name for step in steps for name in step.parts)
    parts = {name: statistics.median(step.parts.get(name, 0.0) for step in steps) for name in names}
    first = steps[0] if steps else Step(0, 0, 0.0, {})
    return Step(first.num_requests, first.num_tokens, statistics.median(step.seconds for step in steps), parts)


def write_q8_0(source: Path, target: Path) -> None:
    """A copy of a GGUF file whose matrices are Q8_0, rounded from what they were."""
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields[gguf.Keys.General.ARCHITECTURE].contents())
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name != gguf.Keys.General.ARCHITECTURE:
            writer.add_key_value(name, entry.contents(), entry.types[0], sub_type=entry.types[-1])
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if len(tensor.shape) > 1 and kind != q8_0:
            data, kind = gguf.quants.quantize(gguf.quants.dequantize(data, kind), q8_0), q8_0
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
