"""How an engine comes to life: as a process of its own in production, as a thread in tests and one-process use.

Either way the engine sits at the other end of a socketpair, so that everything above is the same for both.
"""

import asyncio
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Protocol

from server.config import EngineConfig, engine_environment

logger = logging.getLogger("pageturner.frontend")


class EngineHandle(Protocol):
    """One engine that was launched."""

    socket: socket.socket
    """Our end of the stream. The caller closes it."""

    def kill(self) -> None:
        """Ends the engine now, whatever it is doing. Harmless when it has ended already."""

    async def wait(self, timeout_s: float) -> str:
        """Waits for its end; says how it ended, for the log."""


class EngineLauncher(Protocol):
    def launch(self, config: EngineConfig) -> EngineHandle: ...


class _ProcessHandle:
    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.socket = sock
        self.process = process

    def kill(self) -> None:
        self.process.kill()

    async def wait(self, timeout_s: float) -> str:
        try:
            code = await asyncio.to_thread(self.process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            return "it does not end"
        return f"killed by signal {-code}" if code < 0 else f"exit status {code}"


class ProcessLauncher:
    """Starts `python -m server.engine.process`. -P keeps a folder named `server` in the working directory out of it.

    The engine has a process group of its own, so that a terminal's Ctrl-C is the server's alone to answer.
    """

    def launch(self, config: EngineConfig) -> EngineHandle:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "server.engine.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
                env=engine_environment(config.device.num_threads),
            )
        return _ProcessHandle(process, ours)


EngineMain = Callable[[socket.socket], None]
"""Serves on the socket until it closes; given by the composition root, since this room knows only the messages."""


class _ThreadHandle:
    def __init__(self, thread: threading.Thread, sock: socket.socket) -> None:
        self.socket = sock
        self._thread = thread

    def kill(self) -> None:
        """A thread can't be killed: it ends when it next looks at its socket, which the caller closes."""

    async def wait(self, timeout_s: float) -> str:
        await asyncio.to_thread(self._thread.join, timeout_s)
        return "it does not end" if self._thread.is_alive() else "thread ended"


class ThreadLauncher:
    """Runs the engine on a daemon thread of this process."""

    def __init__(self, engine_main: EngineMain) -> None:
        self._engine_main = engine_main

    def launch(self, config: EngineConfig) -> EngineHandle:
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=self._run, args=(theirs,), name="engine", daemon=True)
        thread.start()
        return _ThreadHandle(thread, ours)

    def _run(self, sock: socket.socket) -> None:
        try:
            self._engine_main(sock)
        except Exception:
            logger.exception("the engine thread failed")
        finally:
            sock.close()
