"""Compiled norms and activations against the reference."""

import pytest
import torch

from kernels.cpu.native_ops import NativeOps
from kernels.reference import ReferenceOps
from tests.kernels.cases import TOLERANCE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 15, 16, 17, 33, 576]


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_norms_match_the_reference(native: NativeOps, rows: int, size: int, dtype: torch.dtype) -> None:
    """Guards vector tails, weights held in float32 or the activations' dtype, rounding of the residual."""
    reference = ReferenceOps()
    x, residual = randn(rows, size, dtype=dtype), randn(rows, size, dtype=dtype)
    for weight_dtype in (dtype, torch.float32):
        weight = randn(size, dtype=weight_dtype)
        torch.testing.assert_close(
            native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **TOLERANCE[dtype]
        )
        got = native.add_rms_norm(x, residual.clone(), weight, 1e-5)
        want = reference.add_rms_norm(x, residual.clone(), weight, 1e-5)
        torch.testing.assert_close(got[0], want[0], **TOLERANCE[dtype])
        torch.testing.assert_close(got[1], want[1], **TOLERANCE[dtype])


def test_a_column_slice_is_normalized_as_it_reads(native: NativeOps) -> None:
    """Guards strided inputs: the kernel takes bare addresses."""
    x = randn(6, 128, dtype=torch.float32)[:, 32:96]
    weight = torch.ones(64)
    torch.testing.assert_close(native.rms_norm(x, weight, 1e-5), ReferenceOps().rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activations_match_the_reference(native: NativeOps, kind: str, size: int, dtype: torch.dtype) -> None:
    """Guards the vector exponential over its whole range, its saturation included."""
    x = randn(7, 2 * size, dtype=dtype) * 4
    x[0, :size] = 200
    x[1, :size] = -200
    got, want = native.gated_activation(x, kind), ReferenceOps().gated_activation(x, kind)
    torch.testing.assert_close(got, want, **TOLERANCE[dtype])


def test_an_unknown_activation_is_refused(native: NativeOps) -> None:
    """Guards against a silent default."""
    with pytest.raises(ValueError, match="relu"):
        native.gated_activation(torch.zeros(1, 4), "relu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_keep_their_bits_in_company(native: NativeOps, dtype: torch.dtype) -> None:
    """Guards row independence."""
    x, weight = randn(300, 576, dtype=dtype), randn(576, dtype=dtype)
    assert torch.equal(native.rms_norm(x, weight, 1e-5)[7:8], native.rms_norm(x[7:8], weight, 1e-5))
    assert torch.equal(native.gated_activation(x, "silu")[7:8], native.gated_activation(x[7:8], "silu"))
