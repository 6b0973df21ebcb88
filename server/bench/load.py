"""Workloads (what is asked, when) and the figures drawn from the answers."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import msgspec

from server.bench.client import Call, Pool

_WORD_LIST = """
amber anchor apple arrow autumn badge bamboo basin beacon birch blanket border bottle branch bridge bucket candle
canyon carpet castle cedar chapter circle cliff clover coast comet copper corner cotton cradle crystal current dawn
delta desert dragon drawer eagle echo ember engine fabric falcon feather fiddle field flame forest fossil fountain
garden garnet glacier granite gravel hammer harbor harvest hazel helmet hollow honey horizon island ivory jacket
jasmine jungle kettle kitchen ladder lagoon lantern lemon library linen lotus magnet maple marble meadow mirror
morning mountain needle north oasis ocean olive orange orchard otter paddle palace paper pearl pebble pepper pillow
planet pocket pollen prairie quarry quartz rabbit rain raven ribbon river rocket saddle sailor salmon sand shadow
shelter signal silver simple spider spring square station stone summer sunset table temple thunder timber tower
trail tunnel valley velvet violin walnut water willow window winter yellow zebra
"""
WORDS = tuple(_WORD_LIST.split())


class Workload(msgspec.Struct, frozen=True):
    """What each request asks. Prompts of one seed are the same in every run, and all different within it."""

    endpoint: str = "completions"
    """"completions" or "chat"."""
    prompt_words: int = 128
    shared_words: int = 0
    """How many of them every request begins with."""
    max_tokens: int = 64
    temperature: float = 0.0
    extensions: bool = True
    """Send ignore_eos and the like, so that each answer has max_tokens tokens; else leave what OpenAI doesn't know."""
    seed: str = "0"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def reseeded(self, part: str) -> "Workload":
        """The same kind of work with other prompts, so that one level's prefixes don't serve the next."""
        return msgspec.structs.replace(self, seed=f"{self.seed}.{part}")

    def bodies(self, model: str) -> Iterator[bytes]:
        """Request bodies without end."""
        words = random.Random(self.seed)
        shared = words.choices(WORDS, k=self.shared_words)
        while True:
            prompt = " ".join([*shared, *words.choices(WORDS, k=self.prompt_words - self.shared_words)])
            body: dict[str, Any] = {
                "model": model,
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            if self.endpoint == "chat":
                body["messages"] = [{"role": "user", "content": prompt}]
            else:
                body["prompt"] = prompt
            if self.extensions:
                body |= {"ignore_eos": True, "skip_special_tokens": False}
            yield json.dumps(body).encode()


Send = Callable[[], Coroutine[Any, Any, None]]


async def closed_loop(send: Send, *, num_requests: int, num_clients: int) -> None:
    """num_clients users, each of whom asks again as soon as the answer is complete."""
    remaining = iter(range(num_requests))

    async def client() -> None:
        for _ in remaining:
            await send()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(num_clients, num_requests)):
            group.create_task(client())


async def poisson(send: Send, *, num_requests: int, rate: float, seed: str) -> None:
    """Requests at random moments, `rate` a second on average, whether or not the server keeps up."""
    gaps = random.Random(seed)
    async with asyncio.TaskGroup() as group:
        due = time.perf_counter()
        for _ in range(num_requests):
            due += gaps.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(send())


async def run(
    pool: Pool,
    workload: Workload,
    *,
    model: str,
    num_requests: int,
    num_clients: int | None,
    rate: float | None,
    timeout_s: float,
    on_done: Callable[[Call], None],
) -> list[Call]:
    """Puts one level of load on the server: a closed loop of num_clients, or Poisson arrivals at `rate`."""
    bodies = workload.bodies(model)
    calls: list[Call] = []

    async def send() -> None:
        call = await pool.post(workload.path, next(bodies), timeout_s=timeout_s)
        calls.append(call)
        on_done(call)

    if rate is not None:
        await poisson(send, num_requests=num_requests, rate=rate, seed=workload.seed)
    else:
        await closed_loop(send, num_requests=num_requests, num_clients=num_clients or 1)
    return calls


# -------------------------------------------------------------------------------------------------------------- figures


def percentile(values: Sequence[float], q: float) -> float:
    """Linear between neighbours, as numpy's default; NaN of nothing. q in 0..100."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds."""
    milliseconds = [s * 1e3 for s in seconds]
    mean = sum(milliseconds) / len(milliseconds) if milliseconds else float("nan")
    return {"mean": mean} | {f"p{q}": percentile(milliseconds, q) for q in (50, 90, 95, 99)}


class Latencies(msgspec.Struct, frozen=True):
    """One answered request. Seconds.

    ttft: first text. tpot: mean time a token after the first. e2el: the whole answer. itl: gaps between text events
    (one event may carry several tokens where the client or the server lagged).
    """

    ttft: float
    tpot: float
    e2el: float
    itl: list[float]


def latencies(call: Call) -> Latencies:
    first = call.text_times[0]
    return Latencies(
        ttft=first - call.begin,
        tpot=(call.end - first) / max(1, call.output_tokens - 1),
        e2el=call.end - call.begin,
        itl=[b - a for a, b in zip(call.text_times, call.text_times[1:], strict=False)],
    )


def summarize(calls: Sequence[Call], limits_ms: dict[str, float]) -> dict[str, Any]:
    """The figures of one level. limits_ms: {"ttft": 500, "tpot": 50}: what goodput demands of a request."""
    good = [call for call in calls if call.error is None]
    seen = [latencies(call) for call in good]
    duration = max(c.end for c in calls) - min(c.begin for c in calls) if calls else float("nan")
    output_tokens = sum(c.output_tokens for c in good)
    within = sum(all(getattr(one, name) * 1e3 <= limit for name, limit in limits_ms.items()) for one in seen)
    return {
        "duration_s": duration,
        "completed": len(good),
        "failed": len(calls) - len(good),
        "failures": dict(Counter(c.error for c in calls if c.error is not None).most_common(10)),
        "prompt_tokens": sum(c.prompt_tokens for c in good),
        "output_tokens": output_tokens,
        "requests_per_s": len(good) / duration,
        "output_tokens_per_s": output_tokens / duration,
        "total_tokens_per_s": (output_tokens + sum(c.prompt_tokens for c in good)) / duration,
        "goodput_per_s": within / duration if limits_ms else None,
        "ttft_ms": spread([one.ttft for one in seen]),
        "tpot_ms": spread([one.tpot for one in seen]),
        "itl_ms": spread([gap for one in seen for gap in one.itl]),
        "e2el_ms": spread([one.e2el for one in seen]),
    }
