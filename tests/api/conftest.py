import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from server.api.app import create_app
from server.api.service import ModelInfo
from server.config import ApiConfig
from server.frontend.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults
from server.metrics.prometheus import Metrics
from server.tokenizer import ChatTemplate, Tokenizer, load_tokenizer
from server.weights.locate import ModelFiles, locate
from tests.api.fakes import FakeEngine

MODEL = "SmolLM2-135M-Instruct"
REPLY = " Hello, wide world! 안녕하세요 세계 😀😃 done"


@pytest.fixture(scope="session")
def model_files() -> ModelFiles:
    return locate("", offline=True)


@pytest.fixture(scope="session")
def tokenizer(model_files: ModelFiles) -> Tokenizer:
    return load_tokenizer(model_files)


@pytest.fixture(scope="session")
def chat_template(model_files: ModelFiles, tokenizer: Tokenizer) -> ChatTemplate:
    template = ChatTemplate.of_model(model_files, tokenizer.special_tokens)
    assert template is not None
    return template


class Server:
    """The application over a scripted engine, and a client for it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        config: ApiConfig,
        *,
        defaults: SamplingDefaults = OPENAI_DEFAULTS,
    ) -> None:
        self.tokenizer = tokenizer
        self.engine = FakeEngine(lambda _request: [])
        self.say(REPLY)
        self.metrics = Metrics(model_name=MODEL)
        self.app: FastAPI = create_app(
            client=self.engine,
            tokenizer=tokenizer,
            chat_template=chat_template,
            model=ModelInfo(names=(MODEL, "alias"), created=1, defaults=defaults),
            config=config,
            metrics=self.metrics,
        )
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test")

    def say(self, text: str, *, end: bool = True) -> list[int]:
        """What the engine answers from now on. end: with the end token."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        if end:
            tokens = [*tokens, min(self.tokenizer.end_token_ids)]
        self.engine.script = lambda _request: tokens
        return tokens

    async def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(path, content=content, **kwargs)

    async def complete(self, prompt: Any = "Hi", **fields: Any) -> dict[str, Any]:
        return ok(await self.post("/v1/completions", {"prompt": prompt, "max_tokens": 64, **fields}))

    async def chat(self, content: Any = "Hi", **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        return ok(await self.post("/v1/chat/completions", {"messages": messages, **fields}))

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of each event, [DONE] as that text."""
        response = await self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = [block for block in response.text.split("\n\n") if block]
        return [data if data == "[DONE]" else json.loads(data) for data in (b.removeprefix("data: ") for b in blocks)]

    def metric(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(
            f"pageturner:{name}", {"model_name": MODEL, "engine": "0", **labels}
        )
        assert value is not None, name
        return value


def ok(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    parsed: dict[str, Any] = response.json()
    return parsed


@pytest.fixture
def config() -> ApiConfig:
    return ApiConfig(log_requests=True)


@pytest.fixture
async def server(tokenizer: Tokenizer, chat_template: ChatTemplate, config: ApiConfig) -> AsyncIterator[Server]:
    server = Server(tokenizer, chat_template, config)
    yield server
    await server.http.aclose()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
