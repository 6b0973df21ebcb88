"""The KV cache that a model needs."""

import torch

from kernels.layout import KVCache, KVCacheSpec
from kernels.ops import Ops
from server.errors import ConfigError, OutOfMemoryAtStart
from server.models.spec import ModelSpec


def kv_cache_spec(spec: ModelSpec, *, block_size: int, dtype: torch.dtype) -> KVCacheSpec:
    """block_size: tokens a block. dtype: of the stored keys and values."""
    return KVCacheSpec(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=block_size,
        dtype=dtype,
    )


def allocate_kv_cache(ops: Ops, spec: KVCacheSpec, *, num_blocks: int, device: torch.device) -> KVCache:
    """num_blocks: usable ones; the null block comes on top. Raises OutOfMemoryAtStart, and ConfigError for a dtype that
    the backend does not have."""
    try:
        return ops.allocate_kv_cache(spec, num_blocks=num_blocks + 1, device=device)
    except ValueError as error:
        raise ConfigError(f"--kv-cache-dtype: {error}") from error
    except (MemoryError, RuntimeError) as error:
        wanted = (num_blocks + 1) * spec.bytes_per_block
        raise OutOfMemoryAtStart(
            f"the KV cache of {wanted / 2**30:.2f} GiB could not be allocated: {error}; set a smaller --kv-cache-memory"
        ) from error
