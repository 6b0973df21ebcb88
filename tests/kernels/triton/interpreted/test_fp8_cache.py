"""Keys and values kept as e4m3 with one scale a layer for each."""

from dataclasses import replace

import pytest
import torch

from kernels.errors import BackendUnavailable
from kernels.layout import KVCacheSpec, LayerKV
from kernels.ops import QkvLayout
from kernels.reference import ReferenceOps
from kernels.triton.launch import Target
from kernels.triton.ops import TritonOps
from tests.kernels.cases import BATCHES, PagedCase, Pair, build_case, identity_rotation, metadata

OPS = TritonOps("cpu")
FP8 = torch.float8_e4m3fn


def fp8_layer(case: PagedCase, *, key_scale: float, value_scale: float) -> LayerKV:
    spec = KVCacheSpec(1, case.num_kv_heads, case.head_dim, case.block_size, FP8)
    layer = OPS.allocate_kv_cache(spec, num_blocks=case.num_blocks, device=torch.device("cpu"))[0]
    assert layer.key_scale is not None
    assert layer.value_scale is not None
    layer.key_scale.fill_(key_scale)
    layer.value_scale.fill_(value_scale)
    return layer


@pytest.mark.parametrize("batch", ["decode", "decode_uneven", "prefix_hit", "chunk", "mixed"])
@pytest.mark.parametrize(("key_scale", "value_scale"), [(1.0, 1.0), (0.05, 2.0)])
def test_attention_reads_what_the_reference_wrote(batch: str, key_scale: float, value_scale: float) -> None:
    """A scale forgotten, applied twice or swapped between keys and values. The reference reads the same bytes."""
    case = build_case(BATCHES[batch])
    layer = fp8_layer(case, key_scale=key_scale, value_scale=value_scale)
    whole = metadata([(n, n) for _, n in case.pairs], case.meta.page_table, block_size=case.block_size)
    no_q = torch.zeros(whole.num_tokens, case.num_heads * case.head_dim)
    qkv = torch.cat([no_q, torch.cat(case.keys).flatten(1), torch.cat(case.values).flatten(1)], dim=1)
    layout = QkvLayout(case.num_heads, case.num_kv_heads, case.head_dim)
    reference = ReferenceOps()
    rotation = identity_rotation(whole.max_seq_len, case.head_dim)
    reference.rope_and_write_kv(qkv, layout, rotation, layer, whole)
    arguments = {"scale": case.scale, "num_kv_heads": case.num_kv_heads}
    want = reference.attention(case.q, layer, case.meta, **arguments)  # type: ignore[arg-type]
    got = OPS.attention(case.q, layer, case.meta, **arguments)  # type: ignore[arg-type]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pairs", [[(1, 9), (3, 20)]], ids=["mixed"])
@pytest.mark.parametrize(("key_scale", "value_scale"), [(1.0, 1.0), (0.01, 4.0)])
def test_write_quantizes(pairs: list[Pair], key_scale: float, value_scale: float) -> None:
    """Values beyond 448 scales are clamped (the cast alone makes NaN of them); the rest keep e4m3's precision."""
    case = build_case(pairs)
    width = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
    qkv = 3 * torch.randn(case.meta.num_tokens, width, generator=torch.Generator().manual_seed(5))
    layer = fp8_layer(case, key_scale=key_scale, value_scale=value_scale)
    layout = QkvLayout(case.num_heads, case.num_kv_heads, case.head_dim)
    OPS.rope_and_write_kv(qkv, layout, identity_rotation(64, case.head_dim), layer, case.meta)
    _, k, v = qkv.view(-1, case.num_heads + 2 * case.num_kv_heads, case.head_dim).split(
        [case.num_heads, case.num_kv_heads, case.num_kv_heads], dim=1
    )
    for cache, x, scale in ((layer.key, k, key_scale), (layer.value, v, value_scale)):
        stored = cache.flatten(0, 1)[case.meta.slot_mapping].float() * scale
        want = x.clamp(-448 * scale, 448 * scale)
        # The interpreter's cast to e4m3 loses the carry of a significand that rounds up to 2.
        carries = (want / scale).frexp().mantissa.abs() * 2 >= 1.9375
        assert carries.float().mean() < 0.1
        torch.testing.assert_close(stored[~carries], want[~carries], atol=scale * 2**-9, rtol=2**-3)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "gfx942"])
def test_devices_without_e4m3_are_refused(arch: str) -> None:
    """sm_80 would compile to a cast that fails at the first launch; gfx942 has another encoding."""
    ops = TritonOps("cpu", target=Target(arch, 108))
    spec = KVCacheSpec(1, 2, 64, 16, FP8)
    with pytest.raises(BackendUnavailable, match=f"{arch}.*16-bit"):
        ops.allocate_kv_cache(spec, num_blocks=2, device=torch.device("cpu"))
    assert ops.allocate_kv_cache(replace(spec, dtype=torch.bfloat16), num_blocks=2, device=torch.device("cpu"))
