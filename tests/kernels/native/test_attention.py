"""Compiled paged attention against the float64 oracle, and its promises about bits."""

from dataclasses import replace

import pytest
import torch

from kernels.cpu.native_lib import NativeLayerKV
from kernels.cpu.native_ops import NativeOps
from kernels.layout import KVCacheSpec, LayerKV
from kernels.ops import QkvLayout
from kernels.reference import ReferenceOps
from tests.kernels.cases import (
    BATCHES,
    TOLERANCE,
    PagedCase,
    build_case,
    fill_cache,
    metadata,
    oracle,
    permuted,
    rotation,
)

DTYPES = [torch.float32, torch.bfloat16]

SHAPES = {
    "smollm": (9, 3, 64, 16),
    "mha_d80": (4, 4, 80, 16),
    "mqa_small_block": (16, 1, 128, 8),
    "d256_block32": (2, 2, 256, 32),
    "group20_block10": (20, 1, 64, 10),
    "d32_block34": (6, 2, 32, 34),
    "d16_block2": (2, 1, 16, 2),
}
"""num_heads, num_kv_heads, head_dim, block_size: groups 1..20, blocks that do and don't fill 16 lanes."""

LIMITS = [(0, 0.0), (20, 0.0), (0, 5.0), (7, 30.0)]
"""window, soft_cap."""


def attend(
    native: NativeOps, case: PagedCase, layer: LayerKV, *, window: int = 0, soft_cap: float = 0.0
) -> torch.Tensor:
    return native.attention(
        case.q,
        layer,
        case.meta,
        scale=case.scale,
        num_kv_heads=case.num_kv_heads,
        window=window,
        soft_cap=soft_cap,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_matches_the_oracle_on_a_poisoned_cache(native: NativeOps, batch: str, shape: str, dtype: torch.dtype) -> None:
    """Guards masks, block addressing, lane tails, the segment merge; NaN in an unwritten slot must never leak."""
    heads, kv_heads, dim, block = SHAPES[shape]
    case = build_case(
        BATCHES[batch], num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, block_size=block, dtype=dtype
    )
    layer = fill_cache(native, case, poison=True)
    for window, soft_cap in LIMITS:
        out = attend(native, case, layer, window=window, soft_cap=soft_cap)
        torch.testing.assert_close(out.double(), oracle(case, window=window, soft_cap=soft_cap), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_contexts_are_split_and_merged(native: NativeOps, dtype: torch.dtype) -> None:
    """Guards the split path: several chunks a request, some of them outside of the window."""
    case = build_case([(1, 1500), (2, 700), (1, 256), (1, 257)], num_heads=6, num_kv_heads=2, dtype=dtype)
    layer = fill_cache(native, case, poison=True)
    for window in (0, 300):
        out = attend(native, case, layer, window=window)
        torch.testing.assert_close(out.double(), oracle(case, window=window), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 100])
def test_bits_do_not_depend_on_company_chunking_threads_or_blocks(
    native: NativeOps, dtype: torch.dtype, window: int
) -> None:
    """Guards the fixed order of accumulation: a request's tokens must not change with who else is served."""
    pairs = [(600, 600), (1, 900), (40, 300), (1, 7), (1, 2200)]
    case = build_case(pairs, num_heads=9, num_kv_heads=3, dtype=dtype)
    layer = fill_cache(native, case)
    whole = attend(native, case, layer, window=window)
    moved = permuted(case)
    assert torch.equal(whole, attend(native, moved, fill_cache(native, moved), window=window))
    threads = torch.get_num_threads()
    torch.set_num_threads(3 if threads != 3 else 1)
    try:
        fresh = replace(case, meta=replace(case.meta))
        assert torch.equal(whole, attend(native, fresh, layer, window=window))
    finally:
        torch.set_num_threads(threads)
    starts = case.meta.query_start_loc.tolist()
    for b, (query_len, kv_len) in enumerate(pairs):
        table = case.meta.page_table[b : b + 1]
        for first, last in {
            (0, query_len),
            (query_len - 1, query_len),
            (0, query_len // 2),
            (query_len // 3, query_len),
        }:
            if last <= first:
                continue
            seen = kv_len - query_len + last
            part = replace(
                case,
                q=case.q[starts[b] + first : starts[b] + last],
                meta=metadata([(last - first, seen)], table, block_size=case.block_size),
            )
            alone = attend(native, part, layer, window=window)
            assert torch.equal(alone, whole[starts[b] + first : starts[b] + last])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary_dim", [64, 16])
def test_rope_norm_and_write_match_the_reference(
    native: NativeOps, dtype: torch.dtype, cache_dtype: torch.dtype, rotary_dim: int
) -> None:
    """Guards rotation, partial rotation, QK-norm, the cache layout and padding slots (negative: nothing is written)."""
    case = build_case(BATCHES["mixed"], num_heads=6, num_kv_heads=2, head_dim=64, dtype=dtype)
    slots = case.meta.slot_mapping.clone()
    slots[[0, 3, 19]] = -1
    meta = replace(case.meta, slot_mapping=slots)
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(meta.num_tokens, 10 * 64, generator=generator).to(dtype)
    q_norm, k_norm = (torch.rand(64, generator=generator).to(dtype) + 0.5 for _ in range(2))
    cos_sin = rotation(200, rotary_dim)
    spec = KVCacheSpec(1, 2, 64, case.block_size, cache_dtype)
    reference = ReferenceOps()
    for layout in (QkvLayout(6, 2, 64), QkvLayout(6, 2, 64, q_norm, k_norm, 1e-5)):
        ours = native.allocate_kv_cache(spec, num_blocks=case.num_blocks, device=torch.device("cpu"))[0]
        theirs = reference.allocate_kv_cache(spec, num_blocks=case.num_blocks, device=torch.device("cpu"))[0]
        q = native.rope_and_write_kv(qkv, layout, cos_sin, ours, meta)
        want = reference.rope_and_write_kv(qkv, layout, cos_sin, theirs, meta)
        torch.testing.assert_close(q, want, **TOLERANCE[dtype])
        key, value = unpacked(ours)
        tolerance = TOLERANCE[torch.float32 if dtype == cache_dtype == torch.float32 else torch.bfloat16]
        torch.testing.assert_close(key, theirs.key, **tolerance)
        torch.testing.assert_close(value, theirs.value, **tolerance)


def unpacked(layer: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
    """key, value in the reference's layout, [num_blocks, block_size, KVH, D]."""
    if layer.key.dim() == 4:
        return layer.key.permute(0, 3, 1, 2), layer.value.permute(0, 2, 1, 3)
    key = layer.key.permute(0, 3, 1, 2, 4).flatten(3)  # [n, KVH, D/2, block, 2] -> [n, block, KVH, D/2 * 2]
    value = layer.value.permute(0, 2, 4, 1, 3).flatten(1, 2)  # [n, KVH, block/2, D, 2] -> [n, block, KVH, D]
    return key, value


@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
def test_a_cache_of_another_dtype_serves(native: NativeOps, cache_dtype: torch.dtype) -> None:
    """Guards float32 activations over a bfloat16 cache and the reverse."""
    other = torch.float32 if cache_dtype == torch.bfloat16 else torch.bfloat16
    case = build_case(BATCHES["mixed"], dtype=cache_dtype)
    layer = fill_cache(native, case)
    mixed = replace(case, q=case.q.to(other))
    out = attend(native, mixed, layer)
    assert out.dtype == other
    torch.testing.assert_close(out.double(), oracle(mixed), **TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize(("head_dim", "block_size", "dtype"), [(24, 16, torch.float32), (64, 1, torch.bfloat16)])
def test_shapes_out_of_reach_fall_back(native: NativeOps, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    """Guards the torch path for what the compiled kernels don't take: the layout must follow the path."""
    case = build_case(BATCHES["mixed"], head_dim=head_dim, block_size=block_size, dtype=dtype)
    layer = fill_cache(native, case, poison=True)
    assert not isinstance(layer, NativeLayerKV)
    torch.testing.assert_close(attend(native, case, layer).double(), oracle(case), **TOLERANCE[dtype])
