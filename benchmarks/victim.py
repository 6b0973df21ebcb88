"""A server of one's own to be cruel to, and a client that can leave at any moment."""

import asyncio
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.launch import free_port, running

MODEL = "SmolLM2-135M-Instruct"
_START_LIMIT_S = 180.0
_WITH_FAULTS = """
import dataclasses, sys
from server import config, serve
flags = dict(flag.split("=", 1) for flag in sys.argv[2:])
loaded = config.load(flags)
engine = dataclasses.replace(loaded.engine, faults=sys.argv[1])
sys.exit(serve.run(dataclasses.replace(loaded, engine=engine)))
"""


class Victim:
    """A running server. Ends its processes only through the ids it got when it started them."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.log = log

    def engine(self) -> psutil.Process | None:
        """The engine process that serves or loads now; None between two."""
        children = psutil.Process(self.process.pid).children()
        engines = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
        return max(engines, key=lambda child: child.create_time(), default=None)

    def signal_engine(self, number: int) -> bool:
        engine = self.engine()
        if engine is None:
            return False
        os.kill(engine.pid, number)
        return True

    def rss(self) -> tuple[int, int]:
        """Resident bytes of (the API process, the engine)."""
        engine = self.engine()
        return psutil.Process(self.process.pid).memory_info().rss, engine.memory_info().rss if engine else 0

    def num_files(self) -> int:
        """Open files and connections of the API process."""
        return psutil.Process(self.process.pid).num_fds()

    async def get(self, path: str) -> tuple[int, bytes]:
        answer = await call(self.port, "GET", path)
        return answer.status, answer.body

    async def metrics(self) -> dict[str, float]:
        """Series without buckets, summed over their labels; and name{reason} for those with a reason."""
        text = (await self.get("/metrics"))[1].decode()
        found: dict[str, float] = {}
        for name, labels, value in re.findall(r"^pageturner:(\w+)(?:\{([^}]*)\})? (\S+)$", text, re.MULTILINE):
            if name.endswith("_bucket"):
                continue
            found[name] = found.get(name, 0.0) + float(value)
            if reason := re.search(r'reason="(\w+)"', labels):
                found[f"{name}{{{reason[1]}}}"] = float(value)
        return found

    async def until_ready(self, limit_s: float = _START_LIMIT_S) -> float:
        """Seconds until /readyz said 200."""
        begin = time.perf_counter()
        while time.perf_counter() - begin < limit_s:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.log.read_text()[-3000:]}")
            try:
                if (await self.get("/readyz"))[0] == 200:
                    return time.perf_counter() - begin
            except OSError:
                pass
            await asyncio.sleep(0.02)
        raise RuntimeError(f"not ready after {limit_s:.0f} s:\n{self.log.read_text()[-3000:]}")

    async def kill_engine(self) -> float:
        """kill -9; seconds until a new engine serves."""
        seen = await self._num_restarts()
        while not self.signal_engine(signal.SIGKILL):
            await asyncio.sleep(0.02)
        begin = time.perf_counter()
        while await self._num_restarts() <= seen:
            await asyncio.sleep(0.02)
        await self.until_ready()
        return time.perf_counter() - begin

    async def _num_restarts(self) -> int:
        return int(json.loads((await self.get("/readyz"))[1])["num_restarts"])

    async def until_idle(self, limit_s: float = 60.0) -> dict[str, Any]:
        """The page map, once no request is open. Asking for it makes the engine check its own books."""
        begin = time.perf_counter()
        while True:
            requests = json.loads((await self.get("/debug/requests"))[1])
            pages: dict[str, Any] = json.loads((await self.get("/debug/pages"))[1])
            if requests == [] or time.perf_counter() - begin > limit_s:
                return pages
            await asyncio.sleep(0.05)


@contextmanager
def victim(*flags: str, faults: str = "") -> Iterator[Victim]:
    """flags: as for `pageturner serve`; with faults, `engine.cache.num_blocks=256` and the like instead."""
    port = free_port()
    if faults:
        command = [sys.executable, "-c", _WITH_FAULTS, faults, f"api.port={port}", *flags]
    else:
        command = [sys.executable, "-m", "server.cli", "serve", "--port", str(port), *flags]
    with running(command) as (process, log):
        yield Victim(process, port, log)


@dataclasses.dataclass(slots=True)
class Answer:
    """status 0: the client left before there was one. events: of a stream, decoded; body: of anything else."""

    status: int = 0
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    body: bytes = b""
    done: bool = False
    """The whole answer is here, its end included."""
    times: list[float] = dataclasses.field(default_factory=list)
    """When each event came, time.perf_counter()."""

    @property
    def error(self) -> str | None:
        for event in self.events:
            if "error" in event:
                return str(event["error"]["message"])
        if self.status not in (0, 200):
            return self.body.decode(errors="replace")[:300]
        return None if self.done else "the connection ended early"

    @property
    def choices(self) -> dict[int, tuple[str, str | None, Any]]:
        """index -> (text, finish reason, log-probabilities), streamed or not."""
        parts = self.events if self.events else ([json.loads(self.body)] if self.body else [])
        found: dict[int, tuple[str, str | None, Any]] = {}
        for part in parts:
            for choice in part.get("choices", ()):
                text, reason, scores = found.get(choice["index"], ("", None, []))
                more = (choice.get("logprobs") or {}).get("token_logprobs") or []
                scores = scores + [None if s is None else round(s, 3) for s in more]
                found[choice["index"]] = (text + choice["text"], choice["finish_reason"] or reason, scores)
        return found


async def call(
    port: int, method: str, path: str, body: Any = None, *, leave_after_s: float | None = None, reset: bool = False
) -> Answer:
    """One request on a connection of its own.

    body: JSON-able, or bytes as they are. leave_after_s: hang up then, by a reset or in good order. Raises OSError
    where nobody listens.
    """
    answer = Answer()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    payload = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + payload)
    try:
        async with asyncio.timeout(leave_after_s):
            await _read(reader, answer)
    except (TimeoutError, ConnectionError):
        pass
    finally:
        if reset:
            writer.transport.abort()
        else:
            writer.close()
    return answer


async def _read(reader: asyncio.StreamReader, answer: Answer) -> None:
    status_line = await reader.readline()
    if not status_line:
        return
    status = int(status_line.split()[1])
    length = None
    while (line := await reader.readline()) not in (b"\r\n", b""):
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    answer.status = status
    if length is not None:
        answer.body = await reader.readexactly(length) if length else b""
        answer.done = True
        return
    while line := await reader.readline():  # an event is one chunk, so the chunks' sizes are lines of their own
        if line == b"data: [DONE]\n":
            answer.done = True
        elif line.startswith(b"data: "):
            answer.times.append(time.perf_counter())
            answer.events.append(json.loads(line[6:]))


def request_body(index: int, rng: random.Random, *, max_tokens: int, stream: bool = True) -> dict[str, Any]:
    """Every other one is sampled, with a seed."""
    words = ("river", "lamp", "seven", "green", "door", "music", "paper", "cloud", "stone", "bread")
    return {
        "model": MODEL,
        "prompt": f"{index}: " + " ".join(rng.choices(words, k=rng.randint(3, 60))),
        "max_tokens": max_tokens,
        "temperature": 0.0 if index % 2 else 0.9,
        "seed": index,
        "stream": stream,
        "ignore_eos": True,
    }
