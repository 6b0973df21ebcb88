"""`make clients`: programs that drive a real server with clients from .venv-clients, and promises tried many times.

Plain `make test` doesn't collect this folder: it needs neither those packages nor Node.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.promises import broken_calls, broken_schemas
from tests.clients.snippets import snippet
from tests.e2e.conftest import DEFAULT_MODEL, Server, serving

ROOT = Path(__file__).parents[3]
CLIENTS = ROOT / ".venv-clients"
PROGRAMS = Path(__file__).parent / "programs"
NUM_SCHEMAS, NUM_CALLS = 200, 100


def run(*command: str | Path, limit_s: float = 600) -> None:
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGSMITH_TRACING": "false",
        "NODE_PATH": str(CLIENTS / "node" / "node_modules"),
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("program", ["langchain_client.py", "litellm_client.py", "lm_eval_client.py"])
def test_python_program(server: Server, program: str) -> None:
    """A client that people build on stops working with this server."""
    run(CLIENTS / "bin" / "python", PROGRAMS / program, server.url, DEFAULT_MODEL)


def test_node_program(server: Server) -> None:
    """The official Node client stops working with this server: its streams and helpers are other code than Python's."""
    run("node", PROGRAMS / "node_client.cjs", server.url, DEFAULT_MODEL)


@pytest.mark.parametrize("heading", ["LangChain", "LiteLLM"])
def test_snippet_of_the_docs(server: Server, heading: str) -> None:
    """A visitor copies a snippet from docs/clients.md and gets an error."""
    run(CLIENTS / "bin" / "python", "-c", snippet(heading, url=server.url))


def test_node_snippet_of_the_docs(server: Server) -> None:
    """The same, of the Node client's."""
    run("node", "-e", snippet("openai, Node", url=server.url))


@pytest.fixture
def small_server(tmp_path: Path) -> Iterator[Server]:
    """A short context: schemathesis leaves max_tokens out, and the model may then write until the context is full."""
    with serving(tmp_path / "log", "--max-model-len", "192") as running:
        yield running


@pytest.mark.timeout(3600)
def test_schemathesis_finds_no_server_error(small_server: Server, tmp_path: Path) -> None:
    """A body that follows our own schema, or nearly, and gets a 500; a schema that doesn't load."""
    run(
        CLIENTS / "bin" / "schemathesis",
        "run",
        f"{small_server.url}/openapi.json",
        *("--checks", "not_a_server_error"),
        *("--max-examples", "10"),
        *("--phases", "examples,coverage,fuzzing"),
        *("--workers", "1"),  # more of them trip over the recursion limit of Python 3.11's compiler
        *("--request-timeout", "120"),
        *("--seed", "1"),
        limit_s=1800,
    )
    assert small_server.metric("num_requests_running") == 0


@pytest.mark.timeout(3600)
def test_every_random_schema_is_followed(server: Server) -> None:
    """One schema in two hundred whose answers break it."""
    with server.client() as client:
        assert not broken_schemas(client, DEFAULT_MODEL, seed=2, count=NUM_SCHEMAS)


@pytest.mark.timeout(3600)
def test_every_forced_call_parses(server: Server) -> None:
    """One forced call in a hundred that a client can't run."""
    with server.client() as client:
        assert not broken_calls(client, DEFAULT_MODEL, seed=2, count=NUM_CALLS)
