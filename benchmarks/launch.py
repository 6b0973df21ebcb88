"""A server of our own for the length of a benchmark."""

import http.client
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_LIMIT_S = 300.0
END_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Launched:
    """A ready server. process: the API process; the engine is its child."""

    process: subprocess.Popen[bytes]
    port: int
    start_s: float
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body. Raises OSError where nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """One series of /metrics, summed over its labels; 0 where it doesn't exist."""
        total = 0.0
        for line in self.get("/metrics")[1].decode().splitlines():
            series, _, value = line.rpartition(" ")
            if series.split("{")[0] == f"pageturner:{name}":
                total += float(value)
        return total


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def running(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The command's process and the log it writes. Ended afterwards: by SIGTERM, and by force where that takes long."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield process, log
        finally:
            process.terminate()
            try:
                process.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def launched(*flags: str) -> Iterator[Launched]:
    """`pageturner serve` with these flags. Raises RuntimeError, with the log's end, where it doesn't become ready."""
    port = free_port()
    begin = time.perf_counter()
    with running([sys.executable, "-m", "server", "serve", "--port", str(port), *flags]) as (process, log):
        _wait_ready(process, port, log)
        yield Launched(process, port, time.perf_counter() - begin, log)


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    server = Launched(process, port, 0.0, log)
    while True:
        try:
            if server.get("/readyz")[0] == 200:
                return
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not become ready:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.05)
