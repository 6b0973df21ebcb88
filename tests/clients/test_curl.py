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


def test_a_form_is_refused_by_name(server):
    """`curl -d` alone calls the body a form: whoever forgets the header must read which one."""
    answer = curl("-w", "\n%{http_code}", f"{server.url}/v1/completions", "-d", '{"prompt": "Hi", "max_tokens": 2}')
    body, _, status = answer.rpartition("\n")
    assert status == "400"
    assert "application/json" in json.loads(body)["error"]["message"]


def test_a_refusal_has_a_status_and_says_why(server):
    """An error that curl's user sees as success, or as a page of HTML."""
    answer = curl("-w", "\n%{http_code}", f"{server.url}/v1/completions", "--json", '{"prompt": 1.5}')
    body, _, status = answer.rpartition("\n")
    assert status == "400"
    assert json.loads(body)["error"]["param"] == "prompt"
