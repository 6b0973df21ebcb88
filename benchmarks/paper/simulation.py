"""The real scheduler and the real block manager over a stub model, in simulated time.

A claim about memory or scheduling doesn't depend on what the model computes, so here it computes nothing: the token at
a position is a hash of (request, position). Time is a cost model: a step takes `fixed` plus `per_token` for each token.
"""

import random
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from paging import KVCacheManager
from server.config import SchedulerConfig
from server.protocol import GenerateRequest, SamplingParams
from server.scheduler.batch import SampledRow, SampledTokens, ScheduledBatch
from server.scheduler.scheduler import Scheduler

VOCABULARY = 50_000


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its prompt and how many tokens it will answer with."""

    request_id: str
    prompt: list[int]
    num_output: int
    arrival: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.num_output


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step. The default is a memory-bound decoder: 1 request costs nearly as much as 64."""

    fixed: float = 0.020
    per_token: float = 0.0001

    def step(self, num_tokens: int) -> float:
        return self.fixed + self.per_token * num_tokens


@dataclass(slots=True)
class Trace:
    """What happened. Written by: run(). `running` and `slots_*` are sums over the steps with requests left to start.

    Each is weighted with the step's duration: how a run ends says nothing about how many requests fit.
    """

    duration: float = 0.0
    num_steps: int = 0
    output_tokens: int = 0
    saturated: float = 0.0
    """Seconds with requests left to start."""
    saturated_tokens: int = 0
    """Output tokens of that time."""
    running: float = 0.0
    slots_allocated: float = 0.0
    slots_filled: float = 0.0
    peak_blocks: int = 0
    num_preemptions: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    outputs: dict[str, list[int]] = field(default_factory=dict)
    final_blocks_used: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.duration

    @property
    def mean_running(self) -> float:
        return self.running / self.saturated

    @property
    def waste(self) -> float:
        """(allocated - filled) / allocated KV slots."""
        return 1 - self.slots_filled / self.slots_allocated

    @property
    def hit_rate(self) -> float:
        return self.cache_hits / self.cache_queries


def token_at(request_id: str, position: int) -> int:
    """The stub model: depends on nothing but its arguments, so that a recomputed token must come out the same."""
    return zlib.crc32(f"{request_id}:{position}".encode()) % VOCABULARY


def run(
    jobs: Iterable[Job],
    *,
    num_blocks: int,
    block_size: int = 16,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    prefix_cache: bool = False,
    cost: CostModel | None = None,
    most_steps: int = 1_000_000,
) -> Trace:
    """Serves all jobs."""
    waiting = sorted(jobs, key=lambda job: job.arrival)[::-1]
    longest = max(job.num_tokens for job in waiting)
    manager = KVCacheManager(
        num_blocks=num_blocks,
        block_size=block_size,
        max_requests=max_num_seqs,
        max_blocks_per_request=-(-longest // block_size),
        enable_prefix_cache=prefix_cache,
    )
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, watermark=0.0)
    scheduler = Scheduler(config=config, manager=manager, max_model_len=longest)
    cost, trace, now = cost or CostModel(), Trace(), 0.0
    open_ids: set[str] = set()
    while waiting or open_ids:
        while waiting and waiting[-1].arrival <= now:
            job = waiting.pop()
            open_ids.add(job.request_id)
            scheduler.add(_request(job, now), now)
        if not open_ids:
            now = waiting[-1].arrival
            continue
        batch = scheduler.schedule(now)
        duration = cost.step(batch.num_tokens)
        has_queue = bool(waiting) or len(batch.items) < len(open_ids)
        _observe(trace, batch, manager, duration, has_queue=has_queue)
        now += duration
        output = scheduler.update(batch, _sample(batch), now)
        trace.num_preemptions += output.stats.num_preemptions
        trace.cache_queries += output.stats.prefix_cache_queries
        trace.cache_hits += output.stats.prefix_cache_hits
        trace.saturated_tokens += has_queue * sum(len(delta.token_ids) for delta in output.deltas)
        for delta in output.deltas:
            trace.outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
            trace.output_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                open_ids.discard(delta.request_id)
        if trace.num_steps > most_steps:
            raise RuntimeError(f"not done after {most_steps} steps: {len(open_ids)} open, {len(waiting)} waiting")
    scheduler.check_invariants()
    trace.final_blocks_used = manager.usage().used
    return trace


def _request(job: Job, now: float) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=job.num_output, seed=0)
    return GenerateRequest(job.request_id, job.prompt, sampling, arrival_time=now)


def _sample(batch: ScheduledBatch) -> SampledTokens:
    rows = [SampledRow(item.request_id, [token_at(item.request_id, item.end)]) for item in batch.items if item.samples]
    return SampledTokens(batch.step_id, rows, {})


def _observe(trace: Trace, batch: ScheduledBatch, manager: KVCacheManager, duration: float, *, has_queue: bool) -> None:
    used = manager.usage().used
    trace.num_steps += 1
    trace.duration += duration
    if has_queue:
        trace.saturated += duration
        trace.running += duration * len(batch.items)
        trace.slots_allocated += duration * used * manager.block_size
        trace.slots_filled += duration * sum(item.end for item in batch.items)
    trace.peak_blocks = max(trace.peak_blocks, used)


# ------------------------------------------------------------------------------------------------------------ workloads


def random_prompt(source: random.Random, length: int) -> list[int]:
    return [source.randrange(VOCABULARY) for _ in range(length)]


def chat_jobs(num: int, *, mean_input: float, mean_output: float, seed: int, longest: int = 2048) -> list[Job]:
    """Lengths like a public conversation data set's: log-normal, long tails, cut at the model's context."""
    source, spread = random.Random(seed), 1.0
    jobs = []
    for i in range(num):
        # exp(mu + s^2 / 2) is the mean of a log-normal
        prompt = round(source.lognormvariate(0, spread) / 1.6487 * mean_input)
        output = round(source.lognormvariate(0, spread) / 1.6487 * mean_output)
        prompt = min(max(prompt, 4), longest // 2)
        jobs.append(Job(f"r{i}", random_prompt(source, prompt), min(max(output, 1), longest - prompt)))
    return jobs
