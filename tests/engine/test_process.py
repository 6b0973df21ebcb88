"""What the engine process does before it loads anything."""

import logging
import socket
from collections.abc import Iterator

import msgspec
import pytest

from server.config import DeviceConfig, EngineConfig, ModelConfig
from server.engine.assemble import assemble
from server.engine.channel import EngineChannel
from server.engine.process import read_config
from server.errors import ConfigError
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


def test_no_promise_about_bits_in_float16() -> None:
    """Guards who asks for the same answer in any company: torch's float16 products on a CPU depend on the batch."""
    config = EngineConfig(model=ModelConfig(dtype="float16"), device=DeviceConfig(device="cpu", batch_invariant=True))
    with pytest.raises(ConfigError, match=r"--batch-invariant.*float16"):
        assemble(config, lambda phase, share: None)
