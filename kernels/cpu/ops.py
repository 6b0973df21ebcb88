"""kernels.ops for CPUs out of torch calls alone: few of them a layer, none of them over single tokens or requests."""

import torch
import torch.nn.functional as F

from kernels.cpu import linear
from kernels.cpu.attention import paged_attention
from kernels.cpu.step import AttentionShape, Step
from kernels.layout import KVCache, KVCacheSpec, LayerKV
from kernels.metadata import AttentionMetadata
from kernels.ops import DecoderFuser, Linear, QkvLayout, Sampler, Weight


class CpuOps:
    """Rows don't see each other: a request's padding and grouping follow from its own length.

    The last bits of a result may still depend on the batch where the BLAS that torch calls picks another algorithm for
    another shape. Written by: one thread (it remembers what it derived from the last step's metadata).
    """

    name = "cpu"
    sampler: Sampler | None = None
    fuse_decoder: DecoderFuser | None = None

    def __init__(self) -> None:
        self._last_step: Step | None = None

    def allocate_kv_cache(self, spec: KVCacheSpec, *, num_blocks: int, device: torch.device) -> KVCache:
        """Raises ValueError for an 8-bit cache: reading one here costs more than it saves."""
        if spec.dtype.itemsize == 1:
            raise ValueError(f"the CPU backend has no KV cache of {spec.dtype}: leave it at auto, or use a GPU")
        shape = (num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
        layers = (
            LayerKV(*(torch.zeros(shape, dtype=spec.dtype, device=device) for _ in range(2)))
            for _ in range(spec.num_layers)
        )
        return KVCache(spec, num_blocks, tuple(layers))

    def pack_linear(
        self,
        weights: list[Weight],
        bias: torch.Tensor | None,
        *,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> Linear:
        """A wider out_dtype gains no bits here: oneDNN rounds to dtype first."""
        layer = linear.pack_linear(weights, bias, dtype=dtype)
        return layer if out_dtype in (None, dtype) else lambda x: layer(x).to(out_dtype)

    def pack_embedding(self, weight: Weight, *, dtype: torch.dtype) -> Linear:
        return linear.pack_embedding(weight, dtype=dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps), residual

    def rope_and_write_kv(
        self,
        qkv: torch.Tensor,
        layout: QkvLayout,
        cos_sin: torch.Tensor,
        layer: LayerKV,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        step = self._derived(meta)
        num_rotated = layout.num_heads + layout.num_kv_heads
        per_head = qkv.view(-1, num_rotated + layout.num_kv_heads, layout.head_dim)
        qk, v = per_head[:, :num_rotated], per_head[:, num_rotated:]
        if layout.q_norm is not None or layout.k_norm is not None:
            qk = self._norm_heads(qk, layout)

        rotation = step.rotation(cos_sin)
        rotary_dim = cos_sin.shape[1]
        rotating = qk[..., :rotary_dim].float()
        rotated = torch.addcmul(rotating * rotation.cos, rotating.roll(rotary_dim // 2, -1), rotation.sin).to(qkv.dtype)
        if rotary_dim < layout.head_dim:
            rotated = torch.cat([rotated, qk[..., rotary_dim:]], dim=-1)

        index = step.write_index(layer.key.shape[2])
        k = rotated[:, layout.num_heads :]
        if index.kept is not None:
            k, v = k[index.kept], v[index.kept]
        layer.key[index.blocks, :, index.offsets] = k.to(layer.key.dtype)
        layer.value[index.blocks, :, index.offsets] = v.to(layer.value.dtype)
        return rotated[:, : layout.num_heads]

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
        shape = AttentionShape(layer.key.shape[2], num_kv_heads, window, q.dtype)
        return paged_attention(q, layer, self._derived(meta).plan(shape), scale=scale, soft_cap=soft_cap)

    def gated_activation(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if kind == "silu":
            return F.silu(gate).mul_(up)
        if kind == "gelu_tanh":
            return F.gelu(gate, approximate="tanh").mul_(up)
        raise ValueError(f"unknown activation {kind!r}: silu and gelu_tanh are known")

    def _norm_heads(self, qk: torch.Tensor, layout: QkvLayout) -> torch.Tensor:
        q, k = qk[:, : layout.num_heads], qk[:, layout.num_heads :]
        if layout.q_norm is not None:
            q = self.rms_norm(q, layout.q_norm, layout.norm_eps)
        if layout.k_norm is not None:
            k = self.rms_norm(k, layout.k_norm, layout.norm_eps)
        return torch.cat([q, k], dim=1)

    def _derived(self, meta: AttentionMetadata) -> Step:
        """The index tensors of meta, which all layers of a step share."""
        if self._last_step is None or self._last_step.meta is not meta:
            self._last_step = Step(meta)
        return self._last_step
