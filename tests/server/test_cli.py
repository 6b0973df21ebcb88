"""The command line's own part: exit statuses."""

import os
import signal
from collections.abc import Iterator

import pytest

from server import cli, serve
from server.config import ServerConfig


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As they were, afterwards."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_no_failure_however_early(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: Ctrl-C while loading exited with 130 or with 0, by which module was being imported just then."""

    def run(_settings: ServerConfig) -> int:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal was lost")

    monkeypatch.setattr(serve, "run", run)
    assert cli.main(["serve", "--port", "0"]) == 0
