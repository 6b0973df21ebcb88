"""Everything around the endpoints: keys, limits, ids, probes, disconnects."""

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from server.config import ApiConfig, Limits
from server.errors import EngineRestarting, Overloaded
from server.protocol import Loading
from server.tokenizer import ChatTemplate, Tokenizer
from tests.api.conftest import MODEL, REPLY, Server, ok

pytestmark = pytest.mark.anyio

KEY = "sk-test-é"
POST_PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/debug/reset_prefix_cache")


@pytest.fixture
def guarded(tokenizer: Tokenizer, chat_template: ChatTemplate) -> Server:
    return Server(tokenizer, chat_template, ApiConfig(api_keys=("other", KEY), log_requests=True))


@pytest.mark.parametrize(
    "path",
    [*POST_PATHS, "//v1/completions", "/v1//completions", "/v1/completions/", "/V1/completions", "/generate",
     "/v1/messages", "/v1/models", "/tokenizer_info", "/debug/pages",
     "/health/", "/HEALTH", "/health/../v1/models", "/docs", "/nothing"],
)  # fmt: skip
async def test_every_path_wants_a_key(guarded: Server, path: str) -> None:
    """Guards against spellings of a path, and paths added later, that slip past the key."""
    for method in ("GET", "POST"):
        response = await guarded.http.request(method, path, content=b"{}")
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("headers", "known"),
    [
        ([(b"Authorization", b"Bearer " + KEY.encode())], True),
        ([(b"Authorization", b"bearer " + KEY.encode())], True),
        ([(b"Authorization", b"Bearer other")], True),
        ([(b"X-Api-Key", KEY.encode())], True),
        ([], False),
        ([(b"Authorization", b"")], False),
        ([(b"Authorization", b"Bearer")], False),
        ([(b"Authorization", b"Bearer ")], False),
        ([(b"Authorization", KEY.encode())], False),
        ([(b"Authorization", b"Basic " + KEY.encode())], False),
        ([(b"Authorization", b"Bearer " + KEY.encode() + b"x")], False),
        ([(b"Authorization", b"Bearer " + KEY.encode()[:-1])], False),
        ([(b"Authorization", b"bearer  " + KEY.encode() + b" x")], False),
        ([(b"Authorization", b"Bearer \xc3\xa9\xff")], False),
        ([(b"Authorization", b"Bearer other"), (b"Authorization", b"Bearer x")], False),
        ([(b"X-Api-Key", b"wrong")], False),
    ],
)
async def test_keys(guarded: Server, headers: Sequence[tuple[bytes, bytes]], known: bool) -> None:
    """Guards the comparison: bytes, whole, in the right scheme; a key of odd bytes is a 401, not a crash."""
    response = await guarded.http.get("/v1/models", headers=list(headers))
    assert response.status_code == (200 if known else 401)
    assert KEY not in response.text


async def test_open_paths(guarded: Server, tokenizer: Tokenizer) -> None:
    """Guards that probes never need a key, and /metrics only where that was asked for."""
    for path in ("/livez", "/readyz", "/health", "/metrics"):
        assert (await guarded.http.get(path)).status_code == 200
    strict = Server(tokenizer, None, ApiConfig(api_keys=("k",), metrics_need_key=True))
    assert (await strict.http.get("/metrics")).status_code == 401
    assert (await strict.http.get("/metrics", headers={"Authorization": "Bearer k"})).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_limit(tokenizer: Tokenizer, chunked: bool) -> None:
    """Guards memory: a body over the limit is refused while it is read, whether or not it says its length."""
    server = Server(tokenizer, None, ApiConfig(limits=Limits(max_body_bytes=1024)))
    read = 0

    async def endless() -> Any:
        nonlocal read
        for _ in range(1000):
            read += 512
            yield b"x" * 512

    content: Any = endless() if chunked else b"x" * 1025
    response = await server.http.post("/v1/completions", content=content)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert read <= 4096
    assert (await server.post("/v1/completions", {"prompt": "x", "pad": "y" * 900})).status_code == 200


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [("abc-123", True), (None, False), ("x" * 129, False), ("a b", False), ("", False)],
)
async def test_request_ids(server: Server, sent: str | None, echoed: bool) -> None:
    """Guards that X-Request-Id comes back, and that an odd one can't spoil a log or a header."""
    headers = {} if sent is None else {"X-Request-Id": sent}
    for path in ("/livez", "/nothing", "/v1/models"):
        answer = (await server.http.get(path, headers=headers)).headers["x-request-id"]
        assert (answer == sent) is echoed
        assert answer


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/completions", 405), ("GET", "/v1/nothing", 404),
     ("DELETE", "/v1/models", 405), ("POST", "/v1/completions/", 404), ("GET", "/%00", 404),
     ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404), ("GET", "/v1/models/%ff", 404)])  # fmt: skip
async def test_wrong_paths_are_json(server: Server, method: str, path: str, status: int) -> None:
    """Guards the error body of what no endpoint answers."""
    response = await server.http.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (Overloaded("full", retry_after=2.2), 429, "3"),
        (EngineRestarting("draining"), 503, "1"),
        (RuntimeError("secret detail"), 500, None),
    ],
)
async def test_turned_away(
    server: Server, path: str, stream: bool, error: Exception, status: int, retry_after: str | None
) -> None:
    """Guards that a full queue is a 429 with Retry-After, not a broken stream, and that a bug of ours tells nothing."""
    server.engine.error = error
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": stream, "n": 2}
    response = await server.post(path, body)
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry_after
    assert response.json()["error"]["message"]
    assert "secret" not in response.text


async def test_before_the_engine_is_ready(server: Server) -> None:
    """Guards the first seconds: probes, models and metrics answer; requests get a 503 with Retry-After."""
    state = server.engine.state
    state.ready, state.phase, state.loading = None, "loading weights", Loading("loading weights", 0.25)
    assert (await server.http.get("/livez")).status_code == 200
    for path in ("/readyz", "/health"):
        response = await server.http.get(path)
        assert response.status_code == 503
        assert response.json()["phase"] == "loading weights"
        assert response.json()["progress"] == 0.25
    [model] = [m for m in ok(await server.http.get("/v1/models"))["data"] if m["id"] == MODEL]
    assert model["max_model_len"] is None
    assert (await server.http.get("/metrics")).status_code == 200
    response = await server.post("/v1/completions", {"prompt": "x"})
    assert response.status_code == 503
    assert response.headers["retry-after"]


async def test_admin(server: Server) -> None:
    """Guards the small endpoints that routers and dashboards call."""
    server.engine.state.last_step_time = 0.0
    ready = ok(await server.http.get("/readyz"))
    assert ready["status"] == "ready"
    assert ready["step_age_s"] > 0
    models = ok(await server.http.get("/v1/models"))
    assert [m["id"] for m in models["data"]] == [MODEL, "alias"]
    assert models["data"][0]["max_model_len"] == 2048
    assert ok(await server.http.get(f"/v1/models/{MODEL}"))["id"] == MODEL
    assert "version" in ok(await server.http.get("/version"))
    info = ok(await server.http.get("/tokenizer_info"))
    assert (info["bos_token"], info["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "messages" in info["chat_template"]
    assert ok(await server.http.get("/debug/pages")) == {"0": [1, 2]}
    assert (await server.http.get("/debug/requests")).json() == [{"request_id": "a"}]
    assert (await server.post("/debug/reset_prefix_cache", b"")).status_code == 200
    schemas = ok(await server.http.get("/openapi.json"))["components"]["schemas"]
    assert {"CompletionBody", "ChatBody", "StreamOptions"} <= set(schemas)


async def test_tokenize(server: Server) -> None:
    """Guards counts that clients budget with: text, messages, and back again."""
    answer = ok(await server.post("/tokenize", {"prompt": "Hello 안녕", "return_token_strs": True}))
    assert answer["tokens"] == server.tokenizer.encode("Hello 안녕")
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048
    assert ok(await server.post("/detokenize", {"tokens": answer["tokens"]})) == {"prompt": "Hello 안녕"}
    messages = [{"role": "user", "content": "Hi"}]
    counted = ok(await server.post("/tokenize", {"messages": messages}))
    chat = ok(await server.post("/v1/chat/completions", {"messages": messages}))
    assert counted["count"] == chat["usage"]["prompt_tokens"]
    for body in ({}, {"prompt": "x", "messages": messages}, {"messages": []}, {"prompt": 5}):
        assert (await server.post("/tokenize", body)).status_code == 400
    assert (await server.post("/detokenize", {"tokens": [10**9]})).status_code == 400


async def test_tokenize_calls_no_field_ignored_that_it_honors(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the note on unknown fields: it named those of the prompt, and of the messages, to the other's reader."""
    monkeypatch.setattr("server.api.schemas._seen_unknown", set())
    caplog.set_level("INFO", logger="pageturner.api")
    text = {"model": MODEL, "prompt": "x", "add_special_tokens": False, "return_token_strs": True}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False, "oddity": 1}
    for body in (text, chat):
        ok(await server.post("/tokenize", body))
    assert [record.event_fields["field"] for record in caplog.records] == ["oddity"]


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (None, 200),
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 400),
        ("application/x-www-form-urlencoded", 400),
        ("multipart/form-data; boundary=x", 400),
    ],
)
async def test_content_types(server: Server, kind: str | None, status: int) -> None:
    """Guards a server on localhost from web pages: what a browser sends without asking first is refused."""
    headers = {} if kind is None else {"Content-Type": kind}
    response = await server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=headers)
    assert response.status_code == status


async def test_cors_only_where_configured(server: Server, tokenizer: Tokenizer) -> None:
    """Guards against browsers being let in by default; a preflight needs no key."""
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    response = await server.http.options("/v1/completions", headers=preflight)
    assert "access-control-allow-origin" not in response.headers
    config = ApiConfig(cors_origins=("https://a.example",), api_keys=("k",))
    response = await Server(tokenizer, None, config).http.options("/v1/completions", headers=preflight)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://a.example"


class Connection:
    """One ASGI request whose client can hang up, which httpx's transport can't show."""

    def __init__(self, app: Any, path: str, body: dict[str, Any]) -> None:
        self._app = app
        self._gone = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        self.sent: list[dict[str, Any]] = []
        self.scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [], "http_version": "1.1", "scheme": "http", "server": ("test", 80), "client": ("c", 1),
            "root_path": "", "asgi": {"version": "3.0"},
        }  # fmt: skip

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    async def run(self) -> None:
        await self._app(self.scope, self.receive, self.send)

    def hang_up(self) -> None:
        self._gone.set()


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("waiting", [False, True])
async def test_a_client_that_goes_away(server: Server, path: str, stream: bool, n: int, waiting: bool) -> None:
    """Guards the KV blocks: hanging up closes every sequence in the engine, streamed or not, running or queued."""
    server.engine.hold = asyncio.Event()
    server.engine.script = lambda _request: [2000] * 100_000
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": stream, "n": n, "max_tokens": 2000}
    connection = Connection(server.app, path, body)
    running = asyncio.create_task(connection.run())
    await until(lambda: len(server.engine.requests) == n)
    if not waiting:
        server.engine.hold.set()
        await until(lambda: len(connection.sent) > 3 or not stream)
    connection.hang_up()
    await asyncio.wait_for(running, 10)
    assert sorted(server.engine.unfinished) == sorted(r.request_id for r in server.engine.requests)
    assert server.metric("request_success_total", finished_reason="abort") == n
    assert server.metric("request_params_n_sum") == n, "who left before the first token was received, too"


async def test_log_lines(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Guards one line a request, with its id and status, and without the prompt."""
    caplog.set_level(logging.INFO, "pageturner")
    await server.http.post("/v1/completions", json={"prompt": "a secret"}, headers={"X-Request-Id": "abc"})
    [record] = [r for r in caplog.records if r.name == "pageturner.http"]
    fields = record.event_fields
    assert (fields["status"], fields["request_id"], fields["path"]) == (200, "abc", "/v1/completions")
    assert (fields["prompt_tokens"], fields["completion_tokens"]) == (2, 16)
    assert "secret" not in str(record.__dict__)


async def test_unknown_fields_are_logged_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Guards the log from a client that sends an unknown field a thousand times."""
    caplog.set_level(logging.INFO, "pageturner")
    for _ in range(3):
        await server.complete(zzz_unheard_of=1)
    assert sum("unknown" in r.getMessage() for r in caplog.records) == 1


async def test_official_clients_skip_what_keeps_a_stream_alive(
    tokenizer: Tokenizer, chat_template: ChatTemplate
) -> None:
    """Guards clients from comments in a stream: before the first event, between events, of either kind of event."""
    import httpx2  # anthropic's own
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI

    server = Server(tokenizer, chat_template, ApiConfig(stream_keep_alive_s=1e-3))
    server.engine.hold = asyncio.Event()
    raw: list[bytes] = []

    async def note(response: Any) -> None:
        raw.append(await response.aread())

    hooks = {"response": [note]}
    http = httpx.AsyncClient(transport=httpx.ASGITransport(server.app), event_hooks=hooks)
    asyncio.get_running_loop().call_later(0.05, server.engine.hold.set)
    openai = AsyncOpenAI(api_key="x", base_url="http://test/v1", http_client=http, max_retries=0)
    stream = await openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=64, stream=True
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == REPLY
    server.engine.hold.clear()
    asyncio.get_running_loop().call_later(0.05, server.engine.hold.set)
    http2 = httpx2.AsyncClient(transport=httpx2.ASGITransport(server.app), event_hooks=hooks)
    anthropic = AsyncAnthropic(api_key="x", base_url="http://test", http_client=http2, max_retries=0)
    async with anthropic.messages.stream(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=64
    ) as message:
        assert "".join([text async for text in message.text_stream]) == REPLY
    assert [answer.startswith(b": keep-alive\n\n") for answer in raw] == [True, True]


async def test_official_client(server: Server) -> None:
    """Guards what the openai package makes of the answers."""
    from openai import AsyncOpenAI, BadRequestError

    http = httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://test/v1")
    client = AsyncOpenAI(api_key="x", base_url="http://test/v1", http_client=http, max_retries=0)
    plain = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
    stream = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == plain.choices[0].message.content
    assert chunks[-1].usage == plain.usage
    with pytest.raises(BadRequestError, match="temperature"):
        await client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert [m.id async for m in client.models.list()] == [MODEL, "alias"]
