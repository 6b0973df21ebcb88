"""What the engine process does before it loads anything."""

import logging
import socket
from collections.abc import Iterator

import msgspec
import pytest

from server.config import EngineConfig
from server.engine.channel import EngineChannel
from server.engine.process import read_config
from server.protocol.wire import frame


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[logging.Logger]:
    """As it was, afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield root
    root.handlers = handlers
    root.setLevel(level)


def test_the_engine_logs_as_the_server_does(root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards log collectors: with --log-format json, the engine's lines in the same stream were none."""
    ours, theirs = socket.socketpair()
    channel = EngineChannel(theirs)
    config = EngineConfig(log_format="json", log_level="warning")
    with ours:
        ours.sendall(frame(msgspec.json.encode(config)))
        assert read_config(channel) == config
        channel.close()
    logging.getLogger("pageturner.engine").info("not shown")
    logging.getLogger("pageturner.engine").warning("shown")
    assert msgspec.json.decode(capsys.readouterr().err)["event"] == "shown"
