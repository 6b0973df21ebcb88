"""How many KV blocks fit, decided once at start, and the ledger that says where the memory went. Bytes throughout."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.layout import KVCacheSpec
from server.errors import ConfigError, OutOfMemoryAtStart
from server.models.spec import ModelSpec
from server.protocol import MemoryLedger

CPU_SHARE = 0.25
"""Of the memory that is available when the server starts; the machine has other things to do."""
TOKENS_PER_SEQUENCE = 256
"""What a CPU's default cache holds for each of max_num_seqs requests: more would only pin memory."""

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Memory:
    """A device's memory before the KV cache is allocated. available: what this process may still take."""

    total: int
    available: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """num_blocks: usable ones, the null block not counted."""

    num_blocks: int
    max_model_len: int
    ledger: MemoryLedger


def measure_memory(device: torch.device) -> Memory:
    """Of the device; on a CPU that is the machine's or the container's, whichever has less left."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Memory(total, free)
    total, available = _machine_memory()
    limit, used = _read_number(_CGROUP / "memory.max"), _read_number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        total, available = min(total, limit), min(available, max(limit - used, 0))
    return Memory(total, available)


def estimate_activations(spec: ModelSpec, *, num_tokens: int, num_sequences: int, dtype: torch.dtype) -> int:
    """The most that a step of num_tokens tokens with num_sequences sampled rows holds besides weights and KV.

    Residual, normed and projected states, the MLP's inner states, and the sampler's four copies of the logits.
    """
    per_token = 4 * spec.hidden_size + 2 * spec.q_size + 2 * spec.kv_size + 3 * spec.intermediate_size
    logits = 4 * num_sequences * spec.vocab_size * torch.float32.itemsize
    return num_tokens * per_token * dtype.itemsize + logits


def plan(
    spec: ModelSpec,
    kv_spec: KVCacheSpec,
    memory: Memory,
    *,
    weights: int,
    activations: int,
    max_num_seqs: int,
    max_model_len: int | None = None,
    num_blocks: int | None = None,
    kv_cache_memory: int | None = None,
    gpu_memory_utilization: float | None = None,
) -> MemoryPlan:
    """Chooses the number of blocks and the longest sequence.

    memory: as measured with the weights loaded. num_blocks wins over kv_cache_memory, which wins over the default:
    gpu_memory_utilization of the device where it is given, else a CPU's share. max_model_len: None takes what the
    checkpoint allows, shrunk to what the cache holds.

    Raises ConfigError for a max_model_len beyond the checkpoint's, OutOfMemoryAtStart with a value that fits.
    """
    if max_model_len is not None and max_model_len > spec.max_position:
        raise ConfigError(f"--max-model-len {max_model_len} is more than the model's {spec.max_position} positions")
    longest = max_model_len or spec.max_position
    block_bytes, block_size = kv_spec.bytes_per_block, kv_spec.block_size
    room = max(memory.available - activations, 0)
    fitting = room // block_bytes - 1  # one is the null block

    def ledger(blocks: int) -> MemoryLedger:
        kv_cache = (blocks + 1) * block_bytes
        return MemoryLedger(weights, kv_cache, activations, max(room - kv_cache, 0), memory.total)

    if num_blocks is not None:
        wanted = num_blocks
    elif kv_cache_memory is not None:
        wanted = kv_cache_memory // block_bytes - 1
    elif gpu_memory_utilization is not None:
        wanted = (room - int(memory.total * (1 - gpu_memory_utilization))) // block_bytes - 1
    else:
        default_tokens = max(longest, max_num_seqs * TOKENS_PER_SEQUENCE)
        wanted = min(int(room * CPU_SHARE) // block_bytes - 1, -(-default_tokens // block_size))
    _check_blocks(wanted, fitting, block_bytes, ledger)
    holds = wanted * block_size
    if max_model_len is not None and max_model_len > holds:
        raise OutOfMemoryAtStart(
            f"--max-model-len {max_model_len} does not fit into the KV cache, which holds {holds} tokens. "
            f"{describe(ledger(wanted))}. Set --max-model-len to at most {holds}, or --kv-cache-memory to at least "
            f"{(-(-max_model_len // block_size) + 1) * block_bytes}"
        )
    return MemoryPlan(wanted, min(longest, holds), ledger(wanted))


def _check_blocks(wanted: int, fitting: int, block_bytes: int, ledger: Callable[[int], MemoryLedger]) -> None:
    """Raises OutOfMemoryAtStart unless 1 <= wanted <= fitting. ledger: as it would be with so many blocks."""
    if fitting < 1:
        raise OutOfMemoryAtStart(
            f"no memory is left for a KV cache, whose least is {2 * block_bytes} bytes. {describe(ledger(1))}. "
            "Serve a smaller model, or lower --max-num-seqs and --max-num-batched-tokens"
        )
    if not 1 <= wanted <= fitting:
        problem = "is too small for a single block" if wanted < 1 else "does not fit"
        raise OutOfMemoryAtStart(
            f"a KV cache of {(wanted + 1) * block_bytes} bytes {problem}. {describe(ledger(max(wanted, 1)))}. Set "
            f"--kv-cache-memory between {2 * block_bytes} and {(fitting + 1) * block_bytes}, or --num-blocks between 1 "
            f"and {fitting}"
        )


def describe(ledger: MemoryLedger) -> str:
    """The ledger in one line, for messages and the log."""
    parts = (("weights", ledger.weights), ("KV cache", ledger.kv_cache), ("activations", ledger.activations))
    sizes = [f"{name} {size / 2**20:,.0f} MiB" for name, size in (*parts, ("left", ledger.free), ("of", ledger.total))]
    return "Memory: " + ", ".join(sizes)


def _machine_memory() -> tuple[int, int]:
    """(total, available). Where the kernel doesn't tell, a machine of 4 GiB with half of it left is assumed."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        total, available = (int(lines[key].split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return 4 << 30, 2 << 30
    return total, available


def _read_number(path: Path) -> int | None:
    """None where there is no such file or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
