"""The load generator against a scripted HTTP server: what it reports is what happened."""

import asyncio
import json
import math
import threading

import pytest

from server.bench import load, serve
from server.bench.client import Call, Pool, parse_target


def event(payload: dict) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def answer(*texts: str, usage: int | None = None) -> bytes:
    events = [event({"choices": [{"text": text, "finish_reason": None}]}) for text in texts]
    events.append(event({"choices": [{"text": "", "finish_reason": "length"}]}))
    if usage is not None:
        events.append(event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": usage}}))
    return b"".join([*events, b"data: [DONE]\n\n"])


HANG_UP = b"<the server closes the connection here>"


def http(body: bytes, *, status: str = "200 OK", chunk: int = 0) -> bytes:
    """A response; chunk > 0 sends the body in HTTP chunks of so many bytes."""
    if not chunk:
        return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    parts = [body[i : i + chunk] for i in range(0, len(body), chunk)]
    framed = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts)
    return f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + framed + b"0\r\n\r\n"


MODELS = http(json.dumps({"data": [{"id": "scripted"}]}).encode())


class Scripted:
    """Answers POSTs with the given bytes, in turn; None closes the connection. Written by: its own loop."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)
        self.bodies: list[dict] = []
        self.num_connections = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(h.split(":")[1]) for h in head.splitlines() if h.startswith("Content-Length")), 0)
                if head.startswith("GET"):
                    writer.write(MODELS)
                    continue
                self.bodies.append(json.loads(await reader.readexactly(length)))
                reply = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if reply is None:
                    break
                writer.write(reply.removesuffix(HANG_UP))
                if reply.endswith(HANG_UP):
                    break
        except (asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def __aenter__(self) -> str:
        self.server = await asyncio.start_server(self.handle, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *exc: object) -> None:
        self.server.close()


def post(*answers: bytes | None, times: int = 1, timeout_s: float = 30.0) -> tuple[list[Call], Scripted]:
    scripted = Scripted(*answers)

    async def main() -> list[Call]:
        async with scripted as url:
            pool = Pool(parse_target(url))
            calls = [await pool.post("/v1/completions", b"{}", timeout_s=timeout_s) for _ in range(times)]
            pool.close()
            return calls

    return asyncio.run(main()), scripted


@pytest.mark.parametrize("chunk", [0, 1, 7, 64, 4096])
def test_events_are_counted_however_the_bytes_are_cut(chunk):
    """An event split between two reads or two HTTP chunks is lost or counted twice."""
    [call], _ = post(http(answer("a", "b", "", "c", usage=4), chunk=chunk))
    assert call.error is None
    assert len(call.text_times) == 3
    assert (call.prompt_tokens, call.output_tokens) == (7, 4)
    assert call.begin <= call.text_times[0] <= call.text_times[-1] <= call.end


def test_chat_deltas_and_crlf_events_count():
    """The role chunk counts as the first token, or CRLF between events hides all of them."""
    chunks = [{"role": "assistant", "content": ""}, {"content": "x"}, {"content": "y"}]
    body = b"".join(event({"choices": [{"delta": delta}]}) for delta in chunks).replace(b"\n", b"\r\n")
    [call], _ = post(http(body, chunk=50))
    assert len(call.text_times) == call.output_tokens == 2


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (http(b'{"error": "queue full"}', status="429 Too Many Requests"), "HTTP 429"),
        (http(event({"error": {"message": "engine died"}}), chunk=9), "engine died"),
        (http(answer("a"))[:-30] + HANG_UP, "connection lost"),
        (None, "connection lost"),
        (http(answer()), "no text"),
        (b"SMTP\r\n\r\n", "unreadable answer"),
        (http(b"data: {not json\n\n"), "unreadable answer"),
    ],
)
def test_each_failure_is_a_failed_call_that_says_why(reply, words):
    """A failed request counts as a fast one, or stops the whole benchmark."""
    calls, _ = post(reply, None, timeout_s=5.0)
    assert words in calls[0].error


def test_a_refused_connection_is_a_failed_call():
    """A server that went away in the middle of a run ends the run without its figures."""

    async def main() -> Call:
        async with Scripted(None) as url:
            gone = url
        return await Pool(parse_target(gone)).post("/v1/completions", b"{}", timeout_s=5.0)

    assert "can't connect" in asyncio.run(main()).error


def test_connections_are_reused_and_replaced():
    """A connection a request measures handshakes; a dead one used again fails the next call."""
    calls, scripted = post(
        http(answer("a")), http(answer("a")), http(answer("a")) + HANG_UP, http(answer("a")), times=4
    )
    assert [call.error for call in calls] == [None] * 4
    assert scripted.num_connections == 2


@pytest.mark.parametrize(
    ("replies", "errors"),
    [
        ([http(answer("a")), None, http(answer("b"))], [False, False]),
        ([http(answer("a")), None, None, http(answer("b"))], [False, True]),
        ([http(answer("a")), http(answer("b"))[:20] + HANG_UP, http(answer("c"))], [False, True]),
    ],
)
def test_a_kept_connection_may_close_once(replies, errors):
    """Half of the requests fail at a server that closes what it kept; or one that drops requests looks sound."""
    calls, _ = post(*replies, times=2)
    assert [call.error is not None for call in calls] == errors
    assert calls[0].end <= calls[1].begin


def run_main(arguments: list[str], *answers: bytes | None) -> tuple[int, Scripted]:
    """serve.main against a scripted server in another thread."""
    scripted = Scripted(*answers)
    started, stop = threading.Event(), threading.Event()
    url = ""

    def serving() -> None:
        async def main() -> None:
            nonlocal url
            async with scripted as url:
                started.set()
                await asyncio.to_thread(stop.wait)

        asyncio.run(main())

    thread = threading.Thread(target=serving)
    thread.start()
    started.wait(10)
    try:
        return serve.main(["--url", url, "--no-ceilings", *arguments]), scripted
    finally:
        stop.set()
        thread.join(10)


def test_main_writes_every_level(tmp_path, capsys):
    """A level without figures, or JSON without what is needed to compare two runs."""
    file = tmp_path / "serve.json"
    arguments = ["--clients", "1,3", "--requests", "5", "--goodput", "tpot=60000,ttft=0.001", "--json", str(file)]
    code, scripted = run_main(arguments, http(answer("a", "b", usage=2)))
    result = json.loads(file.read_text())
    assert code == 0
    assert set(result) == {"title", "environment", "ceilings", "config", "metrics", "raw"}
    assert list(result["metrics"]) == ["1 clients", "3 clients"]
    assert [level["completed"] for level in result["metrics"].values()] == [5, 5]
    assert result["metrics"]["3 clients"]["output_tokens"] == 10
    assert result["metrics"]["3 clients"]["goodput_per_s"] == 0
    assert len(result["raw"]["1 clients"]) == 5
    assert result["config"]["model"] == "scripted"
    assert "3 clients" in capsys.readouterr().out
    prompts = [body["prompt"] for body in scripted.bodies]
    assert len(set(prompts)) == len(prompts) == 12
    assert {len(prompt.split()) for prompt in prompts} == {128}
    assert all(body["ignore_eos"] and body["max_tokens"] == 64 for body in scripted.bodies)


def test_main_reports_failures_by_kind(tmp_path, capsys):
    """A benchmark over half-broken answers ends green."""
    arguments = ["--rate", "500", "--requests", "6", "--warmup", "0", "--plain", "--endpoint", "chat"]
    code, scripted = run_main(arguments, http(answer("a")), http(b"no", status="500 Oh"), http(answer("a")))
    assert code == 1
    assert "HTTP 500" in capsys.readouterr().err
    assert all("ignore_eos" not in body and body["messages"] for body in scripted.bodies)


def test_main_without_a_server(capsys):
    """A traceback instead of one line."""
    assert serve.main(["--url", "http://127.0.0.1:9", "--no-ceilings"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize("models", [b"hello", b"[]", b'{"data": []}', b'{"data": [{}]}'])
def test_main_where_no_model_is_named(models, monkeypatch, capsys):
    """Something else answers on that port: a traceback instead of a line that says so."""
    monkeypatch.setattr(f"{__name__}.MODELS", http(models))
    code, _ = run_main(["--clients", "1"], http(answer("a")))
    assert code == 1
    assert "names no model" in capsys.readouterr().err


def test_prompts_repeat_by_seed_and_share_what_was_asked():
    """Two runs that can't be compared, or a prefix benchmark without a common prefix."""

    def prompts(seed: str) -> list[str]:
        bodies = load.Workload(prompt_words=20, shared_words=15, seed=seed).bodies("m")
        return [json.loads(next(bodies))["prompt"] for _ in range(3)]

    assert prompts("1") == prompts("1") != prompts("2")
    assert len({tuple(p.split()[:15]) for p in prompts("1")}) == 1
    assert len(set(prompts("1"))) == 3


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [([1.0], 99, 1.0), ([1.0, 3.0], 50, 2.0), ([4.0, 1.0, 2.0, 3.0], 100, 4.0), ([1.0, 2.0, 3.0, 4.0], 25, 1.75)],
)
def test_percentile_is_numpys(values, q, expected):
    """An off-by-one in the rank flatters every p99."""
    assert load.percentile(values, q) == pytest.approx(expected)


def test_figures_of_known_calls():
    """TPOT over n instead of n - 1 tokens, or a failed request that counts in the throughput."""
    good = Call(begin=0.0, text_times=[1.0, 1.5, 3.0], end=3.0, prompt_tokens=10, output_tokens=5)
    bad = Call(begin=0.0, end=4.0, output_tokens=100, error="x")
    figures = load.summarize([good, bad], {"ttft": 1000, "tpot": 500})
    assert figures["output_tokens_per_s"] == pytest.approx(5 / 4)
    assert figures["ttft_ms"]["p50"] == pytest.approx(1000)
    assert figures["tpot_ms"]["p50"] == pytest.approx(500)
    assert figures["itl_ms"]["mean"] == pytest.approx(1000)
    assert figures["goodput_per_s"] == pytest.approx(1 / 4)
    assert (figures["completed"], figures["failed"], figures["failures"]) == (1, 1, {"x": 1})
    assert math.isnan(load.summarize([bad], {})["ttft_ms"]["p50"])
