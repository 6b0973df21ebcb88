"""Targets S1 to S7: what scheduling, paging and the prefix cache are worth on a running server. Ratios in one run."""

import asyncio
import json
import random
import statistics
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.launch import Launched, launched
from server.bench.client import Call, Pool, parse_target
from server.bench.load import WORDS, latencies, percentile

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """ours: what was measured, in words; value: the ratio that the target speaks of."""

    target_id: str
    claim: str
    ours: str
    target: str
    value: float
    holds: bool


class Asker:
    """Sends completions to one server. Written by: itself."""

    def __init__(self, server: Launched, seed: int) -> None:
        self._pool = Pool(parse_target(server.url))
        self._words = random.Random(seed)

    def words(self, count: int) -> list[str]:
        return self._words.choices(WORDS, k=count)

    async def ask(self, words: Sequence[str], num_tokens: int) -> Call:
        """A call of the load client; exactly num_tokens tokens are written unless it fails."""
        body = {
            "prompt": " ".join(words),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return await self._pool.post("/v1/completions", json.dumps(body).encode(), timeout_s=TIMEOUT_S)

    async def closed_loop(self, jobs: Sequence[tuple[Sequence[str], int]], num_clients: int) -> list[Call]:
        remaining = iter(jobs)

        async def client() -> list[Call]:
            return [await self.ask(words, num_tokens) for words, num_tokens in remaining]

        return [call for calls in await asyncio.gather(*(client() for _ in range(num_clients))) for call in calls]


def rate(calls: Sequence[Call]) -> float:
    """Output tokens a second. Raises RuntimeError where a call failed: a ratio over failures says nothing."""
    if failed := [call.error for call in calls if call.error is not None]:
        raise RuntimeError(f"{len(failed)} of {len(calls)} requests failed: {failed[0]}")
    return sum(call.output_tokens for call in calls) / (max(c.end for c in calls) - min(c.begin for c in calls))


def median_ttft(calls: Sequence[Call]) -> float:
    return statistics.median(latencies(call).ttft for call in calls)


def gaps(calls: Sequence[Call]) -> list[float]:
    return [gap for call in calls for gap in latencies(call).itl]


async def continuous_batching(server: Launched) -> Outcome:
    """Answers of 13 to 128 tokens (the paper's 100 to 1,024, an eighth as long), 16 at a time.

    A static batch computes its ended requests along until the last one ends (Orca's baseline). A kinder one drops them.
    """
    asker, width = Asker(server, 1), 16
    lengths = [random.Random(i).randint(13, 128) for i in range(8 * width)]
    await asker.closed_loop([(asker.words(16), 8)] * 2, 2)

    async def in_batches(*, to_the_end: bool) -> float:
        calls: list[Call] = []
        for begin in range(0, len(lengths), width):
            batch = lengths[begin : begin + width]
            computed = [max(batch)] * width if to_the_end else batch
            calls += await asker.closed_loop([(asker.words(16), n) for n in computed], width)
        return rate(calls) * sum(lengths) / sum(call.output_tokens for call in calls)

    ours = rate(await asker.closed_loop([(asker.words(16), n) for n in lengths], width))
    ratio, kind = ours / await in_batches(to_the_end=True), ours / await in_batches(to_the_end=False)
    text = f"{ratio:.2f} x ({kind:.2f} x where a static batch drops ended requests)"
    return Outcome("S1", "tokens a second, continuous against static", text, ">= 1.8 x", ratio, ratio >= 1.8)


async def paging(num_blocks: int, longest: int) -> Outcome:
    """The same memory, paged, and reserved for `longest` tokens a request; requests are a quarter as long.

    With bfloat16 weights a step is bound by reading them, as on a GPU; with 4-bit ones by computing its requests.
    """
    reserved_seqs = num_blocks * 16 // longest
    ratios = []
    for weights in (("--quantization", "none"), ()):
        rates = []
        for max_num_seqs in (64, reserved_seqs):
            flags = ("--num-blocks", str(num_blocks), "--max-num-seqs", str(max_num_seqs), "--no-prefix-cache")
            with launched(*flags, *weights) as server:
                asker = Asker(server, 2)
                await asker.ask(asker.words(16), 8)
                jobs = [(asker.words(32), 64) for _ in range(96)]
                rates.append(rate(await asker.closed_loop(jobs, 96)))
        ratios.append(rates[0] / rates[1])
    claim = f"tokens a second in {num_blocks} blocks, paged against {longest:,} tokens reserved"
    ours = f"{ratios[0]:.2f} x with bf16 weights ({ratios[1]:.2f} x with 4-bit ones)"
    return Outcome("S2", claim, ours, ">= 2 x", ratios[0], ratios[0] >= 2)


async def shared_prefix_ttft(server: Launched) -> Outcome:
    """A prompt of 256 words, seven eighths of it cached."""
    asker = Asker(server, 3)
    common = asker.words(224)
    await asker.ask([*common, *asker.words(32)], 2)
    hits = [await asker.ask([*common, *asker.words(32)], 2) for _ in range(10)]
    misses = [await asker.ask(asker.words(256), 2) for _ in range(10)]
    ratio = median_ttft(hits) / median_ttft(misses)
    return Outcome(
        "S3", "TTFT with 87.5 % of the prompt cached, of a miss", f"{ratio:.2f} x", "<= 0.3 x", ratio, ratio <= 0.3
    )


async def long_prompt(budget: int) -> Outcome:
    """Four clients decode; then a prompt of 1,500 words comes in chunks of `budget` tokens, or as fast as it can."""

    async def with_prompt(asker: Asker) -> tuple[list[float], float]:
        """The others' gaps while it was read, and how long all took."""
        streams = asker.closed_loop([(asker.words(16), 150) for _ in range(4)], 4)
        others, long = await asyncio.gather(streams, after(0.3, asker.ask(asker.words(1_500), 1)))
        disturbed = [
            later - earlier
            for call in others
            for earlier, later in zip(call.text_times, call.text_times[1:], strict=False)
            if long.begin <= earlier <= long.end
        ]
        return disturbed, max(call.end for call in [*others, long]) - min(call.begin for call in others)

    async def with_budget(tokens: int) -> tuple[float, float]:
        """(p99 of the others' gaps, of a quiet decode step; seconds for everything)"""
        with launched("--max-num-prefill-tokens", str(tokens)) as server:
            asker = Asker(server, 4)
            await asker.ask(asker.words(16), 8)
            quiet = await asker.closed_loop([(asker.words(16), 150) for _ in range(4)], 4)
            disturbed, duration = await with_prompt(asker)
        return percentile(disturbed, 99) / percentile(gaps(quiet), 50), duration

    ratio, strict_duration = await with_budget(budget)
    _, free_duration = await with_budget(2048)
    loss = 1 - free_duration / strict_duration
    claim = (
        f"p99 ITL of others while a prompt of 1,500 words is read, budget {budget}, of a decode step; throughput lost"
    )
    ours = f"{ratio:.2f} x; {loss:.0%}"
    return Outcome("S4", claim, ours, "<= 2 x; <= 10 %", ratio, ratio <= 2 and loss <= 0.1)


async def after(seconds: float, call: Awaitable[Call]) -> Call:
    await asyncio.sleep(seconds)
    return await call


async def steady_itl(server: Launched) -> Outcome:
    """Eight clients, 128 words in, 64 tokens out."""
    asker = Asker(server, 5)
    itl = gaps(await asker.closed_loop([(asker.words(128), 64) for _ in range(48)], 8))
    ratio = percentile(itl, 99) / percentile(itl, 50)
    return Outcome("S5", "p99 ITL of p50, eight clients", f"{ratio:.2f} x", "<= 3 x", ratio, ratio <= 3)


async def shared_prefix_throughput() -> Outcome:
    """341 of 400 words are the same in every prompt; 8 tokens are written."""
    rates = []
    for flags in ((), ("--no-prefix-cache",)):
        with launched(*flags) as server:
            asker = Asker(server, 6)
            common = asker.words(341)
            await asker.ask([*common, *asker.words(59)], 2)
            jobs = [([*common, *asker.words(59)], 8) for _ in range(32)]
            rates.append(rate(await asker.closed_loop(jobs, 8)))
    ratio = rates[0] / rates[1]
    claim = "tokens a second with 341 of 400 words shared, prefix cache on against off"
    return Outcome("S6", claim, f"{ratio:.2f} x", ">= 2.5 x", ratio, ratio >= 2.5)


async def overload() -> Outcome:
    """Arrivals at twice the measured capacity for half a minute; a short queue. Answers count, and 429s are clean."""
    with launched("--max-num-seqs", "8", "--max-queue", "8") as server:
        asker = Asker(server, 7)
        await asker.ask(asker.words(16), 8)
        peak = await asker.closed_loop([(asker.words(64), 32) for _ in range(48)], 8)
        capacity = rate(peak) / 32
        source, sent, tasks = random.Random(7), 0.0, []
        begin = asyncio.get_running_loop().time()
        while sent < 30.0:
            await asyncio.sleep(max(0.0, begin + sent - asyncio.get_running_loop().time()))
            tasks.append(asyncio.create_task(asker.ask(asker.words(64), 32)))
            sent += source.expovariate(2 * capacity)
        calls = await asyncio.gather(*tasks)
    good = [call for call in calls if call.error is None]
    unclean = [call.error for call in calls if call.error is not None and not call.error.startswith("HTTP 429")]
    share = rate(good) / 32 / capacity
    ours = f"{share:.0%}; {len(calls) - len(good) - len(unclean)} times 429, {len(unclean)} other failures"
    return Outcome(
        "S7",
        "goodput at twice the capacity, of the peak",
        ours,
        ">= 80 %, no other failure",
        share,
        share >= 0.8 and not unclean,
    )


async def on_default_server(*scenarios: Callable[[Launched], Awaitable[Outcome]]) -> list[Outcome]:
    with launched() as server:
        return [await scenario(server) for scenario in scenarios]


async def one(outcome: Awaitable[Outcome]) -> list[Outcome]:
    return [await outcome]


SCENARIOS: dict[str, Callable[[], Coroutine[Any, Any, list[Outcome]]]] = {
    "S1, S3, S5": lambda: on_default_server(continuous_batching, shared_prefix_ttft, steady_itl),
    "S2": lambda: one(paging(num_blocks=192, longest=512)),
    "S4": lambda: one(long_prompt(budget=16)),
    "S6": lambda: one(shared_prefix_throughput()),
    "S7": lambda: one(overload()),
}
