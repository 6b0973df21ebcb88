"""The compiled kernels as Python sees them: ctypes signatures and structures of kernels/cpu/native."""

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from kernels.cpu import build
from kernels.layout import LayerKV
from kernels.metadata import AttentionMetadata

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""enum DType of step.h."""
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
"""Kinds of pt_gated."""


class NativeLayerKV(LayerKV):
    """One layer's keys and values in 4-byte units: floats, or pairs of bf16 along the axis that is summed over.

    bfloat16: key [num_blocks, KVH, D / 2, block_size, 2 dims], value [num_blocks, KVH, block_size / 2, D, 2 tokens]
    float32:  key [num_blocks, KVH, D, block_size],             value [num_blocks, KVH, block_size, D]
    """

    __slots__ = ()


class Step(ctypes.Structure):
    """struct Step of step.h: AttentionMetadata by address. Keeps nothing alive: the caller holds the metadata."""

    _fields_ = (
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("page_table", c_void_p),
        ("slot_mapping", c_void_p),
        ("positions", c_void_p),
        ("page_stride", c_int64),
        ("num_requests", c_int32),
        ("num_tokens", c_int32),
        ("threads", c_int32),
    )


class Linear(ctypes.Structure):
    """struct Linear of linear.h: one matrix's part of a linear layer."""

    _fields_ = (
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("out_features", c_int64),
        ("in_features", c_int64),
        ("out_stride", c_int64),
        ("kind", c_int32),
        ("dtype", c_int32),
        ("out_dtype", c_int32),
    )


class Stack(ctypes.Structure):
    """struct Stack of decoder.cpp: one linear layer."""

    _fields_ = (("parts", POINTER(Linear)), ("count", c_int64))


class Layer(ctypes.Structure):
    """struct Layer of decoder.cpp. key, value: the newest step's KV cache."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("post_attention_norm", c_void_p),
        ("post_mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("cos_sin", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("qkv", Stack),
        ("output", Stack),
        ("gate_up", Stack),
        ("down", Stack),
        ("window", c_int32),
        ("rotary_dim", c_int32),
    )


class Decoder(ctypes.Structure):
    """struct Decoder of decoder.cpp."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        ("final_norm", c_void_p),
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("inner_size", c_int64),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("activation", c_int32),
        ("dtype", c_int32),
        ("norm_eps", c_float),
        ("head_norm_eps", c_float),
        ("attention_scale", c_float),
        ("attention_soft_cap", c_float),
    )


_STEP, _LINEAR, _DECODER = POINTER(Step), POINTER(Linear), POINTER(Decoder)
_PTR, _INT, _LONG, _FLOAT = c_void_p, c_int32, c_int64, c_float
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "pt_norm": (None, [*[_PTR] * 4, _LONG, _LONG, _FLOAT, *[_INT] * 3]),
    "pt_gated": (None, [_PTR, _PTR, _LONG, _LONG, *[_INT] * 3]),
    "pt_rope": (None, [_STEP, *[_PTR] * 7, _FLOAT, *[_INT] * 7]),
    "pt_quant_supported": (_INT, [_INT]),
    "pt_quant_bytes": (_LONG, [_INT, _LONG, _LONG]),
    "pt_quant_pack": (None, [_INT, _PTR, _PTR, _LONG, _LONG, _INT]),
    "pt_quant_linear": (_INT, [_LINEAR, _PTR, _PTR, _LONG, _INT]),
    "pt_quant_embed": (_INT, [_INT, *[_PTR] * 3, *[_LONG] * 3, _INT]),
    "pt_dense_bytes": (_LONG, [_LONG, _LONG, _INT]),
    "pt_dense_pack": (None, [_PTR, _PTR, _LONG, _LONG, _INT, _INT]),
    "pt_dense_linear": (None, [_LINEAR, _PTR, _PTR, _LONG, _INT]),
    "pt_decoder_scratch": (_LONG, [_DECODER, _LONG]),
    "pt_decoder_forward": (_INT, [_DECODER, _STEP, _PTR, _PTR, _LONG, _PTR, _PTR]),
    "pt_sample": (_INT, [_PTR, *[_LONG] * 3, *[_PTR] * 7, _INT]),
    "pt_attention": (_INT, [_STEP, *[_PTR] * 4, *[_INT] * 5, _FLOAT, _FLOAT, _INT]),
}


@cache
def load() -> ctypes.CDLL:
    """The library, built if need be; once a process. Raises kernels.cpu.build.NativeBuildError or OSError."""
    return bind(build.library())


def bind(path: Path) -> ctypes.CDLL:
    """The library at path with its signatures declared. Raises OSError."""
    lib = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    return lib


def step_of(meta: AttentionMetadata, threads: int) -> Step:
    """meta's tensors must be contiguous, but for the rows of the page table, which may be a slice's."""
    return Step(
        meta.query_start_loc.data_ptr(),
        meta.seq_lens.data_ptr(),
        meta.page_table.data_ptr(),
        meta.slot_mapping.data_ptr(),
        meta.positions.data_ptr(),
        meta.page_table.stride(0),
        meta.num_requests,
        meta.num_tokens,
        threads,
    )
