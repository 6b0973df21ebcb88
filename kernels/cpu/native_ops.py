"""The CPU backend with compiled kernels (kernels/cpu/native), and with CpuOps where those don't reach.

They serve float32 and bfloat16, head dims that are multiples of 16 up to 512, and even block sizes. A row's result has
the same bits whatever else is in the batch, however its prompt was chunked, and with any number of threads.
"""

import ctypes
from functools import partial
from typing import Final

import numpy as np
import torch

from kernels.cpu import CpuOps
from kernels.cpu.linear import dense
from kernels.cpu.native_decoder import fuse
from kernels.cpu.native_lib import ACTIVATIONS, DTYPES, NativeLayerKV, Step, load, step_of
from kernels.cpu.native_linear import KINDS, PackedLinear, QuantizedEmbedding, keeps
from kernels.cpu.native_sampling import sample
from kernels.cpu.weight_memory import WeightMemory
from kernels.layout import KVCache, KVCacheSpec, LayerKV
from kernels.metadata import AttentionMetadata
from kernels.ops import Linear, QkvLayout, Weight

MAX_HEAD_DIM: Final = 512


class NativeOps(CpuOps):
    """kernels.ops.Ops over the compiled library."""

    name = "native"

    def __init__(self, lib: ctypes.CDLL | None = None) -> None:
        """lib: None for this machine's. Raises OSError where there is none (no compiler, no cache to write to)."""
        super().__init__()
        self.lib: Final = load() if lib is None else lib
        self.kinds: Final = frozenset(name for name, kind in KINDS.items() if self.lib.pt_quant_supported(kind))
        self.fuse_decoder = partial(fuse, self.lib)
        self.sampler = partial(sample, self.lib)
        self._memory = WeightMemory()
        self._step: tuple[AttentionMetadata, Step] | None = None  # every layer of a step passes the same metadata

    def allocate_kv_cache(self, spec: KVCacheSpec, *, num_blocks: int, device: torch.device) -> KVCache:
        """See NativeLayerKV for the layout; CpuOps' own where the compiled kernels can't serve the shape.

        Memory is reserved now and becomes resident as blocks are written.
        """
        if spec.dtype not in DTYPES or spec.block_size % 2 or spec.head_dim % 16 or spec.head_dim > MAX_HEAD_DIM:
            return super().allocate_kv_cache(spec, num_blocks=num_blocks, device=device)
        heads, dim, block = spec.num_kv_heads, spec.head_dim, spec.block_size
        key_shape: tuple[int, ...] = (num_blocks, heads, dim, block)
        value_shape: tuple[int, ...] = (num_blocks, heads, block, dim)
        if spec.dtype == torch.bfloat16:
            key_shape, value_shape = (num_blocks, heads, dim // 2, block, 2), (num_blocks, heads, block // 2, dim, 2)
        layers = [
            NativeLayerKV(_untouched_zeros(key_shape, spec.dtype), _untouched_zeros(value_shape, spec.dtype))
            for _ in range(spec.num_layers)
        ]
        return KVCache(spec, num_blocks, tuple(layers))

    def pack_linear(
        self,
        weights: list[Weight],
        bias: torch.Tensor | None,
        *,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> Linear:
        """In bfloat16, quantised weights stay so; in float32 they are dequantised: that path is exact."""
        if dtype not in DTYPES or out_dtype not in (None, *DTYPES) or _in_features(weights[0]) % 2:
            return super().pack_linear(weights, bias, dtype=dtype, out_dtype=out_dtype)
        weights = [weight if self._multiplies(weight, dtype) else dense(weight, dtype) for weight in weights]
        return PackedLinear(self.lib, weights, bias, memory=self._memory, dtype=dtype, out_dtype=out_dtype or dtype)

    def pack_embedding(self, weight: Weight, *, dtype: torch.dtype) -> Linear:
        """A quantised table stays so, in every dtype."""
        if keeps(weight) and dtype in DTYPES:
            return QuantizedEmbedding(self.lib, weight, dtype)
        return super().pack_embedding(weight, dtype=dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.dtype not in DTYPES or weight.dtype not in (x.dtype, torch.float32):
            return super().rms_norm(x, weight, eps)
        x = x.contiguous()
        out = torch.empty_like(x)
        self._norm(x, None, weight, out, eps)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes residual in place."""
        if x.dtype not in DTYPES or weight.dtype not in (x.dtype, torch.float32) or residual.dtype != x.dtype:
            return super().add_rms_norm(x, residual, weight, eps)
        x, residual = x.contiguous(), residual.contiguous()
        out = torch.empty_like(x)
        self._norm(x, residual, weight, out, eps)
        return out, residual

    def _norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor, eps: float
    ) -> None:
        size = x.shape[-1]
        self.lib.pt_norm(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.numel() // size if size else 0,
            size,
            eps,
            DTYPES[x.dtype],
            DTYPES[weight.dtype],
            torch.get_num_threads(),
        )

    def gated_activation(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        if gate_up.dtype not in DTYPES or kind not in ACTIVATIONS:
            return super().gated_activation(gate_up, kind)
        gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, size))
        self.lib.pt_gated(
            gate_up.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            ACTIVATIONS[kind],
            DTYPES[gate_up.dtype],
            torch.get_num_threads(),
        )
        return out

    def rope_and_write_kv(
        self,
        qkv: torch.Tensor,
        layout: QkvLayout,
        cos_sin: torch.Tensor,
        layer: LayerKV,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        if not isinstance(layer, NativeLayerKV):
            return super().rope_and_write_kv(qkv, layout, cos_sin, layer, meta)
        if qkv.dtype not in DTYPES:
            return self.rope_and_write_kv(qkv.float(), layout, cos_sin, layer, meta).to(qkv.dtype)
        qkv, cos_sin = qkv.contiguous(), cos_sin.contiguous()
        q_norm = None if layout.q_norm is None else layout.q_norm.float().contiguous()
        k_norm = None if layout.k_norm is None else layout.k_norm.float().contiguous()
        q = qkv.new_empty((meta.num_tokens, layout.num_heads, layout.head_dim))
        self.lib.pt_rope(
            self._step_of(meta),
            qkv.data_ptr(),
            q.data_ptr(),
            layer.key.data_ptr(),
            layer.value.data_ptr(),
            cos_sin.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            layout.norm_eps,
            cos_sin.shape[1],
            layout.num_heads,
            layout.num_kv_heads,
            layout.head_dim,
            layer.key.shape[3],
            DTYPES[qkv.dtype],
            DTYPES[layer.key.dtype],
        )
        return q

    def attention(
        self,
        q: torch.Tensor,
        layer: LayerKV,
        meta: AttentionMetadata,
        *,
        scale: float,
        num_kv_heads: int,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> torch.Tensor:
        """A cache of another dtype than q's computes in the cache's."""
        if not isinstance(layer, NativeLayerKV):
            return super().attention(
                q, layer, meta, scale=scale, num_kv_heads=num_kv_heads, window=window, soft_cap=soft_cap
            )
        rows, heads, dim = q.shape
        if q.dtype is not layer.key.dtype:
            converted = q.to(layer.key.dtype)
            return self.attention(
                converted, layer, meta, scale=scale, num_kv_heads=num_kv_heads, window=window, soft_cap=soft_cap
            ).to(q.dtype)
        q = q.contiguous()
        out = torch.empty_like(q)
        failed = self.lib.pt_attention(
            self._step_of(meta),
            q.data_ptr(),
            out.data_ptr(),
            layer.key.data_ptr(),
            layer.value.data_ptr(),
            heads,
            num_kv_heads,
            dim,
            layer.key.shape[3],
            window,
            scale,
            soft_cap,
            DTYPES[q.dtype],
        )
        if failed:
            raise MemoryError(f"no memory for the attention of {rows} tokens over {meta.max_seq_len} keys")
        return out.view(rows, heads * dim)

    def _multiplies(self, weight: Weight, dtype: torch.dtype) -> bool:
        return keeps(weight) and weight.kind in self.kinds and dtype is torch.bfloat16

    def _step_of(self, meta: AttentionMetadata) -> Step:
        if self._step is None or self._step[0] is not meta:
            self._step = (meta, step_of(meta, torch.get_num_threads()))
        return self._step[1]


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages the system hands out when they are first written (torch.zeros writes them all at once)."""
    stored = np.float32 if dtype is torch.float32 else np.uint16
    return torch.from_numpy(np.zeros(shape, stored)).view(dtype)


def _in_features(weight: Weight) -> int:
    return weight.shape[1] if isinstance(weight, torch.Tensor) else weight.in_features
