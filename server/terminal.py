"""What the operator sees: a progress bar while the engine loads, then where the memory went, then the address."""

import asyncio
import contextlib
from dataclasses import fields

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from server.frontend.client import EngineClient
from server.frontend.sampling_defaults import SamplingDefaults
from server.protocol import Ready

console = Console(stderr=True)

_POLL_S = 0.1
_MIB = 1 << 20


def say(what: RenderableType, *, wrap: bool = True) -> None:
    """Prints for the operator. A terminal that is gone or a full disk is no reason to stop."""
    with contextlib.suppress(OSError):
        console.print(what, soft_wrap=not wrap)


async def show_loading(client: EngineClient) -> Ready:
    """Follows the engine's start. Where stderr is no terminal it shows nothing. Raises StartupError."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting the engine", total=1.0)
        ready = asyncio.ensure_future(client.wait_ready())
        try:
            while not ready.done():
                await asyncio.wait([ready], timeout=_POLL_S)
                if loading := client.state.loading:
                    progress.update(task, description=loading.phase, completed=loading.fraction)
            return await ready
        finally:
            ready.cancel()


def show_ready(
    ready: Ready,
    *,
    name: str,
    url: str,
    asked_max_model_len: int | None,
    model_max_len: int,
    defaults: SamplingDefaults,
) -> None:
    """The memory ledger, what may surprise, and the address."""
    num_tokens = ready.num_blocks * ready.block_size
    table = Table(title=f"{name} on {ready.device} ({ready.dtype}, {ready.backend} kernels)", title_justify="left")
    table.add_column("memory")
    table.add_column("MiB", justify="right")
    table.add_column("holds")
    fits = num_tokens / ready.max_model_len
    rows = (
        ("weights", ready.ledger.weights, ""),
        (
            "KV cache",
            ready.ledger.kv_cache,
            f"{ready.num_blocks:,} blocks of {ready.block_size} = {num_tokens:,} tokens, "
            f"{fits:.1f} requests of {ready.max_model_len:,} at once",
        ),
        ("activations", ready.ledger.activations, f"steps of up to {ready.max_num_batched_tokens:,} tokens"),
        ("free", ready.ledger.free, ""),
    )
    for part, size, holds in rows:
        table.add_row(part, f"{size / _MIB:,.0f}", holds)
    say(table)
    if asked_max_model_len is None and ready.max_model_len < model_max_len:
        say(
            f"The context is {ready.max_model_len:,} tokens of the model's {model_max_len:,}: that is what the "
            "KV cache holds. Ask for more with --kv-cache-memory.",
            wrap=False,
        )
    named = [(f.name, getattr(defaults, f.name)) for f in fields(defaults) if getattr(defaults, f.name) != f.default]
    if named:
        listed = ", ".join(f"{key} {value}" for key, value in named)
        say(
            f"Where requests leave it open: {listed}, as the model's generation_config.json has it. "
            "--generation-config none goes by OpenAI's defaults.",
            wrap=False,
        )
    say(f"Ready: {url}/v1")
