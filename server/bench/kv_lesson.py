"""What a KV cache is for, in real runs: the time of each further token with the cache and without it."""

import bisect
import statistics
import time
from collections.abc import Sequence

from server.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from server.engine.assemble import assemble
from server.engine.core import EngineCore
from server.protocol import GenerateRequest, SamplingParams

PROMPT_LEN = 16
REPEATS = 3
NEIGHBORS = 4


class Lesson:
    """One model in this process, one request at a time. Written by: itself."""

    def __init__(self, model: str, *, dtype: str, longest: int) -> None:
        """Raises StartupError where the model can't be loaded."""
        self.longest = longest
        config = EngineConfig(
            model=ModelConfig(model=model, dtype=dtype, max_model_len=longest + 1),
            cache=CacheConfig(num_blocks=-(-longest // 16) + 2, prefix_cache=False),
            scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=max(16, longest)),
            device=DeviceConfig(device="cpu"),
        )
        self._engine: EngineCore = assemble(config, lambda phase, share: None)[0]
        self._num_requests = 0

    def with_cache(self) -> list[float]:
        """Seconds of each token of an answer that fills the context; the first one is at position PROMPT_LEN."""
        return self._run(PROMPT_LEN, self.longest - PROMPT_LEN)

    def without_cache(self, length: int) -> float:
        """Seconds of the token behind `length` others when all of them are computed again; the best of a few tries."""
        return min(self._run(length, 1)[0] for _ in range(REPEATS))

    def _run(self, prompt_len: int, num_output: int) -> list[float]:
        """Durations of the steps of one request."""
        self._num_requests += 1
        prompt = [100 + i % 1000 for i in range(prompt_len)]
        sampling = SamplingParams(max_tokens=num_output, seed=0, temperature=0.0)
        engine = self._engine
        engine.add(GenerateRequest(f"lesson-{self._num_requests}", prompt, sampling, arrival_time=time.monotonic()))
        durations = []
        while engine.has_work:
            begin = time.perf_counter()
            engine.execute(engine.schedule())
            durations.append(time.perf_counter() - begin)
        return durations


def typical(durations: Sequence[float], i: int) -> float:
    """The median of the durations around entry i, the first one (a prompt's) left out."""
    around = durations[max(1, i - NEIGHBORS) : i + NEIGHBORS + 1] or durations[-NEIGHBORS:]
    return statistics.median(around)


def lengths_up_to(longest: int) -> list[int]:
    """Where the costly case is measured: powers of two, and the end."""
    lengths = [PROMPT_LEN]
    while lengths[-1] * 2 < longest:
        lengths.append(lengths[-1] * 2)
    return [*lengths, longest]


def interpolate(points: Sequence[tuple[int, float]], x: int) -> float:
    """On the line between its neighbors; points in ascending order, x within them."""
    i = max(1, bisect.bisect_left([p for p, _ in points], x))
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def total_without(points: Sequence[tuple[int, float]], length: int) -> float:
    """Seconds to write tokens PROMPT_LEN .. length - 1 without a cache; between the measured ones by interpolation."""
    return sum(interpolate(points, position) for position in range(PROMPT_LEN, length))
