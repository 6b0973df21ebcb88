"""What ends the server, and with which exit status."""

import asyncio
import logging
import socket
from typing import Any, cast

import pytest

from server import serve
from server.api.service import ModelInfo
from server.config import ServerConfig
from server.frontend.engine_client import SupervisedEngine
from server.protocol import Ready
from tests.api.fakes import READY, FakeState


class _Client:
    """An engine client that gets ready, or fails, when told."""

    def __init__(self) -> None:
        self.state = FakeState()
        self.ready = asyncio.get_running_loop().create_future()
        self.failed = asyncio.get_running_loop().create_future()

    async def wait_ready(self) -> Ready:
        return cast(Ready, await asyncio.shield(self.ready))

    async def wait_failed(self) -> str:
        return cast(str, await asyncio.shield(self.failed))


async def _status(what: str, *, is_ready: bool) -> int | None:
    client, signals, model = _Client(), serve._Signals(), ModelInfo(names=("m",))
    http: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def serving() -> None:
        await http

    if is_ready:
        client.ready.set_result(READY)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        task = asyncio.create_task(serving())
        ending = asyncio.create_task(
            serve._until_end(ServerConfig(), cast(SupervisedEngine, client), model, 2048, sock, signals, task)
        )
        await asyncio.sleep(0.05)
        match what:
            case "signal":
                signals.drain.set()
            case "engine":
                client.failed.set_result("no memory left")
            case "http returns":
                http.set_result(None)
            case "http raises":
                http.set_exception(ZeroDivisionError("a bug"))
        async with asyncio.timeout(10):
            return await ending


@pytest.mark.parametrize(
    ("what", "is_ready", "status", "logged"),
    [
        ("signal", False, 0, None),
        ("signal", True, None, None),
        ("engine", True, 1, "no memory left"),
        ("http returns", False, 1, "HTTP server"),
        ("http returns", True, 1, "HTTP server"),
        ("http raises", True, 1, "HTTP server"),
    ],
)
def test_nothing_ends_in_silence(
    what: str, is_ready: bool, status: int | None, logged: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: an HTTP server that ended by itself left a process that listens to nobody, for ever."""
    assert asyncio.run(_status(what, is_ready=is_ready)) == status
    fatal = [record.getMessage() for record in caplog.records if record.levelno == logging.CRITICAL]
    assert len(fatal) == (logged is not None)
    assert logged is None or logged in fatal[0]
