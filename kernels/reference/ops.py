"""Every operation in plain torch, float32 throughout, request by request: what the fast kernels are tested against.

Runs on any device. KV layout: key, value [num_blocks, block_size, num_kv_heads, head_dim].
"""

import torch
import torch.nn.functional as F

from kernels.layout import KVCache, KVCacheSpec, LayerKV, allocate_token_major
from kernels.metadata import AttentionMetadata
from kernels.ops import DecoderFuser, Linear, QkvLayout, Sampler, Weight


class ReferenceOps:
    """kernels.ops.Ops, readable above all. Each operation computes in float32 and rounds once, at its end."""

    name = "reference"
    sampler: Sampler | None = None
    fuse_decoder: DecoderFuser | None = None

    def allocate_kv_cache(self, spec: KVCacheSpec, *, num_blocks: int, device: torch.device) -> KVCache:
        """An 8-bit float cache gets one float32 scale a layer for keys and one for values, both 1."""
        return allocate_token_major(spec, num_blocks=num_blocks, device=device)

    def pack_linear(
        self,
        weights: list[Weight],
        bias: torch.Tensor | None,
        *,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> Linear:
        """Weights are kept in dtype, the product is taken in float32."""
        weight = torch.cat([dense(part).to(dtype) for part in weights])
        bias = None if bias is None else bias.to(dtype)

        def linear(x: torch.Tensor) -> torch.Tensor:
            return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(out_dtype or dtype)

        return linear

    def pack_embedding(self, weight: Weight, *, dtype: torch.dtype) -> Linear:
        table = dense(weight).to(dtype)
        return lambda ids: table[ids]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x32 = x.float()
        mean_square = x32.square().mean(-1, keepdim=True)
        return (x32 * torch.rsqrt(mean_square + eps) * weight.float()).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum is rounded to the activations' dtype before it is normalised: it is what the next layer adds to."""
        residual = (residual.float() + x.float()).to(residual.dtype)
        return self.rms_norm(residual, weight, eps), residual

    def rope_and_write_kv(
        self,
        qkv: torch.Tensor,
        layout: QkvLayout,
        cos_sin: torch.Tensor,
        layer: LayerKV,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        heads, kv_heads = layout.num_heads, layout.num_kv_heads
        per_head = qkv.view(-1, heads + 2 * kv_heads, layout.head_dim).float()
        q, k, v = torch.split(per_head, [heads, kv_heads, kv_heads], dim=1)  # [T, heads of each, D]
        if layout.q_norm is not None:
            q = self.rms_norm(q, layout.q_norm, layout.norm_eps)
        if layout.k_norm is not None:
            k = self.rms_norm(k, layout.k_norm, layout.norm_eps)
        rotation = cos_sin[meta.positions]  # [T, rotary_dim]
        q, k = rotate(q, rotation), rotate(k, rotation)
        write(layer.key, k, meta.slot_mapping, layer.key_scale)
        write(layer.value, v, meta.slot_mapping, layer.value_scale)
        return q.to(qkv.dtype)

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
        starts, seq_lens = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
        group = q.shape[1] // num_kv_heads
        out = torch.zeros_like(q)
        for b in range(meta.num_requests):
            rows = slice(starts[b], starts[b + 1])
            keys = read(layer.key, meta.page_table[b], seq_lens[b], layer.key_scale)  # [seq_len, KVH, D]
            values = read(layer.value, meta.page_table[b], seq_lens[b], layer.value_scale)
            keys, values = (kv.repeat_interleave(group, dim=1) for kv in (keys, values))  # [seq_len, H, D]
            scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys) * scale
            if soft_cap > 0:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            query_positions = torch.arange(seq_lens[b] - scores.shape[1], seq_lens[b], device=q.device)
            distance = query_positions[:, None] - torch.arange(seq_lens[b], device=q.device)
            visible = (distance >= 0) & (distance < window) if window > 0 else distance >= 0
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        return out.flatten(1)

    def gated_activation(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        if kind == "silu":
            activated = F.silu(gate)
        elif kind == "gelu_tanh":
            activated = F.gelu(gate, approximate="tanh")
        else:
            raise ValueError(f"unknown activation {kind!r}: silu and gelu_tanh are known")
        return (activated * up).to(gate_up.dtype)


def dense(weight: Weight) -> torch.Tensor:
    """The matrix itself, [out, in]; float32 where it was quantised."""
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize()


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """x float32[T, heads, D] with its first rotary_dim dims turned; rotation float32[T, rotary_dim]: cos | sin."""
    half = rotation.shape[-1] // 2
    cos, sin = rotation[:, None, :half], rotation[:, None, half:]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def write(cache: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None) -> None:
    """cache.flat[slots] = x / scale, for slots >= 0. cache [num_blocks, block_size, KVH, D], x float32[T, KVH, D]."""
    if scale is not None:
        limit = torch.finfo(cache.dtype).max
        x = (x / scale).clamp(-limit, limit)  # a cast to an 8-bit float makes NaN of what doesn't fit
    kept = slots >= 0
    cache.flatten(0, 1)[slots[kept]] = x[kept].to(cache.dtype)


def read(cache: torch.Tensor, blocks: torch.Tensor, seq_len: int, scale: torch.Tensor | None) -> torch.Tensor:
    """The first seq_len tokens of a request, float32[seq_len, KVH, D]. blocks: i32[W], its row of the page table."""
    needed = -(-seq_len // cache.shape[1])
    tokens = cache[blocks[:needed].long()].flatten(0, 1)[:seq_len].float()
    return tokens if scale is None else tokens * scale
