"""Linear layers on dense weights, float32 and bfloat16."""

import pytest
import torch

from kernels.cpu.native_ops import NativeOps
from kernels.ops import Linear
from kernels.reference import ReferenceOps
from tests.kernels.native.test_quantized_linear import ROWS, quantized, randn

DTYPES = [torch.float32, torch.bfloat16]


def pack(native: NativeOps, *weights: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    return native.pack_linear(list(weights), bias, dtype=weights[0].dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 2), (16, 64), (49, 130), (200, 576)])
def test_matches_the_reference(native: NativeOps, out_features: int, in_features: int, dtype: torch.dtype) -> None:
    """Guards the packing, the tails of outputs and rows, the bias, and stacking."""
    weights = [randn(out_features, in_features).to(dtype) / in_features**0.5, randn(3, in_features).to(dtype)]
    bias = randn(out_features + 3).to(dtype)
    linear = native.pack_linear(list(weights), bias, dtype=dtype)
    want = ReferenceOps().pack_linear(list(weights), bias, dtype=dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for rows in ROWS:
        x = randn(rows, in_features).to(dtype)
        torch.testing.assert_close(linear(x), want(x), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_keep_their_bits_in_any_batch(native: NativeOps, dtype: torch.dtype) -> None:
    """Guards a fixed order of summation, which the BLAS behind torch does not promise."""
    linear = pack(native, randn(80, 320).to(dtype))
    x = randn(330, 320).to(dtype)
    whole = linear(x)
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), whole[:rows])
    assert torch.equal(linear(x[117:118]), whole[117:118])


def test_weights_may_be_freed_and_inputs_strided(native: NativeOps) -> None:
    """Guards addresses that outlive their tensors."""
    weight = randn(32, 64)
    want = torch.nn.functional.linear(randn(4, 128)[:, 64:], weight)
    linear = pack(native, weight.clone())
    got = linear(randn(4, 128)[:, 64:])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("bad", [torch.zeros(2, 63), torch.zeros(2, 64, dtype=torch.float64), torch.zeros(64)])
def test_other_shapes_and_dtypes_are_refused(native: NativeOps, bad: torch.Tensor) -> None:
    """Guards memory: the kernel takes bare addresses."""
    with pytest.raises(ValueError, match="expected"):
        pack(native, randn(16, 64))(bad)


def test_no_rows(native: NativeOps) -> None:
    """Guards a step in which nothing samples."""
    assert pack(native, randn(16, 64))(torch.zeros(0, 64)).shape == (0, 16)


@pytest.mark.parametrize(("in_features", "dtype"), [(33, torch.bfloat16), (64, torch.float16)])
def test_what_is_out_of_reach_falls_back(native: NativeOps, in_features: int, dtype: torch.dtype) -> None:
    """Guards odd sizes and float16, which torch computes."""
    weight, x = randn(16, in_features).to(dtype), randn(3, in_features).to(dtype)
    want = ReferenceOps().pack_linear([weight], None, dtype=dtype)(x)
    torch.testing.assert_close(pack(native, weight)(x), want, atol=4e-2, rtol=4e-2)


def test_a_dense_and_a_quantized_matrix_stack(native: NativeOps) -> None:
    """Guards mixed checkpoints: Q4_K files keep some matrices in formats that only dequantise."""
    quant, dense = quantized("Q8_0", 32, 64), randn(16, 64)
    x = randn(3, 64).bfloat16()
    got = native.pack_linear([quant, dense], None, dtype=torch.bfloat16)(x)
    want = x.float() @ torch.cat([quant.dequantize(), dense]).T
    assert (got.float() - want).norm() / want.norm() < 0.01


def test_logits_come_out_unrounded(native: NativeOps) -> None:
    """Guards greedy decoding: rounded to bfloat16, the two best of 49,152 logits are often equal."""
    weight, x = randn(64, 128).bfloat16(), randn(3, 128).bfloat16()
    got = native.pack_linear([weight], None, dtype=torch.bfloat16, out_dtype=torch.float32)(x)
    torch.testing.assert_close(got, x.float() @ weight.float().T, atol=1e-4, rtol=1e-4)
