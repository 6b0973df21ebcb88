"""The one decoder: a ModelSpec says what differs between families, kernels.ops says how each step is computed.

Shapes: T tokens of this step, C hidden size, H heads, KVH key/value heads, D head dim, I MLP size, V vocabulary.
"""

import torch

from kernels.layout import KVCache
from kernels.metadata import AttentionMetadata
from kernels.ops import DecoderLayer, DecoderPlan, FusedDecoder, Linear, Ops
from server.models.rope import rope_table
from server.models.spec import ModelSpec


class Decoder:
    """A loaded model. Holds no state between steps: the KV cache is the caller's.

    Where the backend has a form of all layers in one call, steps go that way; `layer_by_layer` says what is computed.
    weight_bytes: what the weights take in memory. Written by: the loader.
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        ops: Ops,
        dtype: torch.dtype,
        embed: Linear,
        layers: list[DecoderLayer],
        final_norm: torch.Tensor,
        lm_head: Linear,
        freq_factors: torch.Tensor | None,
        device: torch.device,
        weight_bytes: int,
    ) -> None:
        """freq_factors: see rope.rope_table."""
        self.spec = spec
        self.ops = ops
        self.dtype = dtype
        self.weight_bytes = weight_bytes
        self._embed = embed
        self._layers = layers
        self._final_norm = final_norm
        self._lm_head = lm_head
        self._freq_factors = freq_factors
        self._device = device
        self._cos_sin = self._local_cos_sin = torch.empty(0)
        self._fused: FusedDecoder | None = None
        self.prepare_positions(1)

    def prepare_positions(self, num_positions: int) -> None:
        """Computes RoPE for so many positions; `forward` takes none beyond. A context of millions is a table of
        gigabytes, so this waits until it is known how many the KV cache holds."""
        spec = self.spec
        self._cos_sin = rope_table(spec.rope, num_positions, freq_factors=self._freq_factors).to(self._device)
        local = None if spec.local_rope is None else rope_table(spec.local_rope, num_positions).to(self._device)
        self._local_cos_sin = self._cos_sin if local is None else local
        self._fused = None if self.ops.fuse_decoder is None else self.ops.fuse_decoder(self._plan())

    def _plan(self) -> DecoderPlan:
        return DecoderPlan(
            layers=tuple(self._layers),
            final_norm=self._final_norm,
            cos_sin=self._cos_sin,
            local_cos_sin=self._local_cos_sin,
            dtype=self.dtype,
            norm_eps=self.spec.norm_eps,
            activation=self.spec.activation,
            attention_scale=self.spec.attention_scale,
            attention_soft_cap=self.spec.attention_soft_cap,
        )

    def forward(
        self, token_ids: torch.Tensor, meta: AttentionMetadata, cache: KVCache, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One step: writes the KV of every token and returns normed hidden states.

        token_ids: i64[T]. rows: i64[S], the tokens whose hidden states are wanted; None for all.
        Returns [S, C] (or [T, C]) in dtype, ready for `logits`.
        """
        x = self._embed(token_ids)  # [T, C]
        if self.spec.embedding_scale != 1.0:
            x = x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype)
        hidden = None if self._fused is None else self._fused(x, meta, cache, rows)
        return self.layer_by_layer(x, meta, cache, rows) if hidden is None else hidden

    def layer_by_layer(
        self, x: torch.Tensor, meta: AttentionMetadata, cache: KVCache, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """`forward` from the embedded tokens x [T, C] on, operation by operation. x may be written to."""
        spec, ops = self.spec, self.ops
        residual = x
        x = ops.rms_norm(residual, self._layers[0].input_norm, spec.norm_eps)
        for index, layer in enumerate(self._layers):
            if index > 0:
                x, residual = ops.add_rms_norm(x, residual, layer.input_norm, spec.norm_eps)
            x = self._attention(x, layer, meta, cache, index)  # [T, H * D]
            if rows is not None and index == spec.num_layers - 1:
                x, residual = x.index_select(0, rows), residual.index_select(0, rows)  # the rest needs no more than KV
            x = layer.output(x)  # [T, C]
            if layer.post_attention_norm is not None:
                x = ops.rms_norm(x, layer.post_attention_norm, spec.norm_eps)
            x, residual = ops.add_rms_norm(x, residual, layer.mlp_norm, spec.norm_eps)
            x = layer.down(ops.gated_activation(layer.gate_up(x), spec.activation))  # [T, 2 * I] -> [T, I] -> [T, C]
            if layer.post_mlp_norm is not None:
                x = ops.rms_norm(x, layer.post_mlp_norm, spec.norm_eps)
        x, _ = ops.add_rms_norm(x, residual, self._final_norm, spec.norm_eps)
        return x

    def _attention(
        self, x: torch.Tensor, layer: DecoderLayer, meta: AttentionMetadata, cache: KVCache, index: int
    ) -> torch.Tensor:
        """[T, C] -> [T, H * D], before the output projection."""
        qkv = layer.qkv(x)  # [T, (H + 2 * KVH) * D]
        cos_sin = self._local_cos_sin if layer.local_rope else self._cos_sin
        q = self.ops.rope_and_write_kv(qkv, layer.qkv_layout, cos_sin, cache[index], meta)  # [T, H, D]
        return self.ops.attention(
            q,
            cache[index],
            meta,
            scale=self.spec.attention_scale,
            num_kv_heads=self.spec.num_kv_heads,
            window=layer.window,
            soft_cap=self.spec.attention_soft_cap,
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, C] -> float32[S, V]."""
        logits = self._lm_head(hidden).float()
        cap = self.spec.logit_soft_cap
        return logits if cap == 0.0 else torch.tanh(logits / cap) * cap
