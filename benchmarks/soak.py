"""Minutes of everything that goes wrong in production at once, and a verdict table.

    python benchmarks/soak.py [--minutes 5] [--json FILE]

Streams whose right answers are known run all the while. Meanwhile the engine is killed and stopped, clients hang up,
read slowly, send nonsense, or open connections and leave. In the end every stream must have got its whole answer, every
end must have been counted once, and blocks, memory, connections and processes must be back where they were.
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.launch import Launched, launched
from server.bench.load import WORDS
from server.bench.report import Report, environment

NUM_STREAMS, NUM_LEAVERS = 8, 4
NUM_QUESTIONS = 12
DISTURBANCE_S = 15.0
STEP_TIMEOUT_S = 8
SETTLE_S = 60.0
CALL_LIMIT_S = 180.0


class Soak:
    """One run. Written by: its own tasks, all on one event loop."""

    def __init__(self, server: Launched, seed: int) -> None:
        self.server = server
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.done = False
        self._random = random.Random(seed)
        self._questions = [self._question(i) for i in range(NUM_QUESTIONS)]
        self._answers: list[str] = []

    def _question(self, i: int) -> dict[str, Any]:
        """Half of them greedy, half sampled with a seed; an answer must not depend on what else happens."""
        return {
            "prompt": " ".join(self._random.choices(WORDS, k=20 + 10 * i)),
            "max_tokens": 24 + 4 * i,
            "temperature": 0.0 if i % 2 else 1.0,
            "seed": i,
            "ignore_eos": True,
            "stream": True,
        }

    # ------------------------------------------------------------------------------------------------------ one request

    async def open(self, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: soak\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        return reader, writer

    async def ask(self, question: dict[str, Any]) -> str:
        """The whole text of a stream. Raises RuntimeError where the server fails it."""
        reader, writer = await self.open(json.dumps(question).encode())
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                raw = await reader.read()
        finally:
            writer.close()
        if not raw.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(raw[:300].decode(errors="replace"))
        events = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")]
        if not raw.rstrip().endswith(b"0") or b"data: [DONE]" not in raw:
            raise RuntimeError("the stream has no end")
        if errors := [event["error"] for event in events if "error" in event]:
            raise RuntimeError(str(errors[0])[:300])
        return "".join(choice["text"] for event in events for choice in event["choices"])

    async def learn(self) -> None:
        """The right answers, asked one by one of an undisturbed server."""
        self._answers = [await self.ask(question) for question in self._questions]

    # ----------------------------------------------------------------------------------------------------- what goes on

    async def streams(self) -> None:
        while not self.done:
            i = self._random.randrange(NUM_QUESTIONS)
            try:
                text = await self.ask(self._questions[i])
            except (RuntimeError, OSError, TimeoutError) as error:
                self.counts["streams failed"] += 1
                self.wrong.append(f"question {i}: {type(error).__name__}: {error}")
                continue
            self.counts["streams complete"] += 1
            if text != self._answers[i]:
                self.counts["streams wrong"] += 1
                self.wrong.append(f"question {i}: {text[:80]!r}, expected {self._answers[i][:80]!r}")

    async def leavers(self) -> None:
        """Hang up at a random moment: before the answer, in its middle, sometimes after it."""
        while not self.done:
            reader, writer = await self.open(json.dumps(self._question(self._random.randrange(NUM_QUESTIONS))).encode())
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(self._random.uniform(0, 3)):
                    await reader.read()
            writer.transport.abort()
            self.counts["clients that left"] += 1

    async def slow_reader(self) -> None:
        """A byte at a time for a while, then gone."""
        while not self.done:
            reader, writer = await self.open(json.dumps(self._question(NUM_QUESTIONS - 1)).encode())
            for _ in range(20):
                if self.done or not await reader.read(1):
                    break
                await asyncio.sleep(0.5)
            writer.transport.abort()
            self.counts["slow readers"] += 1

    async def nonsense(self) -> None:
        """Whatever it is, the answer is a 4xx."""
        samples: list[bytes] = [
            b"", b"{", b"[]", b"null", b'{"prompt": 3.5}', b'{"prompt": "x", "temperature": "hot"}', b"\xff\xfe\x00",
            b'{"prompt": "x", "max_tokens": -5}', b'{"prompt": "x", "n": 100000}', b'{"prompt": ' + b"[" * 5000,
            b'{"prompt": "x", "stop": [1, 2]}', b'{"prompt": [[999999999]]}', b'{"prompt": "", "logit_bias": {"a": 1}}',
        ]  # fmt: skip
        while not self.done:
            reader, writer = await self.open(self._random.choice(samples))
            with contextlib.suppress(OSError):
                status = (await reader.read(13))[9:12]
                self.counts["nonsense refused" if status.startswith(b"4") else f"nonsense: {status!r}"] += 1
            writer.close()
            await asyncio.sleep(0.2)

    async def knockers(self) -> None:
        """Fifty connections that say nothing, or half a request, and leave."""
        while not self.done:
            opened = [await asyncio.open_connection("127.0.0.1", self.server.port) for _ in range(50)]
            for i, (_, writer) in enumerate(opened):
                if i % 2:
                    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: soak\r\nContent-Length: 500\r\n\r\n{")
            await asyncio.sleep(1)
            for _, writer in opened:
                writer.transport.abort()
            self.counts["connections dropped"] += len(opened)
            await asyncio.sleep(4)

    async def killer(self) -> None:
        """Ends the engine process; every third time it only stops it, so that the silence must be noticed."""
        for i in range(1, 1_000_000):
            await asyncio.sleep(DISTURBANCE_S * self._random.uniform(0.5, 1.5))
            if self.done:
                return
            for child in psutil.Process(self.server.process.pid).children():
                if "server.engine.process" in child.cmdline():
                    child.send_signal(signal.SIGSTOP if i % 3 == 0 else signal.SIGKILL)
                    self.counts["engines stopped" if i % 3 == 0 else "engines killed"] += 1

    async def run(self, seconds: float, on_tick: Callable[[float], None]) -> None:
        """All of it for so long, then until the streams that have begun are complete."""
        tasks: list[Awaitable[None]] = [self.streams() for _ in range(NUM_STREAMS)]
        tasks += [self.leavers() for _ in range(NUM_LEAVERS)]
        tasks += [self.slow_reader(), self.nonsense(), self.knockers(), self.killer(), self._clock(seconds, on_tick)]
        await asyncio.gather(*tasks)

    async def _clock(self, seconds: float, on_tick: Callable[[float], None]) -> None:
        begin = time.monotonic()
        while (elapsed := time.monotonic() - begin) < seconds:
            on_tick(elapsed)
            await asyncio.sleep(0.5)
        self.done = True


# ------------------------------------------------------------------------------------------------------------ verdict


def family(server: Launched) -> list[psutil.Process]:
    process = psutil.Process(server.process.pid)
    return [process, *process.children(recursive=True)]


def memory_mib(server: Launched) -> float:
    """Resident memory of all processes."""
    return sum(float(process.memory_info().rss) for process in family(server)) / (1 << 20)


def settle(server: Launched) -> bool:
    """Waits until nothing runs or waits any more."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        ready = server.get("/readyz")[0] == 200
        if ready and not server.metric("num_requests_running") + server.metric("num_requests_waiting"):
            return True
        time.sleep(0.2)
    return False


Row = tuple[str, str, str, bool]
"""(what, seen, wanted, whether it holds)."""


def verdict(soak: Soak, server: Launched, *, settled: bool, memory_before: float, files_before: int) -> list[Row]:
    counts = soak.counts
    ends, begun = server.metric("request_success_total"), server.metric("request_params_n_sum")
    memory, files = memory_mib(server), psutil.Process(server.process.pid).num_fds()
    unrefused = {name: n for name, n in counts.items() if name.startswith("nonsense:")}
    disturbed = counts["engines killed"] + counts["engines stopped"]
    restarts = server.metric("engine_restarts_total")
    return [
        ("streams complete", str(counts["streams complete"]), "> 0", counts["streams complete"] > 0),
        ("streams failed", str(counts["streams failed"]), "0", counts["streams failed"] == 0),
        ("streams with another text", str(counts["streams wrong"]), "0", counts["streams wrong"] == 0),
        ("engines killed or stopped", str(disturbed), "> 0", disturbed > 0),
        ("engines replaced", f"{restarts:.0f}", f"1 to {disturbed}", 0 < restarts <= disturbed),
        ("nonsense that wasn't a 4xx", str(unrefused or 0), "0", not unrefused),
        ("idle again", str(settled), "True", settled),
        (
            "KV blocks in use",
            f"{server.metric('kv_cache_usage_perc'):.3f}",
            "0",
            server.metric("kv_cache_usage_perc") == 0,
        ),
        ("ends counted, of sequences begun", f"{ends:.0f} of {begun:.0f}", "equal", ends == begun),
        ("memory, MiB", f"{memory_before:.0f} -> {memory:.0f}", "<= 1.25 x", memory <= 1.25 * memory_before),
        ("open files", f"{files_before} -> {files}", "<= + 10", files <= files_before + 10),
    ]


def main() -> int:
    """0 where everything holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="[%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="[%(default)s]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole result")
    args = parser.parse_args()
    report = Report(title="Soak", environment=environment(), config={"minutes": args.minutes, "seed": args.seed})
    with launched("--dtype", "float32", "--step-timeout", str(STEP_TIMEOUT_S)) as server:
        soak = Soak(server, args.seed)
        asyncio.run(soak.learn())
        memory_before, files_before = memory_mib(server), psutil.Process(server.process.pid).num_fds()
        columns = (TextColumn("soak"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("", total=args.minutes * 60)
            asyncio.run(soak.run(args.minutes * 60, lambda elapsed: progress.update(task, completed=elapsed)))
        settled = settle(server)
        rows = verdict(soak, server, settled=settled, memory_before=memory_before, files_before=files_before)
        processes = family(server)
    left = [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    rows.append(("processes left behind", str(len(left)), "0", not left))
    report.show_table(["what", "seen", "wanted", "verdict"], [[*r[:3], "holds" if r[3] else "BROKEN"] for r in rows])
    report.show_environment()
    for line in soak.wrong[:10]:
        Console(stderr=True).print(line, markup=False)
    report.metrics = dict(soak.counts) | {"holds": {row[0]: row[3] for row in rows}}
    report.raw = soak.wrong
    if args.json:
        report.write_json(args.json)
    return 0 if all(row[3] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
