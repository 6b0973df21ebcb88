"""Composition root of `pageturner serve`: the engine, the tokenizer, the HTTP application and their life together."""

import asyncio
import dataclasses
import signal
import socket
import time
from pathlib import Path
from types import FrameType

import uvicorn

from server.api.app import create_app
from server.api.service import ModelInfo
from server.config import ServerConfig
from server.errors import ConfigError, StartupError
from server.frontend.engine_client import SupervisedEngine
from server.frontend.launcher import ProcessLauncher
from server.metrics.logging import configure_logging
from server.metrics.prometheus import Metrics
from server.models.registry import read_spec
from server.terminal import console, show_loading, show_ready
from server.tokenizer import ChatTemplate, load_tokenizer
from server.weights.locate import ModelFiles, locate

_BACKLOG = 2048


class _Server(uvicorn.Server):
    """uvicorn, with our meaning of the signals: the first drains, a second SIGINT ends at once."""

    def __init__(self, config: uvicorn.Config, *, on_signal: asyncio.Event) -> None:
        super().__init__(config)
        self._on_signal = on_signal
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._on_signal.is_set() and sig == signal.SIGINT:
            self.should_exit = self.force_exit = True
        self._loop.call_soon_threadsafe(self._on_signal.set)


def run(config: ServerConfig) -> int:
    """Serves until a signal ends it. Raises StartupError where it can't start."""
    configure_logging(log_format=config.api.log_format, level=config.api.log_level)
    files = locate(config.engine.model.model)
    template = _chat_template(config, files)
    with _listen(config) as sock, asyncio.Runner(loop_factory=_new_event_loop) as runner:
        return runner.run(_serve(config, files, template, sock))


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _chat_template(config: ServerConfig, files: ModelFiles) -> ChatTemplate | None:
    source = files.chat_template
    if path := config.engine.model.chat_template:
        try:
            source = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template {path}: {error}") from None
    return ChatTemplate(source) if source else None


def _listen(config: ServerConfig) -> socket.socket:
    """Bound before anything is loaded: a port that is taken costs a second, not a model load."""
    api = config.api
    family = socket.AF_INET6 if ":" in api.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((api.host, api.port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"can't listen on {api.host}:{api.port}: {error.strerror}; choose another --port") from None
    return sock


async def _serve(config: ServerConfig, files: ModelFiles, template: ChatTemplate | None, sock: socket.socket) -> int:
    # The engine gets what was located, not what was asked for: a hub id is resolved once.
    engine_config = dataclasses.replace(
        config.engine, model=dataclasses.replace(config.engine.model, model=str(files.path))
    )
    name = config.engine.model.served_model_name or files.name
    metrics = Metrics(namespace=config.api.metrics_namespace, model_name=name)
    client = SupervisedEngine(
        ProcessLauncher(),
        engine_config,
        max_queue=config.api.limits.max_queue,
        step_timeout_s=config.api.step_timeout_s,
        on_step=metrics.on_step,
    )
    await client.start()
    try:
        tokenizer = await asyncio.to_thread(load_tokenizer, files)
        app = create_app(
            client=client,
            tokenizer=tokenizer,
            chat_template=template,
            model=ModelInfo(name=name, created=int(time.time())),
            config=config.api,
            metrics=metrics,
        )
        stop_asked = asyncio.Event()
        server = _Server(
            uvicorn.Config(app, log_config=None, access_log=False, backlog=_BACKLOG, timeout_keep_alive=75),
            on_signal=stop_asked,
        )
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            await _until_signal(config, client, files, name, sock, stop_asked)
        finally:
            server.should_exit = True
            await serving
        return 0
    finally:
        await client.stop()


async def _until_signal(
    config: ServerConfig,
    client: SupervisedEngine,
    files: ModelFiles,
    name: str,
    sock: socket.socket,
    stop_asked: asyncio.Event,
) -> None:
    """Shows the start, then waits for a signal and drains. Raises StartupError, also when a later restart fails."""
    signal_seen = asyncio.create_task(stop_asked.wait())
    loading = asyncio.create_task(show_loading(client))
    await asyncio.wait([signal_seen, loading], return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        loading.cancel()
        return
    ready = loading.result()
    host, port = sock.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    show_ready(
        ready,
        name=name,
        url=f"http://{host}:{port}",
        asked_max_model_len=config.engine.model.max_model_len,
        model_max_len=read_spec(files).max_position,
    )
    engine_failed = asyncio.create_task(client.wait_failed())
    await asyncio.wait([signal_seen, engine_failed], return_when=asyncio.FIRST_COMPLETED)
    if engine_failed.done():
        raise StartupError(engine_failed.result())
    console.print(f"Finishing open requests, for up to {config.api.drain_timeout_s:.0f} s; Ctrl-C again ends at once.")
    await client.drain(config.api.drain_timeout_s)
