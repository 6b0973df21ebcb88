"""Shape, stride and null-block rules of the KV cache.

One block holds block_size tokens of one layer's keys and values, for all KV heads. Block 0 is the null block: the page
table is padded with it, it is never allocated, and whatever lies in it must not reach an output. Slots that are not
written yet may hold anything, NaN included: kernels mask by seq_lens, they don't multiply by zero.
"""

from dataclasses import dataclass

import torch

NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one block must hold. dtype: of the stored keys and values (float8_e4m3fn where the backend can)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.block_size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's keys and values. Written by: the KV-write kernel only. The shapes are the backend's own business:

    reference, triton: key, value [num_blocks, block_size, num_kv_heads, head_dim]
    cpu: key, value [num_blocks, num_kv_heads, block_size, head_dim], why: kernels.cpu
    native: kernels.cpu.native_lib.NativeLayerKV

    key_scale, value_scale: float32 scalars; what is stored times the scale is meant. 8-bit caches only.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class KVCache:
    """All layers. num_blocks counts the null block."""

    spec: KVCacheSpec
    num_blocks: int
    layers: tuple[LayerKV, ...]

    def __getitem__(self, layer: int) -> LayerKV:
        return self.layers[layer]


def allocate_token_major(spec: KVCacheSpec, *, num_blocks: int, device: torch.device) -> KVCache:
    """Zero-filled keys and values of shape [num_blocks, block_size, num_kv_heads, head_dim] (reference, triton).

    An 8-bit float cache gets one float32 scale a layer for keys and one for values, both 1.
    """
    shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)

    def layer() -> LayerKV:
        key, value = (torch.zeros(shape, dtype=spec.dtype, device=device) for _ in range(2))
        if spec.dtype.itemsize > 1:
            return LayerKV(key, value)
        return LayerKV(key, value, torch.ones((), device=device), torch.ones((), device=device))

    return KVCache(spec, num_blocks, tuple(layer() for _ in range(spec.num_layers)))
