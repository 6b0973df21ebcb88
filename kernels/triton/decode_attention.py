"""Paged attention for requests with few new tokens: split-KV, GQA-packed.

Flash-Decoding (Dao et al. 2023) over a paged cache (PagedAttention, Kwon et al. 2023). One program attends the packed
query rows of one KV head to one *split* of one request's keys; a second kernel merges the splits by their log-sum-exp.

How many splits a request gets is decided on the device from the lengths, so the grid depends on the batch bucket alone
and a captured graph stays valid while sequences grow:

    chunk   = max(MIN_CHUNK, sum of spans * KV heads / programs wanted)     in tiles, one figure for the batch
    splits  = ceil(span / chunk)                                            per request; sum <= B + wanted / KV heads
    work item w belongs to the request whose cumulative sum of splits first exceeds w

Long requests of a ragged batch thus get most of the programs, and a request's splits, hence its bits, depend on its
company: see invariant_attention. A request with one split writes its output straight away.
"""

import torch
import triton
import triton.language as tl

from kernels.layout import LayerKV
from kernels.metadata import AttentionMetadata
from kernels.triton.attention_tile import load_paged, scores_base2, softmax_step
from kernels.triton.launch import DecodeConfig, dot_dtype, padded, scale_or_unit

MIN_CHUNK = 256
"""Tokens. Below this a split costs more than it hides."""

MAX_QUERY_LEN = 8
"""Requests with more new tokens than this are prefill."""

REQUESTS_LEAST = 32
"""The kernels are compiled for a power of two of requests, from this on."""


@triton.jit
def _splits_of_batch(
    query_start_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    num_requests: int,
    num_kv_heads: int,
    programs_wanted: int,
    MAX_QUERY: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    REQUESTS_PAD: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(requests, tiles, splits), each i32[REQUESTS_PAD]. Requests with more than MAX_QUERY tokens get no splits."""
    requests = tl.arange(0, REQUESTS_PAD)
    live = requests < num_requests
    starts = tl.load(query_start_ptr + requests, mask=live, other=0)
    query_lens = tl.load(query_start_ptr + requests + 1, mask=live, other=0) - starts
    spans = tl.load(seq_lens_ptr + requests, mask=live, other=0)
    if WINDOW > 0:
        spans = tl.minimum(spans, query_lens + (WINDOW - 1))
    spans = tl.where((query_lens > 0) & (query_lens <= MAX_QUERY), spans, 0)
    tiles = (spans + (TILE - 1)) // TILE
    wanted_tiles = (tl.sum(tiles, axis=0) * num_kv_heads + programs_wanted - 1) // programs_wanted
    chunk = tl.maximum(wanted_tiles, MIN_TILES)
    return requests, tiles, (tiles + chunk - 1) // chunk


@triton.jit(do_not_specialize=["num_requests", "programs_wanted", "page_table_stride"])
def decode_kernel(
    out_ptr: tl.tensor,  # [T, H, D]
    partial_ptr: tl.tensor,  # f32 [work items, KVH, MAX_QUERY * GROUP, D]
    lse_ptr: tl.tensor,  # f32 [work items, KVH, MAX_QUERY * GROUP], base 2
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
    programs_wanted: int,
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
    MAX_QUERY: tl.constexpr,
    REQUESTS_PAD: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SCALED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
) -> None:
    """Grid: (work items * KVH,), KV heads fastest, because neighbouring heads lie next to each other in memory.

    Row r of the tile is query r // GROUP of the request and head kv_head * GROUP + r % GROUP.
    """
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    work = tl.program_id(0) // NUM_KV_HEADS
    requests, tiles, splits = _splits_of_batch(
        query_start_ptr, seq_lens_ptr, num_requests, NUM_KV_HEADS, programs_wanted,
        MAX_QUERY, WINDOW, TILE, MIN_TILES, REQUESTS_PAD,
    )  # fmt: skip
    request = tl.sum((tl.cumsum(splits, axis=0) <= work).to(tl.int32), axis=0)
    if request >= num_requests:
        return
    chosen = requests == request
    num_splits = tl.sum(tl.where(chosen, splits, 0), axis=0)
    num_tiles = tl.sum(tl.where(chosen, tiles, 0), axis=0)
    split = work - tl.sum(tl.where(requests < request, splits, 0), axis=0)

    first_token = tl.load(query_start_ptr + request).to(tl.int64)
    query_len = (tl.load(query_start_ptr + request + 1) - first_token).to(tl.int32)
    seq_len = tl.load(seq_lens_ptr + request)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(seq_len - query_len - (WINDOW - 1), 0)
    tiles_per_split = (num_tiles + num_splits - 1) // num_splits
    low = first_key + split * tiles_per_split * TILE
    high = tl.minimum(low + tiles_per_split * TILE, seq_len)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM_PAD)
    dim_mask = dims < HEAD_DIM
    row_mask = rows < query_len * GROUP
    heads = kv_head * GROUP + rows % GROUP
    tokens = first_token + rows // GROUP
    positions = seq_len - query_len + rows // GROUP
    io_mask = row_mask[:, None] & dim_mask[None, :]
    q_offsets = tokens * q_stride_token + heads * q_stride_head
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=io_mask, other=0.0).to(DOT_DTYPE)
    if SCALED:
        scale *= tl.load(key_scale_ptr)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM_PAD], tl.float32)
    key_base = key_ptr + kv_head * key_stride_head
    value_base = value_ptr + kv_head * value_stride_head
    page_row = page_table_ptr + request.to(tl.int64) * page_table_stride
    for start in range(low, high, TILE):
        keys_at = start + tl.arange(0, TILE)
        live = keys_at < high
        blocks = tl.load(page_row + keys_at // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        kv_mask = live[:, None] & dim_mask[None, :]
        offsets = keys_at % BLOCK_SIZE
        k = load_paged(key_base, blocks, offsets, dims, kv_mask, key_stride_block, key_stride_token, DOT_DTYPE)
        scores = scores_base2(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, SOFT_CAP)
        visible = live[None, :] & (keys_at[None, :] <= positions[:, None])
        if WINDOW > 0:
            visible &= keys_at[None, :] > positions[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))
        v = load_paged(value_base, blocks, offsets, dims, kv_mask, value_stride_block, value_stride_token, DOT_DTYPE)
        best, total, acc = softmax_step(scores, v, best, total, acc, DOT_DTYPE)

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SCALED:
        acc *= tl.load(value_scale_ptr)
    if num_splits == 1:
        out_offsets = tokens * out_stride_token + heads * HEAD_DIM
        tl.store(out_ptr + out_offsets[:, None] + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=io_mask)
    else:
        partial_rows = tl.program_id(0).to(tl.int64) * (MAX_QUERY * GROUP) + rows
        tl.store(partial_ptr + partial_rows[:, None] * HEAD_DIM + dims[None, :], acc, mask=io_mask)
        # total is 0 where a window hides the whole split from this row; log2(0) = -inf is then the right weight.
        tl.store(lse_ptr + partial_rows, best + tl.log2(total), mask=row_mask)


@triton.jit(do_not_specialize=["num_requests", "programs_wanted"])
def merge_kernel(
    out_ptr: tl.tensor,  # [T, H, D]
    partial_ptr: tl.tensor,  # f32 [work items, KVH, MAX_QUERY * GROUP, D]
    lse_ptr: tl.tensor,  # f32 [work items, KVH, MAX_QUERY * GROUP], base 2
    query_start_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    num_requests: int,
    programs_wanted: int,
    out_stride_token: int,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    MAX_QUERY: tl.constexpr,
    REQUESTS_PAD: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
) -> None:
    """out = sum of 2**(lse_s - max lse) * partial_s, normalised, in order. Grid: (B, MAX_QUERY * H)."""
    request = tl.program_id(0)
    query = tl.program_id(1) // (NUM_KV_HEADS * GROUP)
    head = tl.program_id(1) % (NUM_KV_HEADS * GROUP)
    requests, _, splits = _splits_of_batch(
        query_start_ptr, seq_lens_ptr, num_requests, NUM_KV_HEADS, programs_wanted,
        MAX_QUERY, WINDOW, TILE, MIN_TILES, REQUESTS_PAD,
    )  # fmt: skip
    num_splits = tl.sum(tl.where(requests == request, splits, 0), axis=0)
    token = tl.load(query_start_ptr + request).to(tl.int64) + query
    if num_splits <= 1 or token >= tl.load(query_start_ptr + request + 1):
        return
    first_work = tl.sum(tl.where(requests < request, splits, 0), axis=0)
    row = query * GROUP + head % GROUP
    dims = tl.arange(0, HEAD_DIM_PAD)
    dim_mask = dims < HEAD_DIM

    best = float("-inf")
    total = 0.0
    acc = tl.zeros([HEAD_DIM_PAD], tl.float32)
    for start in range(0, num_splits, SPLIT_TILE):
        split = start + tl.arange(0, SPLIT_TILE)
        live = split < num_splits
        partials = ((first_work + split).to(tl.int64) * NUM_KV_HEADS + head // GROUP) * (MAX_QUERY * GROUP) + row
        lse = tl.load(lse_ptr + partials, mask=live, other=float("-inf"))
        part_mask = live[:, None] & dim_mask[None, :]
        parts = tl.load(partial_ptr + partials[:, None] * HEAD_DIM + dims[None, :], mask=part_mask, other=0.0)
        new_best = tl.maximum(best, tl.max(lse, axis=0))
        anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(lse - anchor)
        decay = tl.exp2(best - anchor)
        total = total * decay + tl.sum(weights, axis=0)
        acc = acc * decay + tl.sum(weights[:, None] * parts, axis=0)
        best = new_best
    out = out_ptr + token * out_stride_token + head * HEAD_DIM + dims
    tl.store(out, (acc / total).to(out_ptr.dtype.element_ty), mask=dim_mask)


def _grid(meta: AttentionMetadata, *, block_size: int, num_kv_heads: int, programs_wanted: int) -> tuple[int, int]:
    """(most splits of one request, most work items), from what a captured graph keeps: never from the lengths."""
    most_splits = -(-meta.page_table.shape[1] * block_size // MIN_CHUNK)
    return most_splits, meta.num_requests + min(programs_wanted // num_kv_heads, meta.num_requests * (most_splits - 1))


def decode_attention(
    q: torch.Tensor,
    layer: LayerKV,
    meta: AttentionMetadata,
    out: torch.Tensor,
    *,
    scale: float,
    config: DecodeConfig,
    num_sms: int,
    window: int = 0,
    soft_cap: float = 0.0,
    max_query: int = 1,
) -> None:
    """Attends the requests that have 1..max_query new tokens and leaves the other rows of `out` alone.

    q: [T, H, D]. out: [T, H * D], q's dtype. layer: [num_blocks, block_size, KVH, D]. Last axes are contiguous.
    Allocates its scratch, which is legal inside a graph capture; nothing syncs.
    """
    (_, num_heads, head_dim), (block_size, num_kv_heads) = q.shape, layer.key.shape[1:3]
    group, programs_wanted, key, value = num_heads // num_kv_heads, 2 * num_sms, layer.key, layer.value
    most_splits, num_work = _grid(
        meta, block_size=block_size, num_kv_heads=num_kv_heads, programs_wanted=programs_wanted
    )
    partial = q.new_empty((num_work, num_kv_heads, max_query * group, head_dim), dtype=torch.float32)
    lse = q.new_empty((num_work, num_kv_heads, max_query * group), dtype=torch.float32)
    constants = {
        "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "HEAD_DIM": head_dim, "HEAD_DIM_PAD": padded(head_dim, least=16),
        "MAX_QUERY": max_query, "REQUESTS_PAD": padded(meta.num_requests, least=REQUESTS_LEAST),
        "TILE": config.tile, "MIN_TILES": max(1, MIN_CHUNK // config.tile), "WINDOW": window,
    }  # fmt: skip
    decode_kernel[(num_work * num_kv_heads,)](
        out, partial, lse, q, key, value, scale_or_unit(layer.key_scale, lse), scale_or_unit(layer.value_scale, lse),
        meta.page_table, meta.query_start_loc, meta.seq_lens,
        scale, meta.num_requests, programs_wanted, meta.page_table.stride(0),
        q.stride(0), q.stride(1), out.stride(0), *key.stride()[:3], *value.stride()[:3],
        BLOCK_SIZE=block_size, SOFT_CAP=soft_cap, SCALED=layer.key_scale is not None, DOT_DTYPE=dot_dtype(q.dtype),
        ROWS=padded(max_query * group, least=16),
        num_warps=config.num_warps, num_stages=config.num_stages, **constants,
    )  # fmt: skip
    if most_splits > 1:
        merge_kernel[(meta.num_requests, max_query * num_heads)](
            out, partial, lse, meta.query_start_loc, meta.seq_lens, meta.num_requests, programs_wanted, out.stride(0),
            SPLIT_TILE=16, num_warps=4, **constants,
        )  # fmt: skip
