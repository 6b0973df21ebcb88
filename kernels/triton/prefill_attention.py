"""Paged attention for prompts and their chunks: varlen, causal, GQA-packed.

FlashAttention-2 (Dao 2023) over a paged cache. A program owns a tile of consecutive queries of one request, the heads
of one KV head's group packed into its rows, and walks the keys in three phases, so that only the edges pay for masks:

    keys    first visible         all visible to all rows            the diagonal        end
            |-- masked (window) --|---------- no mask ---------------|---- masked -------|

A row's arithmetic depends on its position and the tile width only (tiles start at multiples of TILE, and a fully masked
tile adds exact zeros): a prompt gives the same numbers in one piece or in chunks, but for the multiply-adds that the
compiler fuses in one phase and not in another. invariant_attention has none.
"""

import torch
import triton
import triton.language as tl

from kernels.layout import LayerKV
from kernels.metadata import AttentionMetadata
from kernels.triton.attention_tile import load_paged, scores_base2, softmax_step
from kernels.triton.launch import PrefillConfig, dot_dtype, padded, scale_or_unit


@triton.jit
def request_of_tile(query_start_ptr: tl.tensor, num_requests: int, tile: int, QUERIES: tl.constexpr) -> int:
    """The request whose queries `tile` holds: the last b with query_start[b] // QUERIES + b <= tile, by binary search.

    Request b is given the tiles from that figure on: at least as many as it needs, and the total is known to the host
    (T // QUERIES + B) though the lengths are not.
    """
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attend(
    low: int,
    high: int,
    best: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    q: tl.tensor,
    positions: tl.tensor,
    dims: tl.tensor,
    key_base: tl.tensor,
    value_base: tl.tensor,
    page_row: tl.tensor,
    seq_len: int,
    scale: float,
    key_stride_block: int,
    key_stride_token: int,
    value_stride_block: int,
    value_stride_token: int,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Folds the keys low .. high - 1 (low a multiple of TILE) into the running softmax."""
    for start in range(low, high, TILE):
        keys_at = start + tl.arange(0, TILE)
        live = keys_at < seq_len
        if MASKED:
            blocks = tl.load(page_row + keys_at // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
            kv_mask = live[:, None] & (dims < HEAD_DIM)[None, :]
        else:
            blocks = tl.load(page_row + keys_at // BLOCK_SIZE).to(tl.int64)
            kv_mask = (tl.zeros([TILE], tl.int32) == 0)[:, None] & (dims < HEAD_DIM)[None, :]
        offsets = keys_at % BLOCK_SIZE
        k = load_paged(key_base, blocks, offsets, dims, kv_mask, key_stride_block, key_stride_token, DOT_DTYPE)
        scores = scores_base2(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, SOFT_CAP)
        if MASKED:
            visible = live[None, :] & (keys_at[None, :] <= positions[:, None])
            if WINDOW > 0:
                visible &= keys_at[None, :] > positions[:, None] - WINDOW
            scores = tl.where(visible, scores, float("-inf"))
        v = load_paged(value_base, blocks, offsets, dims, kv_mask, value_stride_block, value_stride_token, DOT_DTYPE)
        best, total, acc = softmax_step(scores, v, best, total, acc, DOT_DTYPE)
    return best, total, acc


@triton.jit(do_not_specialize=["num_requests", "num_tiles", "min_query", "page_table_stride"])
def prefill_kernel(
    out_ptr: tl.tensor,  # [T, H, D]
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
    min_query: int,
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
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SCALED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
) -> None:
    """Grid: (num_tiles * KVH,). Tiles run from the last to the first: under a causal mask the last have the most work.

    Requests with fewer than min_query new tokens are left alone: the decode kernel has them.
    """
    QUERIES: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    tile = num_tiles - 1 - tl.program_id(0) // NUM_KV_HEADS
    request = request_of_tile(query_start_ptr, num_requests, tile, QUERIES)
    request_start = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - request_start
    first_query = (tile - (request_start // QUERIES + request)) * QUERIES
    if first_query >= query_len or query_len < min_query:
        return
    seq_len = tl.load(seq_lens_ptr + request)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM_PAD)
    queries = first_query + rows // GROUP
    row_mask = (rows < QUERIES * GROUP) & (queries < query_len)
    heads = kv_head * GROUP + rows % GROUP
    tokens = request_start.to(tl.int64) + queries
    first_position = seq_len - query_len + first_query
    last_position = tl.minimum(first_position + QUERIES, seq_len) - 1
    positions = first_position + rows // GROUP
    io_mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = tokens * q_stride_token + heads * q_stride_head
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=io_mask, other=0.0).to(DOT_DTYPE)
    if SCALED:
        scale *= tl.load(key_scale_ptr)

    low = 0
    windowed_end = 0
    if WINDOW > 0:
        low = tl.maximum(first_position - (WINDOW - 1), 0) // TILE * TILE
        windowed_end = (tl.maximum(last_position - (WINDOW - 1), 0) + TILE - 1) // TILE * TILE
    end = last_position + 1
    interior_end = tl.maximum((first_position + 1) // TILE * TILE, low)
    windowed_end = tl.minimum(windowed_end, interior_end)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM_PAD], tl.float32)
    key_base = key_ptr + kv_head * key_stride_head
    value_base = value_ptr + kv_head * value_stride_head
    page_row = page_table_ptr + tl.cast(request, tl.int64) * page_table_stride
    if WINDOW > 0:
        best, total, acc = _attend(
            low, windowed_end, best, total, acc, q, positions, dims, key_base, value_base, page_row, seq_len, scale,
            key_stride_block, key_stride_token, value_stride_block, value_stride_token,
            HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, SOFT_CAP, DOT_DTYPE, MASKED=True,
        )  # fmt: skip
    best, total, acc = _attend(
        tl.maximum(windowed_end, low), interior_end, best, total, acc, q, positions, dims, key_base, value_base,
        page_row, seq_len, scale, key_stride_block, key_stride_token, value_stride_block, value_stride_token,
        HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, SOFT_CAP, DOT_DTYPE, MASKED=False,
    )  # fmt: skip
    best, total, acc = _attend(
        interior_end, end, best, total, acc, q, positions, dims, key_base, value_base, page_row, seq_len, scale,
        key_stride_block, key_stride_token, value_stride_block, value_stride_token,
        HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, SOFT_CAP, DOT_DTYPE, MASKED=True,
    )  # fmt: skip

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SCALED:
        acc *= tl.load(value_scale_ptr)
    out_offsets = tokens * out_stride_token + heads * HEAD_DIM
    tl.store(out_ptr + out_offsets[:, None] + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=io_mask)


def prefill_attention(
    q: torch.Tensor,
    layer: LayerKV,
    meta: AttentionMetadata,
    out: torch.Tensor,
    *,
    scale: float,
    config: PrefillConfig,
    window: int = 0,
    soft_cap: float = 0.0,
    min_query: int = 1,
) -> None:
    """Attends the requests that have at least min_query new tokens and leaves the other rows of `out` alone.

    q: [T, H, D]. out: [T, H * D], q's dtype. layer: [num_blocks, block_size, KVH, D]. Last axes are contiguous.
    """
    num_heads, head_dim = q.shape[1], q.shape[2]
    block_size, num_kv_heads = layer.key.shape[1], layer.key.shape[2]
    group = num_heads // num_kv_heads
    rows = padded(group, least=config.rows)
    num_tiles = meta.num_tokens // (rows // group) + meta.num_requests
    prefill_kernel[(num_tiles * num_kv_heads,)](
        out, q, layer.key, layer.value,
        scale_or_unit(layer.key_scale, meta.seq_lens), scale_or_unit(layer.value_scale, meta.seq_lens),
        meta.page_table, meta.query_start_loc, meta.seq_lens,
        scale, meta.num_requests, num_tiles, min_query, meta.page_table.stride(0),
        q.stride(0), q.stride(1), out.stride(0),
        layer.key.stride(0), layer.key.stride(1), layer.key.stride(2),
        layer.value.stride(0), layer.value.stride(1), layer.value.stride(2),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, HEAD_DIM_PAD=padded(head_dim, least=16),
        BLOCK_SIZE=block_size, ROWS=rows, TILE=config.tile, WINDOW=window, SOFT_CAP=soft_cap,
        SCALED=layer.key_scale is not None, DOT_DTYPE=dot_dtype(q.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
