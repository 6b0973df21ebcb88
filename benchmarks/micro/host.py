"""What the host side of a step costs, with a model that computes nothing (targets H1 to H6).

Durations are also given at reference speed: scaled by how fast this machine runs a fixed Python loop right now, so that
runs on other or busier machines compare.
"""

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from paging import KVCacheManager
from server.api.sse import ChunkEncoder
from server.bench.ceilings import median_seconds
from server.bench.kv_costs import allocate_and_free, hash_blocks, look_up
from server.config import SchedulerConfig
from server.engine.core import EngineCore
from server.engine.grammar_gate import GrammarGate
from server.frontend.output import OutputProcessor
from server.protocol import GenerateRequest, OutputDelta, SamplingParams
from server.protocol.wire import encode_frame
from server.scheduler.batch import SampledRow, SampledTokens, ScheduledBatch
from server.scheduler.scheduler import Scheduler
from server.tokenizer import IncrementalDetokenizer, load_tokenizer
from server.weights.locate import locate

REFERENCE_LOOP_NS = 21.0
"""One turn of ceilings.python_loop_ns's loop on the machine that the targets were written on, idle."""
PROMPT_TOKEN_S = 300e-6
"""What a prompt token costs that machine in the model; the prefix cache's price is held against it."""


@dataclass(frozen=True, slots=True)
class Figure:
    """value: in `unit`, as measured; those in microseconds or nanoseconds are scaled before the comparison."""

    name: str
    value: float
    unit: str
    limit: float

    def at_reference(self, loop_ns: float) -> float:
        return self.value * REFERENCE_LOOP_NS / loop_ns if self.unit.split()[0] in {"us", "ns"} else self.value


class StubRunner:
    """Samples token 7 for whoever asks."""

    def launch(self, batch: ScheduledBatch) -> object:
        return batch

    def collect(self, handle: object) -> SampledTokens:
        assert isinstance(handle, ScheduledBatch)
        rows = [SampledRow(item.request_id, [7]) for item in handle.items if item.samples]
        return SampledTokens(handle.step_id, rows, {})


def no_compiler() -> NoReturn:
    raise AssertionError("no request here has a grammar")


def engine_of(
    num_requests: int, *, prompt_len: int = 64, max_tokens: int = 100_000, prefix_cache: bool = True, budget: int = 8192
) -> EngineCore:
    """An engine with so many requests open, none of them scheduled yet. Prompts are random, so nothing is shared."""
    blocks_per_request = 1024
    manager = KVCacheManager(
        num_blocks=num_requests * blocks_per_request,
        block_size=16,
        max_requests=num_requests,
        max_blocks_per_request=blocks_per_request,
        enable_prefix_cache=prefix_cache,
    )
    config = SchedulerConfig(max_num_seqs=num_requests, max_num_batched_tokens=max(budget, num_requests))
    max_model_len = blocks_per_request * 16
    scheduler = Scheduler(config=config, manager=manager, max_model_len=max_model_len)
    engine = EngineCore(scheduler=scheduler, runner=StubRunner(), gate=GrammarGate(no_compiler))
    source = random.Random(num_requests)
    for i in range(num_requests):
        prompt = [source.randrange(50_000) for _ in range(prompt_len)]
        sampling = SamplingParams(max_tokens=min(max_tokens, max_model_len - prompt_len), seed=i)
        engine.add(GenerateRequest(f"request-{i:08d}", prompt, sampling, arrival_time=0.0))
    return engine


def step(engine: EngineCore) -> bytes:
    """One step as the loop runs it, up to the frame for the API process."""
    output = engine.execute(engine.schedule())
    assert output is not None, "a stub's step is done at once"
    return encode_frame(output)


def decode_step_us(num_requests: int) -> float:
    """Median duration of a step in which every request gets one token."""
    engine = engine_of(num_requests)
    for _ in range(10):  # prompts first: 256 of 64 tokens are two steps
        step(engine)
    durations = []
    for _ in range(300):
        begin = time.perf_counter()
        step(engine)
        durations.append(time.perf_counter() - begin)
    return sorted(durations)[len(durations) // 2] * 1e6


def least_squares(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(intercept, slope)."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope


def step_figures() -> list[Figure]:
    fixed, slope = least_squares([(n, decode_step_us(n)) for n in (1, 16, 64, 128, 256)])
    return [
        Figure("H1 step with a stub model, fixed part", fixed, "us", 300),
        Figure("H1 step with a stub model, a running request", slope, "us", 3),
    ]


def block_figures() -> list[Figure]:
    small, large = allocate_and_free(1_024), allocate_and_free(102_400)
    return [
        Figure("H2 allocate and free a block", small, "ns", 300),
        Figure("H2 the same with 100 times the blocks", large / small, "x", 1.3),
        Figure("H3 hash 16 tokens", hash_blocks(), "ns", 1_500),
        Figure("H3 look up a block", look_up(), "ns", 1_000),
    ]


def prefix_cache_figure() -> Figure:
    """Prompts without a common prefix: what hashing and naming add, as a share of a prompt token's price."""
    num_requests, prompt_len = 64, 1024

    def seconds(*, prefix_cache: bool) -> float:
        durations = []
        for _ in range(5):
            engine = engine_of(num_requests, prompt_len=prompt_len, max_tokens=1, prefix_cache=prefix_cache)
            begin = time.perf_counter()
            while engine.has_work:
                step(engine)
            durations.append(time.perf_counter() - begin)
        return min(durations)

    added = seconds(prefix_cache=True) - seconds(prefix_cache=False)
    share = added / (num_requests * prompt_len) / PROMPT_TOKEN_S
    return Figure("H4 prefix cache without a hit, of a prompt token's price", share * 100, "%", 1)


def text_figure() -> Figure:
    """Detokenize and encode one streamed token: real tokenizer, English text."""
    tokenizer = load_tokenizer(locate(""))
    text = "The quick brown fox jumps over the lazy dog, and the dog, being lazy, lets it. 한국어도 있다. " * 40
    token_ids = tokenizer.encode(text)
    deltas = [OutputDelta("request-0", [token_id]) for token_id in token_ids]
    head = {"id": "cmpl-0123456789", "object": "text_completion", "created": 0, "model": "SmolLM2-135M-Instruct"}

    def work() -> None:
        processor = OutputProcessor(index=0, detokenizer=IncrementalDetokenizer(tokenizer))
        encoder = ChunkEncoder(head, text_path=("text",), with_usage=False)
        for delta in deltas:
            encoder.text(0, processor.push(delta).text)

    return Figure("H5 detokenize and encode a token", median_seconds(work) / len(deltas) * 1e6, "us", 30)


def gc_figure() -> Figure:
    """The longest collection while requests come, run and go, after what the loop does at its start. CPU time."""
    pauses: list[float] = []
    begun = 0.0

    def watch(phase: str, info: dict[str, int]) -> None:
        nonlocal begun
        if phase == "start":
            begun = time.thread_time()
        else:
            pauses.append(time.thread_time() - begun)

    engine = engine_of(64, max_tokens=2_000)
    gc.collect()
    gc.freeze()
    gc.callbacks.append(watch)
    try:
        for i in range(4_000):
            step(engine)
            if i % 4 == 0:
                sampling = SamplingParams(max_tokens=50, seed=i)
                engine.add(GenerateRequest(f"late-{i}", [i % 50_000] * 128, sampling, arrival_time=0.0))
    finally:
        gc.callbacks.remove(watch)
        gc.unfreeze()
    return Figure("H6 longest garbage-collection pause", max(pauses, default=0.0) * 1e3, "ms", 5)


GROUPS: tuple[Callable[[], list[Figure]], ...] = (
    step_figures,
    block_figures,
    lambda: [prefix_cache_figure()],
    lambda: [text_figure()],
    lambda: [gc_figure()],
)
