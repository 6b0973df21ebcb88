"""K12: the engine as it serves, scheduler and lookahead included, on a model with random weights.

After the runner's own warm-up two waves of requests run to their end. Nothing may be compiled for either, and in the
second one nothing may be allocated on the device, nor may a launch wait for it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import triton

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.steps import DRY, SIZES, build
from paging import KVCacheManager
from server.config import SchedulerConfig
from server.engine.core import EngineCore
from server.engine.grammar_gate import GrammarGate
from server.models.decoder import Decoder
from server.protocol import GenerateRequest, SamplingParams
from server.runner.decode_graphs import capture_cuda
from server.runner.kv_cache import kv_cache_spec
from server.runner.model_runner import ModelRunner
from server.scheduler.batch import SampledTokens, ScheduledBatch
from server.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
MOST_STEPS = 10_000

SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 50, "logprobs": 2},
    {"temperature": 0.0, "frequency_penalty": 0.5, "min_tokens": 64, "stop_token_ids": (3,)},
)
"""What the requests ask for, in turns."""


class HostWait(RuntimeError):
    """A launch stopped the host until the device had caught up."""


class WatchedRunner:
    """A runner whose launches may not wait for the device. launch_s: seconds that they took the host, step by step."""

    def __init__(self, runner: ModelRunner, device: torch.device) -> None:
        self._runner = runner
        self._is_cuda = device.type == "cuda"
        self.launch_s: list[float] = []

    def launch(self, batch: ScheduledBatch) -> object:
        begin = time.perf_counter()
        with _waits_raise() if self._is_cuda else _nothing():
            handle = self._runner.launch(batch)
        self.launch_s.append(time.perf_counter() - begin)
        return handle

    def collect(self, handle: object) -> SampledTokens:
        return self._runner.collect(handle)


def run(bench: Bench) -> None:
    counts = (2,) if bench.dry else (1, 8, 64)
    for name, (sizes, _) in SIZES.items():
        model = build(bench, DRY if bench.dry else sizes, bench.ops)
        for count in counts:
            _serve(bench, f"{name} engine, {count} requests", model, count)
        del model


def _serve(bench: Bench, name: str, model: Decoder, count: int) -> None:
    prompt_len, output_len = (9, 5) if bench.dry else (512, 64)
    core, runner = _engine(bench, model, count, prompt_len + output_len)
    with _counting_compilations() as compiled:
        try:
            _wave(core, "a", count, prompt_len, output_len)
            runner.launch_s.clear()
            allocated = _device_allocations(bench)
            begin = time.perf_counter()
            _wave(core, "b", count, prompt_len, output_len)
            elapsed = time.perf_counter() - begin
            waits = 0
        except HostWait as wait:
            print(f"{name}: {wait}")
            waits = 1
    bench.note("K12", f"{name}, launches that waited for the device", waits, "", most=0.5)
    bench.note("K12", f"{name}, kernels compiled after warm-up", len(compiled), "", most=0.5)
    if waits:
        return
    bench.note("K12", f"{name}, device allocations", _device_allocations(bench) - allocated, "", most=0.5)
    launches = sorted(runner.launch_s)
    bench.note("", f"{name}, median launch on the host", 1e3 * launches[len(launches) // 2], "ms")
    bench.note("", f"{name}, mean step, prompts included", 1e3 * elapsed / len(launches), "ms")


def _engine(bench: Bench, model: Decoder, count: int, length: int) -> tuple[EngineCore, WatchedRunner]:
    width = -(-length // BLOCK_SIZE) + 1
    manager = KVCacheManager(
        num_blocks=count * width + 1,
        block_size=BLOCK_SIZE,
        max_requests=count,
        max_blocks_per_request=width,
        enable_prefix_cache=False,
    )
    spec = kv_cache_spec(model.spec, block_size=BLOCK_SIZE, dtype=bench.dtype)
    runner = ModelRunner(
        model=model,
        kv_cache=model.ops.allocate_kv_cache(spec, num_blocks=manager.num_blocks + 1, device=bench.device),
        page_table=manager.page_table.view,
        max_num_seqs=count,
        device=bench.device,
        capture=(lambda run: run) if bench.dry else capture_cuda,
        lookahead=True,
    )
    runner.warm_up(64)
    watched = WatchedRunner(runner, bench.device)
    scheduler = Scheduler(
        config=SchedulerConfig(max_num_seqs=count, max_num_batched_tokens=max(16, count) if bench.dry else 2048),
        manager=manager,
        max_model_len=width * BLOCK_SIZE,
    )
    return EngineCore(scheduler=scheduler, runner=watched, gate=GrammarGate(_no_grammars), lookahead=True), watched


def _no_grammars() -> NoReturn:
    raise AssertionError("no request of the benchmark has a grammar")


def _wave(core: EngineCore, wave: str, count: int, prompt_len: int, output_len: int) -> None:
    """Runs count requests to their end."""
    for index in range(count):
        prompt = [(7 * index + 3 * position) % 150 + 1 for position in range(prompt_len)]
        params = SamplingParams(max_tokens=output_len, seed=index, **SAMPLING[index % len(SAMPLING)])
        core.add(GenerateRequest(f"{wave}{index}", prompt, params, time.monotonic()))
    num_tokens = 0
    for _ in range(MOST_STEPS):
        if not core.has_work:
            break
        output = core.execute(core.schedule())
        num_tokens += sum(len(delta.token_ids) for delta in output.deltas) if output else 0
    if num_tokens != count * output_len:
        raise RuntimeError(f"the engine made {num_tokens} tokens instead of {count * output_len}")


@contextmanager
def _counting_compilations() -> Iterator[list[str]]:
    """The names of kernels that Triton had to compile, or to load from its disk cache."""
    names: list[str] = []
    runtime = triton.knobs.runtime
    before = runtime.jit_post_compile_hook
    runtime.jit_post_compile_hook = lambda **about: names.append(about["repr"])
    try:
        yield names
    finally:
        runtime.jit_post_compile_hook = before


@contextmanager
def _waits_raise() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchroniz" in str(error):
            raise HostWait(str(error)) from error
        raise
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _device_allocations(bench: Bench) -> int:
    """Calls of the driver's allocator so far; what torch's cache gives out again doesn't count."""
    return 0 if bench.dry else int(torch.cuda.memory_stats(bench.device)["num_device_alloc"])
