"""All layers of a step in one call of the compiled library: native/decoder.cpp."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch

from kernels.cpu.native_lib import ACTIVATIONS, DTYPES, Decoder, Layer, NativeLayerKV, Stack, step_of
from kernels.cpu.native_lib import Linear as Part
from kernels.cpu.native_linear import PackedLinear
from kernels.layout import KVCache
from kernels.metadata import AttentionMetadata
from kernels.ops import DecoderLayer, DecoderPlan, Linear, QkvLayout

ALIGNMENT: Final = 64


def fuse(lib: ctypes.CDLL, plan: DecoderPlan) -> "NativeDecoder | None":
    """None for a plan with another dtype, a linear layer that isn't packed for the library, or shapes that disagree."""
    return NativeDecoder(lib, plan) if _within_reach(plan) else None


class NativeDecoder:
    """kernels.ops.FusedDecoder. Written by: one thread.

    Keeps alive what the library's structures point to: the plan, the newest cache, and the scratch memory, which grows
    to what the largest step so far needed.
    """

    def __init__(self, lib: ctypes.CDLL, plan: DecoderPlan) -> None:
        """plan: _within_reach."""
        self._lib = lib
        self._plan = plan
        self._kept: list[torch.Tensor | ctypes.Array[Part]] = []
        self._cache: KVCache | None = None
        self._scratch = np.empty(0, np.uint8)
        self._scratch_rows = self._scratch_address = 0
        first = plan.layers[0]
        layout = first.qkv_layout
        self._layers = (Layer * len(plan.layers))(*(self._layer(layer) for layer in plan.layers))
        self._decoder = Decoder(
            layers=self._layers,
            final_norm=plan.final_norm.data_ptr(),
            num_layers=len(plan.layers),
            hidden_size=plan.final_norm.numel(),
            inner_size=_packed(first.down).in_features,
            num_heads=layout.num_heads,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            activation=ACTIVATIONS[plan.activation],
            dtype=DTYPES[plan.dtype],
            norm_eps=plan.norm_eps,
            head_norm_eps=layout.norm_eps,
            attention_scale=plan.attention_scale,
            attention_soft_cap=plan.attention_soft_cap,
        )

    def __call__(
        self, x: torch.Tensor, meta: AttentionMetadata, cache: KVCache, rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Raises MemoryError."""
        if cache is not self._cache and not self._bind(cache):
            return None
        hidden_size = self._decoder.hidden_size
        if x.dtype is not self._plan.dtype or x.shape != (meta.num_tokens, hidden_size):
            raise ValueError(
                f"expected {self._plan.dtype}[{meta.num_tokens}, {hidden_size}], got {x.dtype}{[*x.shape]}"
            )
        x = x.contiguous()
        if rows is not None:
            rows = rows.to(torch.int64).contiguous()
        count = meta.num_tokens if rows is None else rows.numel()
        out = x.new_empty((count, hidden_size))
        result = self._lib.pt_decoder_forward(
            self._decoder,
            step_of(meta, torch.get_num_threads()),
            x.data_ptr(),
            None if rows is None else rows.data_ptr(),
            count,
            self._scratch_for(max(count, meta.num_tokens)),
            out.data_ptr(),
        )
        if result == 2:
            raise IndexError(f"a wanted row is outside of [0, {meta.num_tokens})")
        if result:
            raise MemoryError(f"no memory for a step of {meta.num_tokens} tokens over {meta.max_seq_len} keys")
        return out

    def _bind(self, cache: KVCache) -> bool:
        """Points the layers to the cache. False where its layout is not the library's."""
        spec, decoder = cache.spec, self._decoder
        shape = (spec.dtype, spec.num_layers, spec.num_kv_heads, spec.head_dim)
        if shape != (self._plan.dtype, decoder.num_layers, decoder.num_kv_heads, decoder.head_dim):
            return False
        if not all(isinstance(layer, NativeLayerKV) for layer in cache.layers):
            return False
        self._cache = cache
        decoder.block_size = spec.block_size
        for native, layer in zip(self._layers, cache.layers, strict=True):
            native.key, native.value = layer.key.data_ptr(), layer.value.data_ptr()
        return True

    def _scratch_for(self, rows: int) -> int:
        """The address of memory for a step of so many rows."""
        if rows > self._scratch_rows:
            self._scratch = np.empty(self._lib.pt_decoder_scratch(self._decoder, rows) + ALIGNMENT, np.uint8)
            self._scratch_address = -(-self._scratch.ctypes.data // ALIGNMENT) * ALIGNMENT
            self._scratch_rows = rows
        return self._scratch_address

    def _layer(self, layer: DecoderLayer) -> Layer:
        cos_sin = self._plan.local_cos_sin if layer.local_rope else self._plan.cos_sin
        return Layer(
            input_norm=layer.input_norm.data_ptr(),
            mlp_norm=layer.mlp_norm.data_ptr(),
            post_attention_norm=_address(layer.post_attention_norm),
            post_mlp_norm=_address(layer.post_mlp_norm),
            q_norm=self._floats(layer.qkv_layout.q_norm),
            k_norm=self._floats(layer.qkv_layout.k_norm),
            cos_sin=self._floats(cos_sin),
            qkv=self._stack(layer.qkv),
            output=self._stack(layer.output),
            gate_up=self._stack(layer.gate_up),
            down=self._stack(layer.down),
            window=layer.window,
            rotary_dim=cos_sin.shape[1],
        )

    def _floats(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        kept = tensor.float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def _stack(self, linear: Linear) -> Stack:
        parts = _packed(linear).parts
        array = (Part * len(parts))(*parts)
        self._kept.append(array)
        return Stack(array, len(parts))


def _within_reach(plan: DecoderPlan) -> bool:
    if plan.dtype not in DTYPES or plan.activation not in ACTIVATIONS or not plan.layers:
        return False
    first, hidden = plan.layers[0], plan.final_norm.numel()
    return (
        _is_vector(plan.final_norm, hidden, plan.dtype)
        and all(
            _same_shape(layer.qkv_layout, first.qkv_layout)
            and all(_is_vector(norm, hidden, plan.dtype) for norm in _norms(layer))
            and _linears_fit(layer, hidden, plan.dtype)
            for layer in plan.layers
        )
        and len({_packed(layer.down).in_features for layer in plan.layers}) == 1
    )


def _linears_fit(layer: DecoderLayer, hidden: int, dtype: torch.dtype) -> bool:
    linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
    packed = [linear for linear in linears if isinstance(linear, PackedLinear)]
    if len(packed) < len(linears) or any({linear.dtype, linear.out_dtype} != {dtype} for linear in packed):
        return False
    layout, inner = layer.qkv_layout, packed[3].in_features
    q_size, kv_size = layout.num_heads * layout.head_dim, layout.num_kv_heads * layout.head_dim
    shapes = [(linear.in_features, linear.out_features) for linear in packed]
    return shapes == [(hidden, q_size + 2 * kv_size), (q_size, hidden), (hidden, 2 * inner), (inner, hidden)]


def _norms(layer: DecoderLayer) -> Iterator[torch.Tensor]:
    yield layer.input_norm
    yield layer.mlp_norm
    yield from (norm for norm in (layer.post_attention_norm, layer.post_mlp_norm) if norm is not None)


def _is_vector(tensor: torch.Tensor, size: int, dtype: torch.dtype) -> bool:
    return tensor.dtype is dtype and tensor.shape == (size,) and tensor.is_contiguous() and tensor.is_cpu


def _same_shape(layout: QkvLayout, other: QkvLayout) -> bool:
    def shape(one: QkvLayout) -> Sequence[float]:
        return one.num_heads, one.num_kv_heads, one.head_dim, one.norm_eps

    return shape(layout) == shape(other)


def _packed(linear: Linear) -> PackedLinear:
    assert isinstance(linear, PackedLinear)
    return linear


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
