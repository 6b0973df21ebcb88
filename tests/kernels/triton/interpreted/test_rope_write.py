"""The fused QK-norm, RoPE and cache write against the reference operation, and whole-block copy and zero."""

from dataclasses import replace

import pytest
import torch

from kernels.layout import KVCacheSpec, LayerKV
from kernels.ops import QkvLayout
from kernels.reference import ReferenceOps
from kernels.triton.kv_write import copy_blocks, zero_blocks
from kernels.triton.ops import TritonOps
from tests.kernels.cases import TOLERANCE, Pair, build_case, rotation

OPS = TritonOps("cpu")
REFERENCE = ReferenceOps()


def write_both(
    pairs: list[Pair],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    rotary_dim: int | None = None,
    norms: tuple[bool, bool] = (False, False),
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    padding: int = 0,
) -> tuple[tuple[torch.Tensor, LayerKV], tuple[torch.Tensor, LayerKV]]:
    """(q, layer) from the Triton kernel and from the reference, on the same random qkv. The cache starts as NaN."""
    case = build_case(pairs, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    generator = torch.Generator().manual_seed(3)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(case.meta.num_tokens + padding, width, generator=generator).to(dtype)
    q_norm, k_norm = (torch.rand(head_dim, generator=generator).to(dtype) + 0.5 if wanted else None for wanted in norms)
    layout = QkvLayout(num_heads, num_kv_heads, head_dim, q_norm, k_norm)
    cos_sin = rotation(case.meta.max_seq_len, rotary_dim or head_dim)
    meta = replace(
        case.meta,
        slot_mapping=torch.cat([case.meta.slot_mapping, torch.full((padding,), -1)]),
        positions=torch.cat([case.meta.positions, torch.zeros(padding, dtype=torch.int64)]),
    )
    results = []
    for ops in (OPS, REFERENCE):
        spec = KVCacheSpec(1, num_kv_heads, head_dim, block_size, dtype)
        layer = ops.allocate_kv_cache(spec, num_blocks=case.num_blocks, device=torch.device("cpu"))[0]
        layer.key.fill_(torch.nan)
        layer.value.fill_(torch.nan)
        results.append((ops.rope_and_write_kv(qkv, layout, cos_sin, layer, meta), layer))
    return results[0], results[1]


def check(pairs: list[Pair], dtype: torch.dtype = torch.float32, **shape: object) -> None:
    (q, layer), (want_q, want) = write_both(pairs, dtype=dtype, **shape)  # type: ignore[arg-type]
    torch.testing.assert_close(q, want_q, **TOLERANCE[dtype])
    torch.testing.assert_close(layer.key, want.key, equal_nan=True, **TOLERANCE[dtype])
    assert torch.equal(layer.value.nan_to_num(7.0), want.value.nan_to_num(7.0)), "values are copied bit by bit"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pairs", [[(1, 9), (1, 33)], [(5, 21), (3, 3)]], ids=["decode", "chunk"])
def test_dtypes(pairs: list[Pair], dtype: torch.dtype) -> None:
    """A rounding too many, or a token written to another's slot. Slots that nothing maps to stay as they were."""
    check(pairs, dtype)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (9, 3), (8, 1), (7, 7), (16, 2)])
def test_head_shapes(head_dim: int, num_heads: int, num_kv_heads: int) -> None:
    """q, k and v heads share a tile of eight: a head taken for another kind at odd counts."""
    check([(2, 19)], head_dim=head_dim, num_heads=num_heads, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize("rotary_dim", [16, 32, 48, 62, 64])
@pytest.mark.parametrize("norms", [(False, False), (True, True)], ids=["plain", "normed"])
def test_partial_rotation(rotary_dim: int, norms: tuple[bool, bool]) -> None:
    """The dims beyond rotary_dim are copied, yet count in the norm and get its weights."""
    check([(3, 40)], rotary_dim=rotary_dim, norms=norms)


@pytest.mark.parametrize("norms", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_qk_norm(norms: tuple[bool, bool], dtype: torch.dtype) -> None:
    """The q weights applied to k, the norm applied to v, or eps inside out."""
    check([(2, 30), (1, 7)], dtype, norms=norms)


@pytest.mark.parametrize("block_size", [8, 24, 64])
def test_block_sizes(block_size: int) -> None:
    """Slot arithmetic that knows one block size."""
    check([(4, 70), (1, 24)], block_size=block_size)


def test_negative_slots_write_nothing() -> None:
    """A padded batch's tokens would land in the last block, or in the null block."""
    check([(2, 20)], padding=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_copy_and_zero_blocks(dtype: torch.dtype) -> None:
    """A copy that converts (NaN payloads, 8-bit floats), or that reaches the neighbouring block."""
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(6, 8, 2, 20, generator=generator).to(dtype) for _ in range(2))
    layer = LayerKV(key.clone(), value.clone())
    copy_blocks(layer, torch.tensor([1, 4]), torch.tensor([3, 0]))
    zero_blocks(layer, torch.tensor([5]))
    for now, before in ((layer.key, key), (layer.value, value)):
        want = before.clone()
        want[[3, 0]] = before[[1, 4]]
        want[5] = 0
        assert torch.equal(now.view(torch.uint8), want.view(torch.uint8))


def test_no_blocks_to_copy() -> None:
    """A launch over an empty grid is an error on a GPU."""
    layer = LayerKV(torch.ones(2, 8, 1, 16), torch.ones(2, 8, 1, 16))
    zero_blocks(layer, torch.tensor([], dtype=torch.int64))
    assert layer.key.sum() == layer.key.numel()
