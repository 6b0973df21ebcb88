"""Paged attention in which a token's bits depend on its own sequence only: one kernel for prompts, chunks and decode.

Neither the other requests of the step nor the cut of a prompt into chunks may choose how a query is computed. So there
is one kernel, compiled once a layer shape, and one order of operations for a query at position p:

    keys      0          SPLIT         2 * SPLIT        p     a split: TILE keys at a time, from the split's first key,
              |-- split 0 --|-- split 1 --|-- split 2 --|     with a softmax of its own; all tiles carry the mask
    result    ((split 0 + split 1) + split 2) ...             merged from left to right

A program with several queries (FlashAttention-2's tile, the heads of a group packed into its rows) walks all splits and
merges in registers. A request with one new token gets one program a split (Flash-Decoding), and a second kernel merges
what they leave in scratch, by the same function, in the same order. Splits and tiles that a row does not see are exact
identities: weights of 0 on sums that are finite.

Fused multiply-adds are off in both kernels: the compiler would otherwise choose, for each of them, which to fuse.
"""

import torch
import triton
import triton.language as tl

from kernels.layout import LayerKV
from kernels.metadata import AttentionMetadata
from kernels.triton.attention_tile import load_paged, scores_base2, softmax_step
from kernels.triton.launch import InvariantConfig, dot_dtype, padded, scale_or_unit
from kernels.triton.prefill_attention import request_of_tile


@triton.jit
def _splits_of_query(position: int, WINDOW: tl.constexpr, SPLIT: tl.constexpr) -> tuple[int, int]:
    """(first, end) of the splits that hold the keys a query at the position sees."""
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(position - (WINDOW - 1), 0)
    return first_key // SPLIT, position // SPLIT + 1


@triton.jit
def _merge(
    best: tl.tensor, total: tl.tensor, acc: tl.tensor, next_best: tl.tensor, next_total: tl.tensor, next_acc: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The running softmax of the splits so far and that of the next one. [ROWS], [ROWS], [ROWS, D_PAD] each.

    Merging into (-inf, 0, 0) gives the next one's very bits; merging (-inf, 0, 0) changes nothing.
    """
    new_best = tl.maximum(best, next_best)
    anchor = tl.where(new_best == float("-inf"), 0.0, new_best)  # -inf - -inf would be NaN
    decay = tl.exp2(best - anchor)
    weight = tl.exp2(next_best - anchor)
    total = total * decay + next_total * weight
    acc = acc * decay[:, None] + next_acc * weight[:, None]
    return new_best, total, acc


@triton.jit
def _finished(
    total: tl.tensor, acc: tl.tensor, value_scale_ptr: tl.tensor, SCALED: tl.constexpr, DTYPE: tl.constexpr
) -> tl.tensor:
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SCALED:
        acc *= tl.load(value_scale_ptr)
    return acc.to(DTYPE)


@triton.jit(do_not_specialize=["num_requests", "num_tiles", "most_splits", "page_table_stride"])
def invariant_kernel(
    out_ptr: tl.tensor,  # [T, H, D]
    partial_ptr: tl.tensor,  # f32 [B, most_splits, H, D]
    softmax_ptr: tl.tensor,  # f32 [B, most_splits, H, 2]: largest score, sum of weights
    q_ptr: tl.tensor,  # [T, H, D]
    key_ptr: tl.tensor,  # [num_blocks, BLOCK_SIZE, KVH, D]
    value_ptr: tl.tensor,
    key_scale_ptr: tl.tensor,  # f32 [], one figure a layer
    value_scale_ptr: tl.tensor,
    page_table_ptr: tl.tensor,  # i32 [B, W]
    query_start_ptr: tl.tensor,  # i32 [B + 1]
    seq_lens_ptr: tl.tensor,  # i32 [B]
    scale: float,
    num_requests: int,
    num_tiles: int,
    most_splits: int,
    page_table_stride: int,
    q_stride_token: int,
    q_stride_head: int,
    out_stride_token: int,
    key_stride_block: int,
    key_stride_token: int,
    key_stride_head: int,
    value_stride_block: int,
    value_stride_token: int,
    value_stride_head: int,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SCALED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
) -> None:
    """Grid: ((num_tiles + B * (most_splits - 1)) * KVH,), KV heads fastest.

    The first num_tiles work items hold queries: all splits of them, or the first alone where the request has one query.
    The others are (request, further split) and end at once unless the request has one query and that many splits.
    """
    QUERIES: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    work = tl.program_id(0) // NUM_KV_HEADS
    if work < num_tiles:
        own_split = 0
        tile = num_tiles - 1 - work  # under a causal mask the last tiles have the most work
        request = request_of_tile(query_start_ptr, num_requests, tile, QUERIES)
        first_query = (tile - (tl.load(query_start_ptr + request) // QUERIES + request)) * QUERIES
    else:
        own_split = 1 + (work - num_tiles) % (most_splits - 1)
        request = (work - num_tiles) // (most_splits - 1)
        first_query = 0
    request_start = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - request_start
    if first_query >= query_len or (own_split > 0 and query_len > 1):
        return

    seq_len = tl.load(seq_lens_ptr + request)
    first_position = seq_len - query_len + first_query
    end = tl.minimum(first_position + QUERIES, seq_len)
    first_split, _ = _splits_of_query(first_position, WINDOW, SPLIT)
    _, end_split = _splits_of_query(end - 1, WINDOW, SPLIT)
    in_parts = query_len == 1 and end_split - first_split > 1
    if query_len == 1:
        first_split += own_split
        end_split = tl.minimum(first_split + 1, end_split)
    if first_split >= end_split:
        return

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM_PAD)
    dim_mask = (dims < HEAD_DIM)[None, :]
    queries = first_query + rows // GROUP
    row_mask = (rows < QUERIES * GROUP) & (queries < query_len)
    heads = kv_head * GROUP + rows % GROUP
    tokens = request_start.to(tl.int64) + queries
    positions = first_position + rows // GROUP
    io_mask = row_mask[:, None] & dim_mask
    q_offsets = tokens * q_stride_token + heads * q_stride_head
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=io_mask, other=0.0).to(DOT_DTYPE)
    if SCALED:
        scale *= tl.load(key_scale_ptr)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(first_position - (WINDOW - 1), 0)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM_PAD], tl.float32)
    key_base = key_ptr + kv_head * key_stride_head
    value_base = value_ptr + kv_head * value_stride_head
    page_row = page_table_ptr + tl.cast(request, tl.int64) * page_table_stride
    for split in range(first_split, end_split):
        low = tl.maximum(split * SPLIT, first_key // TILE * TILE)
        high = tl.minimum((split + 1) * SPLIT, end)
        split_best = tl.full([ROWS], float("-inf"), tl.float32)
        split_total = tl.zeros([ROWS], tl.float32)
        split_acc = tl.zeros([ROWS, HEAD_DIM_PAD], tl.float32)
        for start in range(low, high, TILE):
            keys_at = start + tl.arange(0, TILE)
            live = (keys_at >= first_key) & (keys_at < high)
            blocks = tl.load(page_row + keys_at // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
            kv_mask = live[:, None] & dim_mask
            offsets = keys_at % BLOCK_SIZE
            k = load_paged(key_base, blocks, offsets, dims, kv_mask, key_stride_block, key_stride_token, DOT_DTYPE)
            scores = scores_base2(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, SOFT_CAP)
            visible = live[None, :] & (keys_at[None, :] <= positions[:, None])
            if WINDOW > 0:
                visible &= keys_at[None, :] > positions[:, None] - WINDOW
            scores = tl.where(visible, scores, float("-inf"))
            v = load_paged(
                value_base, blocks, offsets, dims, kv_mask, value_stride_block, value_stride_token, DOT_DTYPE
            )
            split_best, split_total, split_acc = softmax_step(
                scores, v, split_best, split_total, split_acc, DOT_DTYPE
            )  # fmt: skip
        best, total, acc = _merge(best, total, acc, split_best, split_total, split_acc)

    if in_parts:
        part = (tl.cast(request, tl.int64) * most_splits + own_split) * (NUM_KV_HEADS * GROUP) + heads
        tl.store(partial_ptr + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=io_mask)
        tl.store(softmax_ptr + part * 2, best, mask=row_mask)
        tl.store(softmax_ptr + part * 2 + 1, total, mask=row_mask)
    else:
        out = out_ptr + (tokens * out_stride_token + heads * HEAD_DIM)[:, None] + dims[None, :]
        tl.store(out, _finished(total, acc, value_scale_ptr, SCALED, out_ptr.dtype.element_ty), mask=io_mask)


@triton.jit(do_not_specialize=["most_splits"])
def invariant_merge_kernel(
    out_ptr: tl.tensor,  # [T, H, D]
    partial_ptr: tl.tensor,  # f32 [B, most_splits, H, D]
    softmax_ptr: tl.tensor,  # f32 [B, most_splits, H, 2]
    value_scale_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    most_splits: int,
    out_stride_token: int,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """Grid: (B, H). Merges the splits of requests with one query that have more than one."""
    request = tl.program_id(0)
    token = tl.load(query_start_ptr + request)
    if tl.load(query_start_ptr + request + 1) - token != 1:
        return
    first_split, end_split = _splits_of_query(tl.load(seq_lens_ptr + request) - 1, WINDOW, SPLIT)
    if end_split - first_split <= 1:
        return
    row = tl.program_id(1) + tl.arange(0, 1)
    dims = tl.arange(0, HEAD_DIM_PAD)
    mask = (dims < HEAD_DIM)[None, :]
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, HEAD_DIM_PAD], tl.float32)
    for split in tl.range(0, end_split - first_split, loop_unroll_factor=4):
        part = (request.to(tl.int64) * most_splits + split) * NUM_HEADS + row
        next_best = tl.load(softmax_ptr + part * 2)
        next_total = tl.load(softmax_ptr + part * 2 + 1)
        next_acc = tl.load(partial_ptr + part[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        best, total, acc = _merge(best, total, acc, next_best, next_total, next_acc)
    out = out_ptr + (token.to(tl.int64) * out_stride_token + row * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(out, _finished(total, acc, value_scale_ptr, SCALED, out_ptr.dtype.element_ty), mask=mask)


def invariant_attention(
    q: torch.Tensor,
    layer: LayerKV,
    meta: AttentionMetadata,
    out: torch.Tensor,
    *,
    scale: float,
    config: InvariantConfig,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """Attends all requests of the step.

    q: [T, H, D]. out: [T, H * D], q's dtype. layer: [num_blocks, block_size, KVH, D]. Last axes are contiguous.
    Scratch is bounded by the page table's width: H * (D + 2) floats a request and split. A captured step must pass a
    page table of constant width.
    """
    (_, num_heads, head_dim), (block_size, num_kv_heads) = q.shape, layer.key.shape[1:3]
    group = num_heads // num_kv_heads
    rows = padded(group, least=config.rows)
    num_tiles = meta.num_tokens // (rows // group) + meta.num_requests
    most_splits = -(-meta.page_table.shape[1] * block_size // config.split)
    if window:
        most_splits = min(most_splits, -(-window // config.split) + 1)
    num_work = num_tiles + meta.num_requests * (most_splits - 1)
    partial = q.new_empty((meta.num_requests, most_splits, num_heads, head_dim), dtype=torch.float32)
    softmax = q.new_empty((meta.num_requests, most_splits, num_heads, 2), dtype=torch.float32)
    value_scale = scale_or_unit(layer.value_scale, softmax)
    constants = {
        "HEAD_DIM": head_dim, "HEAD_DIM_PAD": padded(head_dim, least=16), "SPLIT": config.split, "WINDOW": window,
        "SCALED": layer.key_scale is not None, "enable_fp_fusion": False,
    }  # fmt: skip
    invariant_kernel[(num_work * num_kv_heads,)](
        out, partial, softmax, q, layer.key, layer.value, scale_or_unit(layer.key_scale, softmax), value_scale,
        meta.page_table, meta.query_start_loc, meta.seq_lens,
        scale, meta.num_requests, num_tiles, most_splits, meta.page_table.stride(0),
        q.stride(0), q.stride(1), out.stride(0), *layer.key.stride()[:3], *layer.value.stride()[:3],
        NUM_KV_HEADS=num_kv_heads, GROUP=group, BLOCK_SIZE=block_size, ROWS=rows, TILE=config.tile,
        SOFT_CAP=soft_cap, DOT_DTYPE=dot_dtype(q.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages, **constants,
    )  # fmt: skip
    if most_splits > 1:
        invariant_merge_kernel[(meta.num_requests, num_heads)](
            out, partial, softmax, value_scale, meta.query_start_loc, meta.seq_lens, most_splits, out.stride(0),
            NUM_HEADS=num_heads, num_warps=max(1, padded(head_dim) // 64), **constants,
        )  # fmt: skip
