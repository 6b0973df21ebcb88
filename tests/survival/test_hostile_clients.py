"""A whole server against clients that mean harm, or are just slow: one server for all of them."""

import json
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import COMMAND, EXIT_LIMIT_S, START_LIMIT_S, Server, free_port, is_ready, serving

KEYS = ("sk-canary-one-4711", "sk-canary-two-é")
SECRET = "canary hello world"
LIMITS = ("--read-timeout", "1", "--write-timeout", "1", "--max-header-bytes", "8K")


@pytest.fixture(scope="module")
def server(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = [flag for key in KEYS for flag in ("--api-key", key)]
    log = tmp_path_factory.mktemp("hostile") / "log"
    with serving(log, str(gguf_file), "--num-threads", "1", *LIMITS, *keys) as running:
        yield running


def post(server: Server, key: str = KEYS[0], **body: Any) -> httpx.Response:
    headers = {"Authorization": b"Bearer " + key.encode()}
    body = {"prompt": SECRET, "max_tokens": 4, **body}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)


def request_bytes(server: Server, **body: Any) -> bytes:
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(payload) + payload


def read_to_end(sock: socket.socket) -> bytes:
    """Everything until the peer closes or resets."""
    sock.settimeout(20)
    received = b""
    try:
        while data := sock.recv(1 << 20):
            received += data
    except ConnectionError:
        pass
    return received


@pytest.mark.parametrize(
    "said", [b"", b"POST /v1/com", b"\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"]
)
def test_a_request_that_does_not_come_is_cut_off(server: Server, said: bytes) -> None:
    """Regression: connections that say nothing, or stop in the middle, and are kept for ever."""
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(said)
        read_to_end(sock)
    assert post(server).status_code == 200


def test_a_byte_at_a_time_is_cut_off(server: Server) -> None:
    """Regression: a limit on each read only, which a byte now and then satisfies for ever (slowloris)."""
    message = request_bytes(server, prompt="x")
    sent = 0
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.settimeout(0.1)
        for byte in message:
            try:
                sock.sendall(bytes([byte]))
                sent += 1
                if sock.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
    assert sent < len(message)
    assert post(server).status_code == 200


def test_a_reader_that_does_not_read_is_cut_off(server: Server) -> None:
    """Regression: an answer without a reader that holds its blocks, its buffers and the drain."""
    aborted = server.metric("request_success_total")
    body = {"prompt": "hello", "max_tokens": 480, "n": 100, "logprobs": 5, "stream": True, "ignore_eos": True}
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(request_bytes(server, **body))
        assert sock.recv(12) == b"HTTP/1.1 200"
        server.eventually("request_success_total", aborted + 100, limit_s=60)
        server.eventually("num_requests_running", 0)
        assert b"[DONE]" not in read_to_end(sock)
    assert post(server).status_code == 200


def test_endless_headers_are_refused(server: Server) -> None:
    """Regression: headers that fill the memory before anyone looks at them."""
    for head in (b"GET /livez HTTP/1.1\r\nX-Long: ", b"GET /livez?"):
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(head + b"a" * 20_000)
            answer = read_to_end(sock)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b'"error"' in answer


@pytest.mark.parametrize(("num_bytes", "status"), [(8191, 200), (8192, 200), (8193, 431)])
@pytest.mark.parametrize("where", ["header", "url"])
def test_the_limit_on_headers_is_exact(server: Server, where: str, num_bytes: int, status: int) -> None:
    """Regression: headers that came in one piece with their end got through at any size."""
    start, end = (b"GET /livez HTTP/1.1\r\nX-Long: ", b"") if where == "header" else (b"GET /livez?", b" HTTP/1.1")
    end += b"\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(start + b"a" * (num_bytes - len(start) - len(end)) + end)
        answer = read_to_end(sock)
    assert answer.startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize("length", [b"Content-Length: 17825792", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize("key", [KEYS[0], "wrong"])
@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
def test_who_sends_too_much_reads_why(server: Server, connection: bytes, key: str, length: bytes) -> None:
    """Regression: a reset in the middle of a large body, which threw the 413 away before the client had read it."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nConnection: %s\r\n%s\r\n\r\n"
    chunk = b"x" * (1 << 20)
    if b"chunked" in length:
        chunk = b"100000\r\n" + chunk + b"\r\n"
    status = 413 if key == KEYS[0] else 401
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.settimeout(20)
            sock.sendall(head % (key.encode(), connection, length))
            for _ in range(17):
                sock.sendall(chunk)
            answer = b""
            while b'"error"' not in answer:
                received = sock.recv(1 << 16)
                assert received, answer
                answer += received
        assert answer.startswith(b"HTTP/1.1 %d " % status)


def test_bytes_that_are_not_http_get_an_error_body(server: Server) -> None:
    """Regression: a plain-text 400, which clients that parse errors choke on."""
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        head, _, body = read_to_end(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["message"]


@pytest.mark.parametrize("garbage", [b"GARBAGE\r\n\r\n", b"GET /livez?" + b"a" * 20_000])
@pytest.mark.parametrize("num_requests", [1, 3])
def test_what_is_wrong_waits_for_the_answers_before_it(server: Server, garbage: bytes, num_requests: int) -> None:
    """Regression: bytes that are no request were answered first, and the request before them never."""
    message = request_bytes(server, prompt="hello", max_tokens=50, stream=True, ignore_eos=True)
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(message * num_requests + garbage)
        answer = read_to_end(sock)
    assert answer.count(b"HTTP/1.1 200 ") == answer.count(b"HTTP/1.1 ") == answer.count(b"[DONE]") == num_requests
    assert "Traceback" not in server.log.read_text()


def test_a_thousand_connections_opened_and_dropped(server: Server) -> None:
    """Regression: file descriptors that are not given back, or an accept loop that stops at its limit."""
    process = psutil.Process(server.process.pid)
    before = process.num_fds()
    message = request_bytes(server, prompt="hello", max_tokens=300, stream=True)
    for number in range(1000):
        sock = socket.create_connection(("127.0.0.1", server.port))
        if number % 3 == 0:
            sock.sendall(message[: number % len(message)])
        if number % 5 == 0:  # a reset instead of an orderly end
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    server.eventually("num_requests_running", 0)
    assert post(server).status_code == 200
    deadline = time.monotonic() + 20
    while process.num_fds() > before + 5:
        assert time.monotonic() < deadline, f"{process.num_fds()} files open, {before} before"
        server.alive(0.05)


def test_each_key_works_and_no_other(server: Server) -> None:
    """Regression: only the first key counts, or a key beyond ASCII is a 500."""
    assert [post(server, key).status_code for key in KEYS] == [200, 200]
    assert [post(server, key).status_code for key in ("x", "é", KEYS[0] + "x", KEYS[0][:-1])] == [401] * 4
    for path in ("/v1/models", "/debug/pages", "/version", "/openapi.json", "//v1/models", "/v1/models/", "/LIVEZ"):
        assert httpx.get(server.url + path).status_code == 401, path


def test_cache_salts_keep_tenants_apart(server: Server) -> None:
    """Regression: a tenant who sees by the counts (or the time) that another has sent the same prompt."""
    prompt = [5 + k % 40 for k in range(200)]

    def cached(**fields: Any) -> int:
        usage = post(server, prompt=prompt, max_tokens=1, **fields).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") >= 176
    assert cached(cache_salt="b") == 0
    assert cached() == 0
    assert cached(cache_salt="b") >= 176


def test_the_log_holds_no_prompt_and_no_key(server: Server) -> None:
    """Regression: a body, a validation message or a traceback that carries a prompt or a key into the log."""
    post(server, model=SECRET)
    post(server, max_tokens=SECRET)
    post(server, stop=[SECRET] * 100)
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    httpx.post(f"{server.url}/v1/completions", content=json.dumps({"prompt": SECRET})[:-1], headers=headers)
    text = server.log.read_text()
    assert text.count("request ") > 5
    assert "canary" not in text


def test_the_engine_does_not_get_the_keys(server: Server) -> None:
    """Regression: secrets in a process that needs none of them."""
    (engine,) = psutil.Process(server.process.pid).children()
    seen = " ".join(engine.cmdline()) + str(engine.environ())
    assert "canary" not in seen


def test_a_full_disk_for_the_log_harms_nobody(gguf_file: Path) -> None:
    """Regression: an exception of the logger's or of the start-up table's that ends a request or the server."""
    port = free_port()
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen(
            [COMMAND, "serve", str(gguf_file), "--port", str(port), "--num-threads", "1"], stdout=full, stderr=full
        )
    server = Server(process, port, Path(os.devnull))
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not is_ready(server):
            assert time.monotonic() < deadline
            server.alive(0.05)
        (engine,) = psutil.Process(process.pid).children()
        assert post(server).status_code == 200
        engine.kill()
        assert post(server).status_code == 200
        assert post(server, max_tokens=-1).status_code == 400
        assert server.terminate() == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.3, 1.0])
def test_ctrl_c_while_loading_says_nothing_bad(gguf_file: Path, tmp_path: Path, delay_s: float) -> None:
    """Regression: a terminal's Ctrl-C, which the whole process group gets, ended in tracebacks of the engine's."""
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [COMMAND, "serve", str(gguf_file), "--port", "0"], stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not psutil.Process(process.pid).children():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(delay_s)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(EXIT_LIMIT_S) == 0
        said = log.read_text()
        assert "Traceback" not in said
        assert "ERROR" not in said
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]], ids=["term", "int twice"])
def test_a_signal_while_loading_ends_it(gguf_file: Path, signals: list[signal.Signals]) -> None:
    """Regression: a start that can't be interrupted, or an engine that loads on without a server."""
    port = free_port()
    process = subprocess.Popen(
        [COMMAND, "serve", str(gguf_file), "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not (children := psutil.Process(process.pid).children()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for number in signals:
            process.send_signal(number)
        assert process.wait(EXIT_LIMIT_S) == 0
        assert psutil.wait_procs(children, timeout=EXIT_LIMIT_S)[1] == []
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_draining_refuses_and_a_second_ctrl_c_ends_at_once(gguf_file: Path, tmp_path: Path) -> None:
    """Regression: a drain that still takes requests, says ready, or can't be cut short."""
    with serving(tmp_path / "log", str(gguf_file), "--num-threads", "1", "--drain-timeout", "600") as server:
        family = psutil.Process(server.process.pid).children()
        body = {"prompt": "hello", "max_tokens": 480, "n": 128, "stream": True, "ignore_eos": True, "logprobs": 5}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGINT)
            deadline = time.monotonic() + 20
            while (readiness := httpx.get(f"{server.url}/readyz")).status_code == 200:
                assert time.monotonic() < deadline
            assert readiness.json()["phase"] == "draining"
            refused = post(server)
            assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
            assert next(lines) is not None
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(EXIT_LIMIT_S) == 0
        assert psutil.wait_procs(family, timeout=EXIT_LIMIT_S)[1] == []
