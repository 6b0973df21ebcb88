"""Linear layers on quantised weights: the arithmetic they promise, and its distance from the dequantised matrix."""

import gguf
import pytest
import torch

from kernels.cpu.native_linear import KINDS
from kernels.cpu.native_ops import NativeOps
from kernels.ops import QuantizedWeight

ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 13, 330]
"""Every strip height, an uneven split of strips, more than one block of rows."""


@pytest.fixture(autouse=True)
def _needs_dot_products(native: NativeOps) -> None:
    if native.kinds != set(KINDS):
        pytest.skip("this processor lacks bfloat16 or int8 dot products: quantised weights are dequantised")


def quantized(kind: str, out_features: int, in_features: int, *, seed: int = 0) -> QuantizedWeight:
    weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(seed)) * 0.1
    file_type = gguf.GGMLQuantizationType[kind]
    blocks = torch.from_numpy(gguf.quants.quantize(weight.numpy(), file_type))
    return QuantizedWeight(
        blocks=blocks,
        kind=kind,
        out_features=out_features,
        in_features=in_features,
        dequantize=lambda: torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), file_type)),
    )


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What the activations are worth, float64[T, in]: a group of 32: 15 bits for the quad with the largest, else 8."""
    quads = x.float().view(len(x), -1, 8, 4)
    tops = quads.abs().amax(-1)  # [T, groups, 8]
    wide = torch.nn.functional.one_hot(tops.argmax(-1), 8).bool()
    rest = tops.masked_fill(wide, 0.0).amax(-1, keepdim=True)
    step = torch.maximum(rest / 127, tops.amax(-1, keepdim=True) / (127 * 128))[..., None]
    codes = torch.round(quads * torch.where(step > 0, 1 / step, 0.0))
    return (codes.double() * step.double()).flatten(-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("out_features", "in_features"), [(16, 32), (49, 96), (128, 576)])
def test_product_is_that_of_the_rounded_activations(
    native: NativeOps, kind: str, out_features: int, in_features: int
) -> None:
    """Guards the packing, the zero points, the minima and the tails: any slip is far above float32 rounding."""
    weight = quantized(kind, out_features, in_features)
    linear = native.pack_linear([weight], None, dtype=torch.bfloat16, out_dtype=torch.float32)
    for rows in ROWS:
        x = randn(rows, in_features, dtype=torch.bfloat16)
        want = rounded(x) @ weight.dequantize().double().T
        torch.testing.assert_close(linear(x).double(), want, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_error_against_the_dequantized_matrix_is_small(native: NativeOps, kind: str) -> None:
    """Guards the accuracy that the documentation states, for activations with an outlier in each group and without."""
    weight = quantized(kind, 256, 1536)
    linear = native.pack_linear([weight], None, dtype=torch.bfloat16, out_dtype=torch.float32)
    for outlier, limit in ((1.0, 6e-3), (50.0, 1e-3)):  # 8 bits throughout: 6e-3, 2e-2
        x = randn(40, 1536)
        x[:, 5::32] *= outlier
        x = x.bfloat16()
        want = x.double() @ weight.dequantize().double().T
        assert (linear(x).double() - want).norm() / want.norm() < limit


def test_stacked_matrices_of_several_kinds_with_a_bias(native: NativeOps) -> None:
    """Guards merged projections: each kind writes its own columns, with its own part of the bias."""
    weights = [quantized(kind, rows, 64, seed=rows) for kind, rows in [("Q4_1", 40), ("Q4_1", 8), ("Q8_0", 24)]]
    bias, x = randn(72), randn(5, 64, dtype=torch.bfloat16)
    got = native.pack_linear(list(weights), bias, dtype=torch.bfloat16)(x)
    want = x.double() @ torch.cat([weight.dequantize() for weight in weights]).double().T + bias.double()
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_keep_their_bits_in_any_batch(native: NativeOps, kind: str) -> None:
    """Guards a fixed order of summation: a request's tokens must not change with the size of its batch."""
    linear = native.pack_linear([quantized(kind, 80, 320)], None, dtype=torch.bfloat16)
    x = randn(330, 320, dtype=torch.bfloat16)
    whole = linear(x)
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), whole[:rows])
    assert torch.equal(linear(x[117:118]), whole[117:118])


def test_float32_stays_exact(native: NativeOps) -> None:
    """Guards the parity mode: no rounded activations there."""
    weight, x = quantized("Q4_1", 48, 96), randn(3, 96)
    got = native.pack_linear([weight], None, dtype=torch.float32)(x)
    torch.testing.assert_close(got, x @ weight.dequantize().T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_and_huge_activations(native: NativeOps, kind: str) -> None:
    """Guards the scale: no division by zero, no overflow of the int8 codes."""
    weight = quantized(kind, 16, 64)
    linear = native.pack_linear([weight], None, dtype=torch.bfloat16, out_dtype=torch.float32)
    assert torch.equal(linear(torch.zeros(2, 64, dtype=torch.bfloat16)), torch.zeros(2, 16))
    x = (randn(2, 64) * 1e30).bfloat16()
    want = rounded(x) @ weight.dequantize().double().T
    torch.testing.assert_close(linear(x).double(), want, rtol=1e-3, atol=1e27)
    assert linear((randn(2, 64) * 1e-37).bfloat16()).abs().max() < 1e-30  # the inverse of such a step is infinite


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rest", [1e-4, 0.0])
def test_a_value_that_dwarfs_its_group(native: NativeOps, kind: str, rest: float) -> None:
    """Guards the wide quad: where the others alone set the step, its codes saturate, or are divided by zero."""
    weight = quantized(kind, 16, 64)
    linear = native.pack_linear([weight], None, dtype=torch.bfloat16, out_dtype=torch.float32)
    x = randn(5, 64) * rest
    x[:, 5::32] = randn(5, 2) + 1
    x = x.bfloat16()
    want = rounded(x) @ weight.dequantize().double().T
    torch.testing.assert_close(linear(x).double(), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_activation_breaks_its_row_and_no_other(native: NativeOps, kind: str, bad: float) -> None:
    """Guards what looks for broken models: as integers, NaN would come out as some finite figure."""
    linear = native.pack_linear([quantized(kind, 16, 64)], None, dtype=torch.bfloat16)
    x = randn(3, 64, dtype=torch.bfloat16)
    x[1, 40] = bad
    finite = linear(x).isfinite()
    assert not finite[1].any()
    assert finite[[0, 2]].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_embedding_rows_are_the_dequantized_ones(native: NativeOps, kind: str, dtype: torch.dtype) -> None:
    """Guards the lookup on file blocks, its rounding included."""
    weight = quantized(kind, 50, 96)
    ids = torch.tensor([49, 0, 7, 7])
    got = native.pack_embedding(weight, dtype=dtype)(ids)
    torch.testing.assert_close(
        got, weight.dequantize()[ids].to(dtype), atol=1e-6, rtol=1e-6 if dtype == torch.float32 else 8e-3
    )


def test_an_id_outside_of_the_table_is_an_error(native: NativeOps) -> None:
    """Guards memory: the kernel takes bare addresses."""
    embed = native.pack_embedding(quantized("Q8_0", 10, 32), dtype=torch.bfloat16)
    for bad in (-1, 10):
        with pytest.raises(IndexError):
            embed(torch.tensor([1, bad]))
