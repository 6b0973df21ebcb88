"""Attention over the paged cache by torch calls, as a step's plan lays them out."""

import torch
import torch.nn.functional as F

from kernels.cpu.step import AttentionPlan, DecodeGroup, ExtendRequest
from kernels.layout import LayerKV


def paged_attention(
    q: torch.Tensor, layer: LayerKV, plan: AttentionPlan, *, scale: float, soft_cap: float
) -> torch.Tensor:
    """q [T, H, D], layer as kernels.cpu says -> [T, H * D]."""
    out = torch.empty(q.shape, dtype=q.dtype)
    for group in plan.decodes:
        _decode(q, layer, group, out, scale=scale, soft_cap=soft_cap)
    for extend in plan.extends:
        _extend(q, layer, extend, plan.extend_mask, out, scale=scale, soft_cap=soft_cap)
    return out.flatten(1)


def _decode(
    q: torch.Tensor, layer: LayerKV, group: DecodeGroup, out: torch.Tensor, *, scale: float, soft_cap: float
) -> None:
    _, num_kv_heads, _, head_dim = layer.key.shape
    num_requests, num_heads = len(group.rows), q.shape[1]
    # A GQA group's heads ask the same keys, so they stand where SDPA expects the queries of one head.
    queries = q.index_select(0, group.rows).view(num_requests, num_kv_heads, -1, head_dim)
    keys, values = _gather(layer.key, group.runs, q.dtype), _gather(layer.value, group.runs, q.dtype)
    for kv in (keys, values):
        kv.view(-1, head_dim).index_fill_(0, group.unused, 0)  # 0 * NaN is NaN: the mask alone doesn't hide values
    shape = (num_requests, num_kv_heads, group.kv_len, head_dim)
    attended = attend(queries, keys.view(shape), values.view(shape), group.mask, scale=scale, soft_cap=soft_cap)
    out.index_copy_(0, group.rows, attended.reshape(num_requests, num_heads, head_dim))


def _extend(
    q: torch.Tensor,
    layer: LayerKV,
    extend: ExtendRequest,
    mask: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    soft_cap: float,
) -> None:
    _, num_kv_heads, _, head_dim = layer.key.shape
    group = q.shape[1] // num_kv_heads
    keys, values = (
        _gather(cache, extend.runs, q.dtype).view(num_kv_heads, 1, -1, head_dim).expand(-1, group, -1, -1)
        for cache in (layer.key, layer.value)
    )
    for tile in extend.tiles:
        num_queries, num_keys = tile.end - tile.start, tile.last - tile.first
        queries = q[tile.start : tile.end].reshape(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        k, v = keys[:, :, tile.first : tile.last], values[:, :, tile.first : tile.last]
        corner = mask[len(mask) - num_queries :, mask.shape[1] - num_keys :]
        attended = attend(queries, k, v, corner[None, None], scale=scale, soft_cap=soft_cap)
        out[tile.start : tile.end] = attended.permute(2, 0, 1, 3).flatten(1, 2)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, *, scale: float, soft_cap: float
) -> torch.Tensor:
    """q [..., Q, D], k, v [..., L, D], mask [..., Q, L] added to the scores -> [..., Q, D]. Softmax in float32."""
    if soft_cap == 0.0:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)).mul_(scale / soft_cap).tanh_().mul_(soft_cap)
    return torch.matmul(scores.add_(mask).softmax(-1), v.float()).to(q.dtype)


def _gather(cache: torch.Tensor, runs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[len(runs), block_size * D]: whole runs of one block and head."""
    num_blocks, num_kv_heads, block_size, head_dim = cache.shape
    return cache.view(num_blocks * num_kv_heads, block_size * head_dim).index_select(0, runs).to(dtype)
