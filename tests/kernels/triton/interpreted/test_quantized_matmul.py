"""Products with weights that stay quantised against products with the same weights dequantised by GGUF's own code."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from kernels.ops import QuantizedWeight
from kernels.triton.ops import TritonOps
from tests.kernels.cases import TOLERANCE

OPS = TritonOps("cpu")


def quantized(kind: str, out_features: int, in_features: int, *, seed: int = 0) -> QuantizedWeight:
    matrix = np.random.default_rng(seed).standard_normal((out_features, in_features), dtype=np.float32)
    kind_id = GGMLQuantizationType[kind]
    blocks = torch.from_numpy(quants.quantize(matrix, kind_id))

    def dequantize() -> torch.Tensor:
        return torch.from_numpy(quants.dequantize(blocks.numpy(), kind_id))

    return QuantizedWeight(blocks, kind, out_features, in_features, dequantize)


def check(weights: list[QuantizedWeight], rows: int, dtype: torch.dtype, bias: torch.Tensor | None = None) -> None:
    x = torch.randn(rows, weights[0].in_features, generator=torch.Generator().manual_seed(1)).to(dtype)
    want = x.double() @ torch.cat([weight.dequantize() for weight in weights]).double().T
    if bias is not None:
        want += bias.double()
    got = OPS.pack_linear(list(weights), bias, dtype=dtype)(x)
    assert got.dtype == dtype
    scale = weights[0].in_features ** 0.5  # the size of a product of unit-variance vectors
    torch.testing.assert_close(got.double() / scale, want / scale, **TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "out_features", "in_features"), [(1, 33, 64), (5, 64, 96), (17, 70, 160)])
def test_kinds_and_shapes(kind: str, dtype: torch.dtype, rows: int, out_features: int, in_features: int) -> None:
    """Nibbles in the wrong order, a scale of the neighbouring group, or lanes beyond the last row or column."""
    check([quantized(kind, out_features, in_features)], rows, dtype)


@pytest.mark.parametrize("kinds", [("Q4_1", "Q4_1", "Q4_0"), ("Q8_0", "Q8_0"), ("Q4_1", "Q8_0"), ("Q5_0", "Q4_1")])
def test_stacked_parts(kinds: tuple[str, ...]) -> None:
    """Merged projections keep their order; kinds that don't stack fall back to a dense matrix."""
    check([quantized(kind, 16 + 8 * i, 64, seed=i) for i, kind in enumerate(kinds)], 3, torch.float32)


@pytest.mark.parametrize("rows", [2, 20])
def test_bias(rows: int) -> None:
    """The bias added once a row, not once a group."""
    check([quantized("Q4_1", 40, 96)], rows, torch.float32, torch.linspace(-9, 9, 40))


def test_logits_keep_their_float32_sums() -> None:
    """A result rounded to the activations' dtype on its way to float32: the best two tokens become equal."""
    weight = quantized("Q8_0", 40, 256)
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(1)).half()
    got = OPS.pack_linear([weight], None, dtype=torch.float16, out_dtype=torch.float32)(x)
    assert got.dtype == torch.float32
    assert not torch.equal(got, got.half().float())


def test_both_tile_shapes_agree() -> None:
    """Few rows and many take different tiles; the interpreter's dot is numpy's, so equal up to rounding only."""
    linear = OPS.pack_linear([quantized("Q4_1", 48, 128)], None, dtype=torch.float32)
    x = torch.randn(20, 128, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(linear(x)[:3], linear(x[:3]), atol=1e-4, rtol=1e-5)
