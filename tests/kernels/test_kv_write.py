"""RoPE, per-head norms and the write into the cache, of the backends in plain torch."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from kernels.layout import KVCacheSpec, LayerKV
from kernels.ops import Ops, QkvLayout
from tests.kernels.cases import BATCHES, TOLERANCE, PagedCase, build_case, rotation

HEADS, KV_HEADS, DIM = 6, 2, 64
DTYPES = [torch.float32, torch.bfloat16]


def filled_layer(ops: Ops, case: PagedCase, *, fill: float = 7.0, dtype: torch.dtype = torch.float32) -> LayerKV:
    spec = KVCacheSpec(1, KV_HEADS, DIM, case.block_size, dtype)
    layer = ops.allocate_kv_cache(spec, num_blocks=case.num_blocks, device=torch.device("cpu"))[0]
    layer.key.fill_(fill)
    layer.value.fill_(fill)
    return layer


def by_slot(ops: Ops, cache: torch.Tensor) -> torch.Tensor:
    """The cache as [num_slots, KVH, D], whatever the backend's layout."""
    return (cache.transpose(1, 2) if ops.name == "cpu" else cache).flatten(0, 1)


def projections(case: PagedCase, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(case.meta.num_tokens, (HEADS + 2 * KV_HEADS) * DIM, generator=generator).to(dtype)


def turned(x: torch.Tensor, positions: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """RoPE as the multiplication of complex numbers, float64: dims i and i + rotary_dim / 2 are one number."""
    half = rotary_dim // 2
    z = torch.complex(x[..., :half].double(), x[..., half:rotary_dim].double())
    angle = positions[:, None].double() * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    z = z * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([z.real, z.imag, x[..., rotary_dim:].double()], dim=-1)


def normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return x
    return x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16"])
@pytest.mark.parametrize("rotary_dim", [16, 48, 64])
@pytest.mark.parametrize("norms", ["none", "q", "k", "both"])
def test_rotates_norms_and_stores(ops: Ops, norms: str, rotary_dim: int, dtype: torch.dtype) -> None:
    """Interleaved rotation; a chunk's positions counted from 0; norm after RoPE; dims past rotary_dim."""
    case = build_case(BATCHES["mixed"], num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, seed=1)
    qkv, layer = projections(case, dtype), filled_layer(ops, case, dtype=dtype)
    q_norm = torch.linspace(0.5, 1.5, DIM).to(dtype) if norms in ("q", "both") else None
    k_norm = torch.linspace(1.5, 0.5, DIM).to(dtype) if norms in ("k", "both") else None
    layout = QkvLayout(HEADS, KV_HEADS, DIM, q_norm, k_norm, norm_eps=1e-3)
    out = ops.rope_and_write_kv(qkv.clone(), layout, rotation(case.meta.max_seq_len, rotary_dim), layer, case.meta)

    q, k, v = torch.split(qkv.view(-1, HEADS + 2 * KV_HEADS, DIM), [HEADS, KV_HEADS, KV_HEADS], dim=1)
    slots, positions, tolerance = case.meta.slot_mapping, case.meta.positions, TOLERANCE[dtype]
    assert out.dtype == dtype
    assert_close(out.double(), turned(normed(q, q_norm, 1e-3), positions, rotary_dim), **tolerance)
    keys, values = by_slot(ops, layer.key)[slots], by_slot(ops, layer.value)[slots]
    assert_close(keys.double(), turned(normed(k, k_norm, 1e-3), positions, rotary_dim), **tolerance)
    assert torch.equal(values, v)


def test_touches_its_own_slots_only(ops: Ops) -> None:
    """A write that rounds up to a whole block, or that pads into the null block."""
    case = build_case(BATCHES["chunk"], num_heads=HEADS, num_kv_heads=KV_HEADS, seed=2)
    layer = filled_layer(ops, case)
    ops.rope_and_write_kv(
        projections(case, torch.float32), QkvLayout(HEADS, KV_HEADS, DIM), rotation(64, DIM), layer, case.meta
    )
    others = torch.ones(case.num_blocks * case.block_size, dtype=torch.bool)
    others[case.meta.slot_mapping] = False
    for cache in (layer.key, layer.value):
        slots = by_slot(ops, cache)
        assert bool((slots[others] == 7.0).all())
        assert bool((slots[~others] != 7.0).all())


@pytest.mark.parametrize("negative", ["some", "all"])
def test_negative_slot_writes_nothing(ops: Ops, negative: str) -> None:
    """Padding that lands in the last slot (an index of -1 wraps round), or that shifts the other tokens."""
    case = build_case([(1, 5), (6, 20), (1, 17)], num_heads=HEADS, num_kv_heads=KV_HEADS, seed=3)
    slots = case.meta.slot_mapping.clone()
    padding = torch.tensor([0, 3, 7]) if negative == "some" else torch.arange(8)
    slots[padding] = torch.tensor([-1, -5, -(2**40), -1, -1, -1, -1, -1])[: len(padding)]
    meta = replace(case.meta, slot_mapping=slots)
    qkv, layout, table = projections(case, torch.float32), QkvLayout(HEADS, KV_HEADS, DIM), rotation(64, DIM)
    want, layer = filled_layer(ops, case), filled_layer(ops, case)
    q_all = ops.rope_and_write_kv(qkv, layout, table, want, case.meta)
    q = ops.rope_and_write_kv(qkv, layout, table, layer, meta)
    assert torch.equal(q, q_all)
    for written, cache in ((want.key, layer.key), (want.value, layer.value)):
        expected = by_slot(ops, written).clone()
        expected[case.meta.slot_mapping[padding]] = 7.0
        assert torch.equal(by_slot(ops, cache), expected)


def test_input_is_left_alone(ops: Ops) -> None:
    """A rotation in place, which would turn q and k twice when a caller reuses the projection."""
    case = build_case([(3, 3)], num_heads=HEADS, num_kv_heads=KV_HEADS, seed=4)
    qkv = projections(case, torch.float32)
    before = qkv.clone()
    ops.rope_and_write_kv(qkv, QkvLayout(HEADS, KV_HEADS, DIM), rotation(8, DIM), filled_layer(ops, case), case.meta)
    assert torch.equal(qkv, before)


def test_two_rotation_tables_in_one_step(ops: Ops) -> None:
    """A remembered table that serves layers with another one (local and global RoPE of one model)."""
    case = build_case([(4, 9)], num_heads=HEADS, num_kv_heads=KV_HEADS, seed=5)
    qkv, layout = projections(case, torch.float32), QkvLayout(HEADS, KV_HEADS, DIM)
    layer = filled_layer(ops, case)
    tables = [rotation(16, DIM), rotation(16, DIM) * 0.5]
    first, second, again = (
        ops.rope_and_write_kv(qkv, layout, table, layer, case.meta) for table in (*tables, tables[0])
    )
    assert_close(second, first * 0.5)
    assert torch.equal(again, first)


def test_cache_of_another_dtype(ops: Ops) -> None:
    """float32 activations over a bfloat16 cache: stored rounded, computed in float32."""
    case = build_case([(5, 5), (1, 30)], num_heads=HEADS, num_kv_heads=KV_HEADS, seed=6)
    qkv, layer = projections(case, torch.float32), filled_layer(ops, case, dtype=torch.bfloat16)
    q = ops.rope_and_write_kv(qkv, QkvLayout(HEADS, KV_HEADS, DIM), rotation(64, DIM), layer, case.meta)
    v = qkv.view(-1, HEADS + 2 * KV_HEADS, DIM)[:, -KV_HEADS:]
    assert torch.equal(by_slot(ops, layer.value)[case.meta.slot_mapping], v.bfloat16())
    out = ops.attention(q, layer, case.meta, scale=0.125, num_kv_heads=KV_HEADS, window=1)
    assert out.dtype == torch.float32
    assert_close(out.view(-1, KV_HEADS, HEADS // KV_HEADS, DIM)[:, :, 0], v.bfloat16().float())
