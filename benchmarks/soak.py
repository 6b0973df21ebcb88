"""Cruelty to a server, and a verdict: kills, hangs, disconnects, bad requests, overload, corrupt models.

python benchmarks/soak.py 5                          five minutes of everything at once
python benchmarks/soak.py --kills 20 --requests 200  kill -9 of the engine while streams run, also in its restarts
python benchmarks/soak.py --poison                   one request that ends the engine whenever it runs, among 50 good
python benchmarks/soak.py --disconnects 10000        clients that leave at random moments
python benchmarks/soak.py --overload                 twice the capacity for a minute
python benchmarks/soak.py --corrupt 500              broken GGUF and safetensors files

Starts its own server with the default model. Exit status 1 where a verdict is "no".
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from victim import MODEL, Answer, Victim, call, request_body, victim

from server.bench.arguments import Parser, output_file, real, whole
from server.bench.report import environment

console = Console()


class Verdicts:
    """The table at the end."""

    def __init__(self, title: str) -> None:
        self._table = Table(title=title, title_justify="left")
        for column in ("what", "measured", "wanted", "verdict"):
            self._table.add_column(column)
        self._rows: list[dict[str, Any]] = []

    def add(self, what: str, measured: object, wanted: str, good: bool | None = None) -> None:
        """good: None for what is only told."""
        verdict = "" if good is None else "yes" if good else "[bold red]no"
        self._table.add_row(what, str(measured), wanted, verdict)
        self._rows.append({"what": what, "measured": str(measured), "wanted": wanted, "good": good})

    def conclude(self, path: str | None) -> int:
        console.print(self._table)
        if path:
            Path(path).write_text(json.dumps({"environment": environment(), "metrics": self._rows}, indent=1))
        return int(any(row["good"] is False for row in self._rows))


async def add_books(verdicts: Verdicts, server: Victim, kv_before: int) -> None:
    """What must hold after anything: blocks back, every end counted once."""
    pages = await server.until_idle()
    seen = await server.metrics()
    verdicts.add("KV blocks in use", pages["used"], f"{kv_before}", pages["used"] == kv_before)
    received = int(seen["request_params_n_sum"])
    ended = int(seen["request_success_total"])
    reasons = {
        key[len("request_success_total{") : -1]: int(value)
        for key, value in seen.items()
        if key.startswith("request_success_total{") and value
    }
    verdicts.add(
        "ends counted", f"{ended} {reasons}", f"{received} admitted",
        ended == received,
    )  # fmt: skip
    verdicts.add("engine restarts", int(seen["engine_restarts_total"]), "")
    verdicts.add("requests resumed", int(seen["requests_resumed_total"]), "")


# ---------------------------------------------------------------------------------------------------------------- kills


async def kill_engines(server: Victim, num_kills: int, busy: "asyncio.Future[Any]", rng: random.Random) -> list[float]:
    """kill -9 at random moments, a third of them into the restart before; gives the times until ready again."""
    restarts: list[float] = []
    for _ in range(num_kills):
        if busy.done():
            break
        if rng.random() < 1 / 3:
            while not server.signal_engine(signal.SIGKILL):
                await asyncio.sleep(0.02)
            await asyncio.sleep(rng.uniform(0.1, 2.0))
        else:
            restarts.append(await server.kill_engine())
            await asyncio.sleep(rng.uniform(0.3, 2.0))
    return restarts


async def kills(num_kills: int, num_requests: int, flags: list[str], json_path: str | None) -> int:
    rng = random.Random(1)
    bodies = [request_body(i, rng, max_tokens=rng.randint(48, 128)) for i in range(num_requests)]
    with victim(*flags) as server:
        await server.until_ready()
        console.print(f"{num_requests} requests undisturbed ...")
        quiet = await asyncio.gather(*(call(server.port, "POST", "/v1/completions", body) for body in bodies))
        base = (await server.until_idle())["used"]
        await call(server.port, "POST", "/debug/reset_prefix_cache")
        console.print(f"the same with {num_kills} kills ...")
        begin = time.perf_counter()
        answers = asyncio.gather(*(call(server.port, "POST", "/v1/completions", body) for body in bodies))
        restarts = await kill_engines(server, num_kills, answers, rng)
        disturbed = await answers
        took = time.perf_counter() - begin
        await server.until_ready()
        verdicts = Verdicts(f"{num_requests} streams, half sampled, under kill -9")
        complete = sum(a.done and a.error is None for a in disturbed)
        same = sum(a.choices == b.choices for a, b in zip(quiet, disturbed, strict=True))
        errors = Counter(a.error for a in disturbed if a.error)
        verdicts.add("complete", complete, str(num_requests), complete == num_requests)
        verdicts.add("identical to the undisturbed run", same, str(num_requests), same == num_requests)
        verdicts.add("errors", dict(errors), "none", not errors)
        verdicts.add("took", f"{took:.0f} s", "")
        verdicts.add(
            "restart: kill to ready",
            f"median {statistics.median(restarts):.1f} s, most {max(restarts):.1f} s of {len(restarts)}",
            "<= 5 s",
            statistics.median(restarts) <= 5,
        )  # fmt: skip
        await add_books(verdicts, server, base)
    return verdicts.conclude(json_path)


# --------------------------------------------------------------------------------------------------------------- poison


async def poison(json_path: str | None) -> int:
    token = 31000
    rng = random.Random(2)
    bodies = [request_body(i, rng, max_tokens=64) for i in range(50)]
    bad = request_body(1000, rng, max_tokens=64) | {"prompt": [100, 200, token, 300]}
    with victim(faults=f"exit-on-token:{token}") as server:
        await server.until_ready()
        quiet = await asyncio.gather(*(call(server.port, "POST", "/v1/completions", body) for body in bodies))
        good = [asyncio.create_task(call(server.port, "POST", "/v1/completions", body)) for body in bodies]
        await asyncio.sleep(0.5)
        poisoned = await call(server.port, "POST", "/v1/completions", bad)
        answers = [await task for task in good]
        verdicts = Verdicts("one poisoned request among 50")
        complete = sum(a.done and a.error is None for a in answers)
        same = sum(a.choices == b.choices for a, b in zip(quiet, answers, strict=True))
        verdicts.add("good ones complete", complete, "50", complete == 50)
        verdicts.add("identical to the undisturbed run", same, "50", same == 50)
        verdicts.add("the poisoned one", poisoned.error, "a clear error", "alone" in (poisoned.error or ""))
        await server.until_ready()
        after = await call(server.port, "POST", "/v1/completions", bodies[0])
        verdicts.add("a request afterwards", after.status, "200", after.error is None)
        await add_books(verdicts, server, 0)
    return verdicts.conclude(json_path)


# ---------------------------------------------------------------------------------------------------------- disconnects


async def disconnects(number: int, json_path: str | None) -> int:
    rng = random.Random(3)
    left = answered = 0
    with victim() as server, Progress(console=console, transient=True) as progress:
        task = progress.add_task("disconnects", total=number)
        await server.until_ready()
        remaining = iter(range(number))
        rss: list[tuple[int, int]] = []

        async def client() -> None:
            nonlocal left, answered
            for index in remaining:
                body = request_body(index, rng, max_tokens=rng.choice((4, 64, 512)), stream=rng.random() < 0.7)
                body["n"] = rng.choice((1, 1, 1, 2))
                wait = rng.choice((rng.uniform(0, 0.02), rng.uniform(0, 0.3), rng.uniform(0, 2.0), rng.uniform(0, 8)))
                answer = await call(
                    server.port, "POST", "/v1/completions", body, leave_after_s=wait, reset=rng.random() < 0.5
                )
                left += not answer.done
                answered += answer.done
                progress.advance(task)
                if index % max(number // 20, 1) == 0:
                    rss.append(server.rss())

        await asyncio.gather(*(client() for _ in range(64)))
        verdicts = Verdicts(f"{number} clients that leave")
        verdicts.add("left early / answered before", f"{left} / {answered}", "")
        await add_books(verdicts, server, 0)
        add_growth(verdicts, rss)
    return verdicts.conclude(json_path)


def add_growth(verdicts: Verdicts, rss: list[tuple[int, int]], *, sides: int = 2) -> None:
    """Resident memory over the second half of the run: the first fills caches and pools."""
    for side, name in enumerate(("API process", "engine")[:sides]):
        sizes = [entry[side] / 2**20 for entry in rss if entry[side]]
        half = sizes[len(sizes) // 2 :]
        growth = half[-1] - half[0] if half else 0.0
        verdicts.add(
            f"memory of the {name}", f"{sizes[0]:.0f} -> {half[0]:.0f} -> {sizes[-1]:.0f} MiB",
            "second half: < 5 % growth", growth < 0.05 * sizes[-1],
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ overload


async def overload(seconds: float, json_path: str | None) -> int:
    rng = random.Random(4)
    bodies = [request_body(i, rng, max_tokens=64) | {"temperature": 0.0} for i in range(4000)]
    remaining = iter(bodies)
    flags = ("--max-num-seqs", "32", "--max-queue", "32")
    with victim(*flags) as server:
        await server.until_ready()

        async def ask() -> Answer:
            return await call(server.port, "POST", "/v1/completions", next(remaining))

        async def closed_loop(until: float) -> int:
            done = 0
            while time.perf_counter() < until:
                done += (await ask()).error is None
            return done

        await asyncio.gather(*(closed_loop(time.perf_counter() + 3) for _ in range(32)))
        begin = time.perf_counter()
        peak = sum(await asyncio.gather(*(closed_loop(begin + seconds / 3) for _ in range(32))))
        peak_rate = peak / (time.perf_counter() - begin)
        console.print(f"capacity: {peak_rate:.1f} requests/s; now {2 * peak_rate:.1f} for {seconds:.0f} s ...")
        begin = time.perf_counter()
        asked: list[asyncio.Task[Answer]] = []
        due = begin
        while due < begin + seconds:
            due += rng.expovariate(2 * peak_rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            asked.append(asyncio.create_task(ask()))
        answers = [await task for task in asked]
        took = time.perf_counter() - begin
        verdicts = Verdicts(f"twice the capacity for {seconds:.0f} s")
        outcomes = Counter(a.status if a.done else 0 for a in answers)
        good = [a for a in answers if a.error is None]
        verdicts.add("answers by status", dict(outcomes), "200 and 429 only", set(outcomes) <= {200, 429})
        share = len(good) / took / peak_rate
        verdicts.add("goodput / peak", f"{share:.2f}", ">= 0.80", share >= 0.8)
        gaps = sorted(b - a for answer in good for a, b in zip(answer.times, answer.times[1:], strict=False))
        p50, p99 = gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)]
        verdicts.add(
            "ITL of the admitted", f"p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms", "p99 <= 3 x p50", p99 <= 3 * p50
        )
        await add_books(verdicts, server, 0)
        idle = await idle_share(server)
        verdicts.add("CPU when idle again", f"{idle * 100:.1f} %", "< 2 %", idle < 0.02)
    return verdicts.conclude(json_path)


async def idle_share(server: Victim, seconds: float = 3.0) -> float:
    """Share of one core that both processes use while nothing is asked."""
    import psutil

    engine = server.engine()
    processes = [psutil.Process(server.process.pid)] + ([engine] if engine else [])
    begin = sum(sum(p.cpu_times()[:2]) for p in processes)
    await asyncio.sleep(seconds)
    return (sum(sum(p.cpu_times()[:2]) for p in processes) - begin) / seconds


# ---------------------------------------------------------------------------------------------------------------- soak

_BAD: list[tuple[bytes, int]] = [
    (b"{", 400),
    (b'{"model": "%s"}' % MODEL.encode(), 400),
    (b'{"model": "other", "prompt": "x"}', 404),
    (json.dumps({"model": MODEL, "prompt": "x", "max_tokens": -1}).encode(), 400),
    (json.dumps({"model": MODEL, "prompt": "x" * 200_000}).encode(), 400),
    (json.dumps({"model": MODEL, "prompt": [1 << 40]}).encode(), 400),
    (json.dumps({"model": MODEL, "prompt": "x", "structured_outputs": {"regex": "("}}).encode(), 400),
    (b"\xff\xfe" * 100, 400),
    (b"", 400),
    (b"null", 400),
    (b'{"prompt": ' + b"[" * 5000, 400),
    (b'{"prompt": "x", "temperature": "hot"}', 400),
    (b'{"prompt": "x", "n": 100000}', 400),
]


Choices = dict[int, tuple[str, str | None, Any]]


def same(a: Choices, b: Choices) -> bool:
    """Text and reasons to the letter, log-probabilities to a thousandth."""
    if {i: choice[:2] for i, choice in a.items()} != {i: choice[:2] for i, choice in b.items()}:
        return False
    scores = [(x, y) for i in a for x, y in zip(a[i][2], b[i][2], strict=False)]
    return all(len(a[i][2]) == len(b[i][2]) for i in a) and all(x == y or abs(x - y) <= 2e-3 for x, y in scores)


def soak_bodies(rng: random.Random) -> list[dict[str, Any]]:
    bodies = [request_body(i, rng, max_tokens=rng.randint(8, 96), stream=i % 3 > 0) for i in range(32)]
    for body in bodies[:6]:
        body["n"] = 2
    for body in bodies[6:12]:
        body["logprobs"] = 3
    for body in bodies[12:16]:
        body |= {"structured_outputs": {"regex": "[a-z]{5,60}"}, "ignore_eos": False}
    return bodies


async def soak(minutes: float, dtype: str, json_path: str | None) -> int:
    rng = random.Random(5)
    bodies = soak_bodies(rng)
    outcomes: Counter[str] = Counter()
    restarts: list[float] = []
    rss: list[tuple[int, int]] = []
    differences: list[str] = []
    with victim("--step-timeout", "5", "--dtype", dtype) as server:
        await server.until_ready()
        num_files = server.num_files()
        quiet = [(await call(server.port, "POST", "/v1/completions", body)).choices for body in bodies]
        end = time.perf_counter() + minutes * 60

        async def client() -> None:
            while time.perf_counter() < end:
                dice = rng.random()
                if dice < 0.15:
                    bad, status = rng.choice(_BAD)
                    answer = await call(server.port, "POST", "/v1/completions", bad)
                    outcomes["bad, refused" if answer.status == status else f"bad, got {answer.status}"] += 1
                    continue
                index = rng.randrange(len(bodies))
                leave = rng.uniform(0, 2) if dice < 0.4 else None
                answer = await call(
                    server.port, "POST", "/v1/completions", bodies[index], leave_after_s=leave, reset=dice < 0.3
                )
                if not answer.done and leave is not None:
                    outcomes["left"] += 1
                elif answer.error is not None:
                    outcomes[f"error: {answer.error[:80]}"] += 1
                elif same(answer.choices, quiet[index]):
                    outcomes["identical"] += 1
                else:
                    outcomes["different"] += 1
                    differences.append(f"{bodies[index]}: {answer.choices}, undisturbed {quiet[index]}")

        async def chaos() -> None:
            while time.perf_counter() < end - 15:
                await asyncio.sleep(rng.uniform(4, 12))
                number = signal.SIGKILL if rng.random() < 0.75 else signal.SIGSTOP
                if number == signal.SIGKILL:
                    restarts.append(await server.kill_engine())
                else:
                    server.signal_engine(number)
                outcomes[number.name] += 1

        async def slow_reader() -> None:
            """A byte now and then, then gone."""
            while time.perf_counter() < end:
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                payload = json.dumps(bodies[1]).encode()
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(payload))
                writer.write(payload)
                for _ in range(20):
                    await reader.read(1)
                    await asyncio.sleep(0.2)
                writer.transport.abort()
                outcomes["slow readers"] += 1

        async def knockers() -> None:
            """Fifty connections that say nothing, or half a request, and leave."""
            while time.perf_counter() < end:
                opened = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(50)]
                for _, writer in opened[::2]:
                    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
                await asyncio.sleep(1)
                for _, writer in opened:
                    writer.transport.abort()
                outcomes["connections dropped"] += len(opened)
                await asyncio.sleep(4)

        async def watch() -> None:
            with Progress(console=console, transient=True) as progress:
                task = progress.add_task("soaking", total=minutes * 60)
                while (left := end - time.perf_counter()) > 0:
                    progress.update(task, completed=minutes * 60 - left)
                    rss.append(server.rss())
                    await asyncio.sleep(2)

        await asyncio.gather(watch(), chaos(), slow_reader(), knockers(), *(client() for _ in range(24)))
        await server.until_ready()
        verdicts = Verdicts(f"{minutes:g} minutes of everything")
        for name, count in sorted(outcomes.items()):
            wrong = name.startswith(("error", "different", "bad, got"))
            verdicts.add(name, count, "0" if wrong else "", not wrong if wrong else None)
        if restarts:
            verdicts.add(
                "restart after kill -9", f"median {statistics.median(restarts):.1f} s, most {max(restarts):.1f} s", ""
            )
        await add_books(verdicts, server, 0)
        verdicts.add("open files", f"{num_files} -> {server.num_files()}", "+ 10", server.num_files() <= num_files + 10)
        add_growth(verdicts, rss, sides=1)  # engines come and go
    for difference in differences[:3]:
        console.print(difference, markup=False)
    return verdicts.conclude(json_path)


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=real(0.1), nargs="?", help="of everything at once")
    parser.add_argument("--minutes", type=real(0.1), dest="also_minutes", help="the same")
    parser.add_argument("--kills", type=whole(1), metavar="N")
    parser.add_argument("--requests", type=whole(1), default=200, metavar="N", help="for --kills [%(default)s]")
    parser.add_argument("--poison", action="store_true")
    parser.add_argument("--disconnects", type=whole(1), metavar="N")
    parser.add_argument("--overload", action="store_true")
    parser.add_argument("--seconds", type=real(1), default=60.0, help="for --overload [%(default)s]")
    parser.add_argument("--corrupt", type=whole(1), metavar="N")
    parser.add_argument(
        "--dtype", default="float32", help="of the soak and --kills; with another, answers may depend on their company"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the verdicts there, too")
    chosen = parser.parse_args()
    if chosen.corrupt:
        from corrupt import run

        return run(chosen.corrupt, Verdicts(f"{chosen.corrupt} broken model files"), chosen.json)
    if chosen.kills:
        return asyncio.run(kills(chosen.kills, chosen.requests, ["--dtype", chosen.dtype], chosen.json))
    if chosen.poison:
        return asyncio.run(poison(chosen.json))
    if chosen.disconnects:
        return asyncio.run(disconnects(chosen.disconnects, chosen.json))
    if chosen.overload:
        return asyncio.run(overload(chosen.seconds, chosen.json))
    minutes = chosen.minutes or chosen.also_minutes
    if not minutes:
        parser.error("say for how many minutes, or choose a mode")
    return asyncio.run(soak(minutes, chosen.dtype, chosen.json))


if __name__ == "__main__":
    sys.exit(main())
