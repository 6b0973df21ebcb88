"""`pageturner plan`: what a model's KV cache costs and what fits, from its headers alone."""

from rich.console import Console
from rich.table import Table

from server.config import EngineConfig
from server.models.registry import read_spec
from server.models.spec import ModelSpec
from server.weights.locate import locate

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}
_SIZES_GIB = (0.5, 1, 2, 4, 8, 16, 32, 64)
_LENGTHS = (1024, 4096, 8192, 32768, 131072)


def kv_bytes_per_token(spec: ModelSpec, dtype: str) -> int:
    """Keys and values of one token over all layers, bytes. dtype "auto" counts as 16 bits."""
    return 2 * spec.num_layers * spec.kv_size * _BYTES[dtype]


def run(config: EngineConfig, console: Console | None = None) -> int:
    """Prints how many requests of which length fit into how much memory. Raises StartupError for a bad model."""
    console = console or Console()
    files = locate(config.model.model)
    spec = read_spec(files)
    per_token = kv_bytes_per_token(spec, config.model.dtype)
    block_size = config.cache.block_size
    on_disk = sum(path.stat().st_size for path in files.tensor_files)
    console.print(
        f"[bold]{files.name}[/]: {spec.num_layers} layers, {spec.num_kv_heads} KV heads of {spec.head_dim}, context "
        f"{spec.max_position:,}; {on_disk / _MIB:,.0f} MiB on disk\n"
        f"KV cache: {per_token / _KIB:,.1f} KiB a token, "
        f"{per_token * block_size / _KIB:,.0f} KiB a block of {block_size}",
        highlight=False,
        soft_wrap=True,
    )
    if config.cache.kv_cache_memory is not None:
        sizes: tuple[float, ...] = (config.cache.kv_cache_memory / _GIB,)
    else:
        sizes = _SIZES_GIB
    limit = config.model.max_model_len or spec.max_position
    lengths = [n for n in _LENGTHS if n < limit] + [limit]
    table = Table(title="requests at once, by length", title_justify="left")
    table.add_column("KV memory", justify="right")
    table.add_column("tokens", justify="right")
    for length in lengths:
        table.add_column(f"{length:,}", justify="right")
    for gib in sizes:
        num_blocks = int(gib * _GIB) // (per_token * block_size)
        fits = (num_blocks // -(-length // block_size) for length in lengths)
        table.add_row(f"{gib:g} GiB", f"{num_blocks * block_size:,}", *(f"{n:,}" for n in fits))
    console.print(table)
    return 0
