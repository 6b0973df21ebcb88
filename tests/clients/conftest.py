from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.e2e.conftest import Server


@pytest.fixture(scope="session")
def server(real_server: Server) -> Server:
    return real_server


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as one:
        yield one


@pytest.fixture(scope="session")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client, which takes the server's root for its base."""
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as one:
        yield one


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
