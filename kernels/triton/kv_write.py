"""Per-head RMSNorm, rotary embedding and the KV-cache write in one kernel; and whole-block copy and zero.

Rotary embedding: RoFormer (Su et al. 2021), in the "rotate half" form. QK-norm: as in Qwen3.
"""

import torch
import triton
import triton.language as tl

from kernels.layout import LayerKV
from kernels.metadata import AttentionMetadata
from kernels.ops import QkvLayout
from kernels.triton.launch import padded, scale_or_unit

HEADS_PER_PROGRAM = 8
"""Heads of one token that a program handles: 1024 elements at head dim 128."""


@triton.jit
def _store_kv(
    base: tl.tensor, x: tl.tensor, inverse_scale: float, offsets: tl.tensor, mask: tl.tensor, LIMIT: tl.constexpr
) -> None:
    """Stores float32 x in the cache's dtype. LIMIT: largest finite value of an 8-bit float, or 0 for wider dtypes."""
    if LIMIT > 0:
        # A cast to e4m3 makes NaN of what doesn't fit.
        x = tl.minimum(tl.maximum(x * inverse_scale, -LIMIT), LIMIT)
    tl.store(base + offsets, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def rope_write_kernel(
    q_out_ptr: tl.tensor,  # [T, H, D], contiguous
    key_ptr: tl.tensor,  # [num_blocks, BLOCK_SIZE, KVH, D]
    value_ptr: tl.tensor,
    qkv_ptr: tl.tensor,  # [T, (H + 2 * KVH) * D]
    q_norm_ptr: tl.tensor,  # [D]
    k_norm_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,  # f32 [max_position, 2 * HALF]
    positions_ptr: tl.tensor,  # i64 [T]
    slots_ptr: tl.tensor,  # i64 [T]
    key_scale_ptr: tl.tensor,  # f32 []
    value_scale_ptr: tl.tensor,
    eps: float,
    qkv_stride_token: int,
    key_stride_block: int,
    key_stride_token: int,
    key_stride_head: int,
    value_stride_block: int,
    value_stride_token: int,
    value_stride_head: int,
    cos_sin_stride: int,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    SCALED: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """Grid: (T, ceil((H + 2 * KVH) / HEADS)). A tile may mix q, k and v heads; each lane's masks say which it is.

    The head's dims come in three pieces: 0 .. HALF - 1 and HALF .. 2 * HALF - 1, which rotate, and the rest.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_q = (heads < NUM_HEADS)[:, None]
    is_k = ((heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS))[:, None]
    is_v = ((heads >= NUM_HEADS + NUM_KV_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS))[:, None]
    exists = is_q | is_k | is_v
    dims = tl.arange(0, HALF_PAD)
    in_half = (dims < HALF)[None, :]
    source = qkv_ptr + token * qkv_stride_token + heads[:, None] * HEAD_DIM
    first = tl.load(source + dims[None, :], mask=exists & in_half, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + dims[None, :], mask=exists & in_half, other=0.0).to(tl.float32)
    if REST_PAD > 0:
        rest_dims = 2 * HALF + tl.arange(0, REST_PAD)
        in_rest = (rest_dims < HEAD_DIM)[None, :]
        rest = tl.load(source + rest_dims[None, :], mask=exists & in_rest, other=0.0).to(tl.float32)

    if Q_NORM or K_NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if REST_PAD > 0:
            squares += tl.sum(rest * rest, axis=1)
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        if Q_NORM:
            first = tl.where(is_q, first * inverse * _row(q_norm_ptr, dims, HALF), first)
            second = tl.where(is_q, second * inverse * _row(q_norm_ptr + HALF, dims, HALF), second)
            if REST_PAD > 0:
                rest = tl.where(is_q, rest * inverse * _row(q_norm_ptr, rest_dims, HEAD_DIM), rest)
        if K_NORM:
            first = tl.where(is_k, first * inverse * _row(k_norm_ptr, dims, HALF), first)
            second = tl.where(is_k, second * inverse * _row(k_norm_ptr + HALF, dims, HALF), second)
            if REST_PAD > 0:
                rest = tl.where(is_k, rest * inverse * _row(k_norm_ptr, rest_dims, HEAD_DIM), rest)

    rotation = cos_sin_ptr + tl.load(positions_ptr + token) * cos_sin_stride
    cos = _row(rotation, dims, HALF)
    sin = _row(rotation + HALF, dims, HALF)
    turned_first = tl.where(is_v, first, first * cos - second * sin)
    turned_second = tl.where(is_v, second, second * cos + first * sin)

    q_out = q_out_ptr + token * (NUM_HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM
    dtype = q_out_ptr.dtype.element_ty
    tl.store(q_out + dims[None, :], turned_first.to(dtype), mask=is_q & in_half)
    tl.store(q_out + HALF + dims[None, :], turned_second.to(dtype), mask=is_q & in_half)
    if REST_PAD > 0:
        tl.store(q_out + rest_dims[None, :], rest.to(dtype), mask=is_q & in_rest)

    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    k_heads = heads - NUM_HEADS
    k_rows = (block * key_stride_block + offset * key_stride_token + k_heads * key_stride_head)[:, None]
    v_heads = k_heads - NUM_KV_HEADS
    v_rows = (block * value_stride_block + offset * value_stride_token + v_heads * value_stride_head)[:, None]
    k_inverse = 1.0
    v_inverse = 1.0
    if SCALED:
        k_inverse = 1.0 / tl.load(key_scale_ptr)
        v_inverse = 1.0 / tl.load(value_scale_ptr)
    _store_kv(key_ptr, turned_first, k_inverse, k_rows + dims[None, :], is_k & in_half, LIMIT)
    _store_kv(key_ptr, turned_second, k_inverse, k_rows + (HALF + dims)[None, :], is_k & in_half, LIMIT)
    _store_kv(value_ptr, turned_first, v_inverse, v_rows + dims[None, :], is_v & in_half, LIMIT)
    _store_kv(value_ptr, turned_second, v_inverse, v_rows + (HALF + dims)[None, :], is_v & in_half, LIMIT)
    if REST_PAD > 0:
        _store_kv(key_ptr, rest, k_inverse, k_rows + rest_dims[None, :], is_k & in_rest, LIMIT)
        _store_kv(value_ptr, rest, v_inverse, v_rows + rest_dims[None, :], is_v & in_rest, LIMIT)


@triton.jit
def _row(pointer: tl.tensor, dims: tl.tensor, END: tl.constexpr) -> tl.tensor:
    """float32[1, PAD] of a vector's dims below END, 0 beyond."""
    return tl.load(pointer + dims, mask=dims < END, other=0.0).to(tl.float32)[None, :]


def rope_and_write_kv(
    qkv: torch.Tensor, layout: QkvLayout, cos_sin: torch.Tensor, layer: LayerKV, meta: AttentionMetadata
) -> torch.Tensor:
    """qkv [T, (H + 2*KVH) * D], last axis contiguous -> q [T, H, D]; k and v go to their slots. See kernels.ops.

    The arithmetic is float32 throughout; q, k and v are rounded once, at the store.
    """
    num_heads, num_kv_heads, head_dim = layout.num_heads, layout.num_kv_heads, layout.head_dim
    num_tokens = qkv.shape[0]
    q = qkv.new_empty((num_tokens, num_heads, head_dim))
    half = cos_sin.shape[1] // 2
    rest = head_dim - 2 * half
    is_8bit = layer.key.dtype.itemsize == 1
    grid = (num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, HEADS_PER_PROGRAM))
    rope_write_kernel[grid](
        q, layer.key, layer.value, qkv,
        qkv if layout.q_norm is None else layout.q_norm, qkv if layout.k_norm is None else layout.k_norm,
        cos_sin, meta.positions, meta.slot_mapping,
        scale_or_unit(layer.key_scale, cos_sin), scale_or_unit(layer.value_scale, cos_sin), layout.norm_eps,
        qkv.stride(0), layer.key.stride(0), layer.key.stride(1), layer.key.stride(2),
        layer.value.stride(0), layer.value.stride(1), layer.value.stride(2), cos_sin.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        HALF=half, HALF_PAD=padded(half), REST_PAD=padded(rest) if rest else 0,
        BLOCK_SIZE=layer.key.shape[1], HEADS=HEADS_PER_PROGRAM,
        Q_NORM=layout.q_norm is not None, K_NORM=layout.k_norm is not None,
        SCALED=layer.key_scale is not None, LIMIT=torch.finfo(layer.key.dtype).max if is_8bit else 0.0,
        num_warps=max(1, HEADS_PER_PROGRAM * padded(half) // 256),  # eight elements, 16 bytes, a thread
    )  # fmt: skip
    return q


@triton.jit
def copy_blocks_kernel(
    key_ptr: tl.tensor,  # [num_blocks, elements of a block], any dtype
    value_ptr: tl.tensor,
    sources_ptr: tl.tensor,  # i64 [N], or unread
    targets_ptr: tl.tensor,  # i64 [N]
    key_stride_block: int,
    value_stride_block: int,
    elements: int,
    ZERO: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Grid: (N, ceil(elements / TILE)). A block is contiguous; ZERO writes zeros instead of a copy."""
    target = tl.load(targets_ptr + tl.program_id(0))
    lanes = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = lanes < elements
    if ZERO:
        key = tl.zeros([TILE], key_ptr.dtype.element_ty)
        value = tl.zeros([TILE], value_ptr.dtype.element_ty)
    else:
        source = tl.load(sources_ptr + tl.program_id(0))
        key = tl.load(key_ptr + source * key_stride_block + lanes, mask=mask)
        value = tl.load(value_ptr + source * value_stride_block + lanes, mask=mask)
    tl.store(key_ptr + target * key_stride_block + lanes, key, mask=mask)
    tl.store(value_ptr + target * value_stride_block + lanes, value, mask=mask)


def copy_blocks(layer: LayerKV, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies whole blocks inside one layer's cache. sources, targets: i64[N] block ids; no target is also a source."""
    _copy_or_zero(layer, sources, targets, zero=False)


def zero_blocks(layer: LayerKV, targets: torch.Tensor) -> None:
    """Fills whole blocks of one layer's cache with zeros. targets: i64[N] block ids."""
    _copy_or_zero(layer, targets, targets, zero=True)


def _copy_or_zero(layer: LayerKV, sources: torch.Tensor, targets: torch.Tensor, *, zero: bool) -> None:
    # As bytes: what an 8-bit float cache holds needs no conversion, and NaN payloads survive.
    key, value = (kv.flatten(1).view(torch.uint8) for kv in (layer.key, layer.value))
    if not len(targets):
        return
    tile = 4096
    copy_blocks_kernel[(len(targets), triton.cdiv(key.shape[1], tile))](
        key, value, sources, targets, key.stride(0), value.stride(0), key.shape[1],
        ZERO=zero, TILE=tile, num_warps=4,
    )  # fmt: skip
