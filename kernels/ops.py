"""The operations that a decoder needs, as one interface. kernels.backend chooses who implements it, once, at start.

kernels.reference is the oracle: plain torch, float32 accumulation, no cleverness. Every other implementation is tested
against it. Shapes: T tokens of this step, B requests, H query heads, KVH key/value heads, D head dim, C hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.layout import KVCache, KVCacheSpec, LayerKV
from kernels.metadata import AttentionMetadata

Linear = Callable[[torch.Tensor], torch.Tensor]
"""[T, in_features] -> [T, out_features], activations' dtype in, and out unless told otherwise."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A GGUF-quantised matrix as it lies in the file. A backend may keep it so or dequantise it.

    blocks: uint8[out_features, bytes_per_row], the file's own block encoding. kind: "Q4_0", "Q4_1", "Q8_0", ...
    """

    blocks: torch.Tensor
    kind: str
    out_features: int
    in_features: int
    dequantize: Callable[[], torch.Tensor]
    """-> float32[out_features, in_features]."""


Weight = torch.Tensor | QuantizedWeight


@dataclass(frozen=True, slots=True)
class QkvLayout:
    """How a merged projection's output splits, and what happens to q and k before they are used.

    q_norm, k_norm: [D] weights of a per-head RMSNorm before RoPE (Qwen3), or None.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's packed weights. Norm weights are [C] in the activations' dtype.

    local_rope: whether the plan's local table is this layer's. window: see Ops.attention.
    post_attention_norm, post_mlp_norm: only where the family norms what it adds to the residual (Gemma 3).
    """

    input_norm: torch.Tensor
    qkv: Linear
    qkv_layout: QkvLayout
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    local_rope: bool
    window: int
    post_attention_norm: torch.Tensor | None = None
    post_mlp_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """All layers, from the embedded tokens to the normed hidden states.

    cos_sin, local_cos_sin: see Ops.rope_and_write_kv. dtype: of the activations and the norm weights. activation: see
    Ops.gated_activation.
    """

    layers: tuple[DecoderLayer, ...]
    final_norm: torch.Tensor
    cos_sin: torch.Tensor
    local_cos_sin: torch.Tensor
    dtype: torch.dtype
    norm_eps: float
    activation: str
    attention_scale: float
    attention_soft_cap: float


class FusedDecoder(Protocol):
    """A whole plan in one call, with the bits of its operations called one by one."""

    def __call__(
        self, x: torch.Tensor, meta: AttentionMetadata, cache: KVCache, rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Writes the keys and values of all T tokens. Returns the normed hidden states [S, C] of the wanted ones, or
        None, having written nothing, where this cache is not one that it serves.

        x: [T, C], the embedded tokens; may be written to. rows: i64[S], or None for all. Raises IndexError for a row
        that is not in [0, T).
        """


DecoderFuser = Callable[[DecoderPlan], FusedDecoder | None]
"""None for a plan that is not within its reach. What it makes keeps the plan and the last cache alive, and serves one
thread at a time."""


class Sampler(Protocol):
    """From logits to tokens in one launch."""

    def __call__(
        self,
        logits: torch.Tensor,
        *,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """One token a row, i64[S]; -1 where no logit is finite or one is NaN or +inf.

        logits: [S, V], left as they are. temperature (0: greedy, ties to the lowest id), top_p, min_p: f32[S]. top_k:
        i32[S], <= 0 is off. seeds, positions: i64[S]; a token depends on its row's values only.
        """


class Ops(Protocol):
    """Weights that an implementation repacked live in what pack_* returned. At most it remembers what it derived from
    the newest step's metadata, which all layers share: one thread at a time.

    sampler: None where the server's own sampler is to choose the tokens.
    fuse_decoder: None where a decoder is to call the operations one by one.
    """

    name: str
    sampler: Sampler | None
    fuse_decoder: DecoderFuser | None

    def allocate_kv_cache(self, spec: KVCacheSpec, *, num_blocks: int, device: torch.device) -> KVCache:
        """Zero-filled cache of num_blocks blocks, the null block included."""

    def pack_linear(
        self,
        weights: list[Weight],
        bias: torch.Tensor | None,
        *,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> Linear:
        """One linear layer whose output rows are the given matrices' stacked (merged QKV, merged gate/up).

        weights: each [out_i, in]. bias: [sum of out_i] or None. dtype: of the activations. out_dtype: of the result if
        another; logits want the float32 sums: in bfloat16 the best two are equal too often. The arguments may be freed
        afterwards.
        """

    def pack_embedding(self, weight: Weight, *, dtype: torch.dtype) -> Linear:
        """Returns ids i64[T] -> [T, C] in dtype."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [T, C] -> [T, C]. Statistics in float32."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """residual += x; returns (rms_norm(residual), residual). May write residual in place."""

    def rope_and_write_kv(
        self,
        qkv: torch.Tensor,
        layout: QkvLayout,
        cos_sin: torch.Tensor,
        layer: LayerKV,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """Splits qkv [T, (H + 2*KVH) * D], norms and rotates q and k, writes k and v to their slots -> q [T, H, D].

        cos_sin: float32[max_position, rotary_dim]: cos in the first half of the last axis, sin in the second, each
        rotary_dim // 2 wide. Rotation is "rotate half" (the NeoX/Hugging Face form) over the first rotary_dim dims.
        """

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
        """Causal attention of this step's queries over the paged keys and values; q [T, H, D] -> [T, H * D].

        window: 0 is full; w > 0 sees keys p - w + 1 .. p. soft_cap: 0 is off; c > 0 applies c * tanh(score / c).
        """

    def gated_activation(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        """[T, 2*I] -> [T, I]: act(gate) * up. kind: "silu" or "gelu_tanh"."""
