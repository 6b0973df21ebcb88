"""What people type into a terminal."""

import json
import shutil
import subprocess

import pytest

BODY = {"messages": [{"role": "user", "content": "Count to five."}], "max_tokens": 8, "temperature": 0, "stream": True}


def curl(*arguments: str) -> str:
    if shutil.which("curl") is None:
        pytest.fail("curl is missing")
    return subprocess.run(["curl", "-sS", *arguments], check=True, capture_output=True, timeout=120).stdout.decode()


def test_a_stream_shows_as_events(server):
    """Buffers between the engine and a terminal, or events that only our own parser reads."""
    body = json.dumps(BODY)
    shown = curl("-N", "-i", f"{server.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body)
    head, _, events = shown.replace("\r\n", "\n").partition("\n\n")
    assert head.startswith("HTTP/1.1 200")
    assert "text/event-stream" in head
    assert "x-request-id:" in head
    blocks = events.removesuffix("\n\n").split("\n\n")
    assert blocks[-1] == "data: [DONE]"
    assert all("choices" in json.loads(block.removeprefix("data: ")) for block in blocks[:-1])


def test_a_body_without_a_content_type_is_read_all_the_same(server):
    """`curl -d` calls JSON a form; the first thing anybody tries then fails."""
    answer = curl(f"{server.url}/v1/completions", "-d", '{"prompt": "Hi", "max_tokens": 2}')
    assert json.loads(answer)["usage"]["completion_tokens"] <= 2


def test_a_refusal_has_a_status_and_says_why(server):
    """An error that curl's user sees as success, or as a page of HTML."""
    answer = curl("-w", "\n%{http_code}", f"{server.url}/v1/completions", "-d", '{"prompt": 1.5}')
    body, _, status = answer.rpartition("\n")
    assert status == "400"
    assert json.loads(body)["error"]["param"] == "prompt"
