"""Norms and activations against the reference operations."""

import pytest
import torch

from kernels.reference import ReferenceOps
from kernels.triton.ops import TritonOps
from tests.kernels.cases import TOLERANCE

OPS = TritonOps("cpu")
REFERENCE = ReferenceOps()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [16, 100, 576, 1024])
def test_rms_norm(channels: int, dtype: torch.dtype) -> None:
    """Padding lanes counted in the mean, or statistics in the activations' dtype."""
    x, weight = 30 * random(3, channels, dtype=dtype), random(channels, dtype=dtype, seed=1)
    torch.testing.assert_close(OPS.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [16, 100, 576])
def test_add_rms_norm(channels: int, dtype: torch.dtype) -> None:
    """The residual normalised before it was rounded, or not written back."""
    x, residual = (random(3, channels, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = random(channels, dtype=dtype, seed=2)
    want, want_residual = REFERENCE.add_rms_norm(x, residual.clone(), weight, 1e-6)
    normed, summed = OPS.add_rms_norm(x, residual, weight, 1e-6)
    assert summed is residual
    if dtype == torch.bfloat16:  # the interpreter truncates where hardware rounds
        torch.testing.assert_close(summed, want_residual, **TOLERANCE[dtype])
    else:
        assert torch.equal(summed, want_residual)
    torch.testing.assert_close(normed, want, **TOLERANCE[dtype])


def test_rows_may_be_strided() -> None:
    """The runner norms a slice of a wider buffer."""
    wide = random(4, 200, dtype=torch.float32)
    weight = random(100, dtype=torch.float32)
    out = OPS.rms_norm(wide[:, 50:150], weight, 1e-6)
    torch.testing.assert_close(out, REFERENCE.rms_norm(wide[:, 50:150], weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [48, 1536])
def test_gated_activation(width: int, kind: str, dtype: torch.dtype) -> None:
    """Gate and up swapped, or an exp that overflows at large inputs."""
    gate_up = 20 * random(3, 2 * width, dtype=dtype)
    want = REFERENCE.gated_activation(gate_up, kind)
    torch.testing.assert_close(OPS.gated_activation(gate_up, kind), want, **TOLERANCE[dtype])


def test_unknown_activation() -> None:
    """A model with another activation must fail loudly, not compute SiLU."""
    with pytest.raises(ValueError, match="relu"):
        OPS.gated_activation(torch.zeros(1, 4), "relu")


@pytest.mark.parametrize("bias", [False, True])
def test_dense_linear_stacks_its_parts(bias: bool) -> None:
    """The rows of a merged projection come in the order given."""
    parts = [random(n, 24, dtype=torch.float32, seed=n) for n in (8, 3, 5)]
    offset = random(16, dtype=torch.float32) if bias else None
    x = random(4, 24, dtype=torch.float32)
    got = OPS.pack_linear(list(parts), offset, dtype=torch.float32)(x)
    torch.testing.assert_close(got, REFERENCE.pack_linear(list(parts), offset, dtype=torch.float32)(x))


def test_embedding() -> None:
    """Rows of the table, in the activations' dtype."""
    table = random(11, 8, dtype=torch.float32)
    ids = torch.tensor([3, 0, 10])
    assert torch.equal(OPS.pack_embedding(table, dtype=torch.float16)(ids), table[ids].half())
