"""`pageturner plan`: what a model's KV cache costs and what fits, from its headers alone."""

from rich.console import Console
from rich.table import Table

from server.config import CacheConfig, EngineConfig
from server.errors import ConfigError, OutOfMemoryAtStart
from server.models.registry import read_spec
from server.models.spec import ModelSpec
from server.weights.locate import locate

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2, "fp8": 1}
_SIZES_GIB = (0.5, 1, 2, 4, 8, 16, 32, 64)
NULL_BLOCKS = 1
"""What the target of padding takes, beside the usable blocks."""
_LENGTHS = (1024, 4096, 8192, 32768, 131072)


def kv_bytes_per_token(spec: ModelSpec, dtype: str) -> int:
    """Keys and values of one token over all layers, bytes. dtype "auto" counts as 16 bits."""
    return 2 * spec.num_layers * spec.kv_size * _BYTES[dtype]


def run(config: EngineConfig, console: Console | None = None) -> int:
    """Prints how many requests of which length fit into how much memory.

    Raises StartupError for a bad model, and for a length or a size of the cache with which `serve` would not start.
    """
    console = console or Console()
    files = locate(config.model.model)
    spec = read_spec(files)
    dtype = "fp8" if config.cache.kv_cache_dtype == "fp8" else config.model.dtype
    per_token = kv_bytes_per_token(spec, dtype)
    block_size = config.cache.block_size
    sizes = _num_blocks(config.cache, per_token * block_size)
    exact = config.cache.num_blocks is not None or config.cache.kv_cache_memory is not None
    limit = _longest(config.model.max_model_len, spec, max(sizes) * block_size if exact else None)
    on_disk = sum(path.stat().st_size for path in files.tensor_files)
    console.print(
        f"[bold]{files.name}[/]: {spec.num_layers} layers, {spec.num_kv_heads} KV heads of {spec.head_dim}, context "
        f"{spec.max_position:,}; {on_disk / _MIB:,.0f} MiB on disk\n"
        f"KV cache: {per_token / _KIB:,.1f} KiB a token, "
        f"{per_token * block_size / _KIB:,.0f} KiB a block of {block_size}",
        highlight=False,
        soft_wrap=True,
    )
    lengths = [n for n in _LENGTHS if n < limit] + [limit]
    table = Table(title="requests at once, by length", title_justify="left")
    table.add_column("KV memory", justify="right")
    table.add_column("tokens", justify="right")
    for length in lengths:
        table.add_column(f"{length:,}", justify="right")
    for num_blocks in sizes:
        fits = (num_blocks // -(-length // block_size) for length in lengths)
        memory = (num_blocks + NULL_BLOCKS) * per_token * block_size
        table.add_row(_size(memory), f"{num_blocks * block_size:,}", *(f"{n:,}" for n in fits))
    console.print(table)
    console.print(
        f"At most {config.scheduler.max_num_seqs:,} of them are in one step (--max-num-seqs).", soft_wrap=True
    )
    return 0


def _num_blocks(config: CacheConfig, block_bytes: int) -> list[int]:
    """Usable blocks, for each row of the table. Raises OutOfMemoryAtStart where not a single one fits."""
    if config.num_blocks is not None:
        return [config.num_blocks]
    if config.kv_cache_memory is None:
        return [max(0, int(gib * _GIB) // block_bytes - NULL_BLOCKS) for gib in _SIZES_GIB]
    num_blocks = config.kv_cache_memory // block_bytes - NULL_BLOCKS
    if num_blocks < 1:
        raise OutOfMemoryAtStart(
            f"--kv-cache-memory {config.kv_cache_memory} is too small for a single block; give at least "
            f"{(1 + NULL_BLOCKS) * block_bytes}"
        )
    return [num_blocks]


def _longest(max_model_len: int | None, spec: ModelSpec, holds: int | None) -> int:
    """The longest sequence, tokens. holds: what the cache holds; None where that is the question."""
    if max_model_len is not None and max_model_len > spec.max_position:
        raise ConfigError(f"--max-model-len {max_model_len} is more than the model's {spec.max_position} positions")
    if max_model_len is not None and holds is not None and max_model_len > holds:
        raise OutOfMemoryAtStart(
            f"--max-model-len {max_model_len} does not fit into the KV cache, which holds {holds} tokens; lower it, or "
            "raise --num-blocks or --kv-cache-memory"
        )
    return min(max_model_len or spec.max_position, holds or spec.max_position)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.4g} GiB" if num_bytes >= _GIB / 2 else f"{num_bytes / _MIB:.4g} MiB"
