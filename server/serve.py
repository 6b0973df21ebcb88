"""Composition root of `pageturner serve`: the engine, the tokenizer, the HTTP application and their life together."""

import asyncio
import dataclasses
import errno
import gc
import logging
import resource
import signal
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from jinja2 import TemplateError

from server.api.app import create_app
from server.api.http_protocol import limited_protocol
from server.api.service import ModelInfo
from server.config import ServerConfig
from server.errors import ConfigError
from server.frontend.engine_client import SupervisedEngine
from server.frontend.launcher import ProcessLauncher
from server.frontend.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults, of_generation_config
from server.metrics.logging import configure_logging
from server.metrics.prometheus import Metrics
from server.models.registry import read_spec
from server.terminal import say, show_loading, show_ready
from server.tokenizer import ChatTemplate, load_tokenizer
from server.tokenizer.template_engine import TemplateLimits, compile_template
from server.weights.locate import ModelFiles, locate

logger = logging.getLogger("pageturner.server")

_EXIT_ENDED, _EXIT_FAILED = 0, 1
_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_FLUSH_S = 5
"""After the drain: time for the last bytes of answers to go out."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the signals are ours, from before the first connection."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class _Signals:
    """The first SIGTERM or SIGINT asks for a drain; a SIGINT behind it for the end, at once."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.end = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self.drain.is_set() and number == signal.SIGINT:
            self.end.set()
        self.drain.set()


def run(config: ServerConfig) -> int:
    """Serves until a signal ends it; the exit status: 1 where it could not go on. Raises StartupError."""
    configure_logging(log_format=config.api.log_format, level=config.api.log_level)
    _raise_file_limit()
    files = locate(config.engine.model.model)
    files = _with_chat_template(config, files)
    with _listen(config) as sock, asyncio.Runner(loop_factory=_new_event_loop) as runner:
        return runner.run(_serve(config, files, sock))


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _raise_file_limit() -> None:
    """A connection is a file, and the usual limit of 1,024 is less than the queue may hold."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # macOS calls its limit endless and means less
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _with_chat_template(config: ServerConfig, files: ModelFiles) -> ModelFiles:
    """The operator's template, where there is one, in place of all of the model's."""
    path = config.engine.model.chat_template
    if not path:
        return files
    try:
        source = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path}: {error}") from None
    try:
        compile_template(source, TemplateLimits())
    except TemplateError as error:
        raise ConfigError(f"--chat-template {path} is no Jinja template: {error}") from None
    return dataclasses.replace(files, chat_templates={"default": source})


def _sampling_defaults(config: ServerConfig, files: ModelFiles) -> SamplingDefaults:
    if config.engine.model.generation_config == "none":
        return OPENAI_DEFAULTS
    return of_generation_config(files.generation_config)


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
        setting = "--host" if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL else "--port"
        raise ConfigError(
            f"can't listen on {api.host}:{api.port}: {error.strerror}; choose another {setting}"
        ) from None
    return sock


async def _serve(config: ServerConfig, files: ModelFiles, sock: socket.socket) -> int:
    names = config.engine.model.served_model_name or (files.name,)
    model_max_len = read_spec(files).max_position
    metrics = Metrics(
        namespace=config.api.metrics_namespace,
        model_name=names[0],
        max_model_len=config.engine.model.max_model_len or model_max_len,
    )
    model = ModelInfo(names=names, created=int(time.time()), defaults=_sampling_defaults(config, files))
    client = _make_client(config, files, metrics)
    signals = _Signals()
    await client.start()
    try:
        tokenizer = await asyncio.to_thread(load_tokenizer, files)
        app = create_app(
            client=client,
            tokenizer=tokenizer,
            chat_template=ChatTemplate.of_model(files, tokenizer.special_tokens),
            model=model,
            config=config.api,
            metrics=metrics,
        )
        gc.collect()
        gc.freeze()  # the vocabulary and the modules never die: keep them out of every later collection
        server = _make_server(app, config)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            status = await _until_end(config, client, model, model_max_len, sock, signals, serving)
            if status is None:
                await _drain(client, config.api.drain_timeout_s, signals)
        finally:
            server.should_exit = True
            if signals.end.is_set():
                server.force_exit = True
                for connection in list(server.server_state.connections):
                    if connection.transport is not None:
                        connection.transport.abort()
            await asyncio.wait([serving])
        return status or _EXIT_ENDED
    finally:
        await client.stop(at_once=signals.end.is_set())


def _make_client(config: ServerConfig, files: ModelFiles, metrics: Metrics) -> SupervisedEngine:
    # The engine gets what was located, not what was asked for: a hub id is resolved once.
    engine_config = dataclasses.replace(
        config.engine,
        model=dataclasses.replace(config.engine.model, model=str(files.path)),
        log_format=config.api.log_format,
        log_level=config.api.log_level,
    )
    return SupervisedEngine(
        ProcessLauncher(),
        engine_config,
        max_queue=config.api.limits.max_queue,
        step_timeout_s=config.api.step_timeout_s,
        on_step=metrics.on_step,
    )


def _make_server(app: FastAPI, config: ServerConfig) -> _Server:
    api = config.api
    protocol = limited_protocol(
        read_timeout_s=api.read_timeout_s,
        write_timeout_s=api.write_timeout_s,
        max_header_bytes=api.limits.max_header_bytes,
    )
    return _Server(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_FLUSH_S,
        )
    )


async def _until_end(
    config: ServerConfig,
    client: SupervisedEngine,
    model: ModelInfo,
    model_max_len: int,
    sock: socket.socket,
    signals: _Signals,
    serving: asyncio.Task[None],
) -> int | None:
    """Shows the start, then waits for the end; returns the exit status. None: a signal came, and requests may be open.

    Raises StartupError.
    """
    signal_seen = asyncio.create_task(signals.drain.wait())
    loading = asyncio.create_task(show_loading(client))
    await asyncio.wait([signal_seen, loading, serving], return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        loading.cancel()
        return _EXIT_ENDED if signal_seen.done() else _say_stopped(serving)
    ready = loading.result()
    host, port = sock.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    show_ready(
        ready,
        name=model.name,
        url=f"http://{host}:{port}",
        asked_max_model_len=config.engine.model.max_model_len,
        model_max_len=model_max_len,
        defaults=model.defaults,
    )
    engine_failed = asyncio.create_task(client.wait_failed())
    await asyncio.wait([signal_seen, engine_failed, serving], return_when=asyncio.FIRST_COMPLETED)
    if signal_seen.done():
        return None
    if serving.done():
        return _say_stopped(serving)
    logger.critical("the engine can't be started again: %s", engine_failed.result())
    return _EXIT_FAILED


def _say_stopped(serving: asyncio.Task[None]) -> int:
    """Nobody asked for it: a process without an HTTP server must not stay."""
    error = None if serving.cancelled() else serving.exception()
    logger.critical("the HTTP server has stopped by itself", exc_info=error)
    return _EXIT_FAILED


async def _drain(client: SupervisedEngine, timeout_s: float, signals: _Signals) -> None:
    """Lets open requests finish, until the time is up or a second Ctrl-C comes."""
    say(f"Finishing open requests, for up to {timeout_s:.0f} s; Ctrl-C ends at once.")
    draining = asyncio.create_task(client.drain(timeout_s))
    ended = asyncio.create_task(signals.end.wait())
    await asyncio.wait([draining, ended], return_when=asyncio.FIRST_COMPLETED)
    draining.cancel()
