"""Starting, refusing to start, and ending."""

import json
import socket
import subprocess
import threading

import httpx
import psutil
import pytest

from tests.e2e.conftest import COMMAND, DEFAULT_MODEL, EXIT_LIMIT_S, serving


def test_sigterm_finishes_what_runs_and_leaves_nothing(tmp_path):
    """A rolling update cuts answers short, or an engine process is left behind."""
    body = {
        "model": DEFAULT_MODEL,
        "prompt": "Once upon a time",
        "max_tokens": 80,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    with serving(tmp_path / "log") as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        events: list[str] = []
        begun = threading.Event()

        def read() -> None:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as response:
                for line in response.iter_lines():
                    if line:
                        events.append(line)
                        begun.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(60)
        assert server.terminate() == 0
        reader.join(EXIT_LIMIT_S)
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 80
        assert family
        assert psutil.wait_procs(family, timeout=EXIT_LIMIT_S)[1] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere/at-all"], "/nowhere/at-all"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
    ],
)
def test_a_start_that_cannot_work_says_why(arguments, words):
    """A traceback, or a server that starts with a setting it doesn't understand."""
    run = subprocess.run([COMMAND, "serve", "--port", "0", *arguments], capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    assert words in run.stderr + run.stdout
    assert "Traceback" not in run.stderr


def test_a_taken_port_is_named():
    """The model is loaded for seconds before the port turns out to be taken, or nobody says which."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = subprocess.run([COMMAND, "serve", "--port", str(port)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    assert str(port) in run.stderr + run.stdout
