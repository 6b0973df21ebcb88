"""The same sources for a processor without AVX-512: plain vector code, quantised weights dequantised."""

import platform

import pytest
import torch

from kernels.cpu import build
from kernels.cpu.native_lib import bind
from kernels.cpu.native_ops import NativeOps
from kernels.reference import ReferenceOps
from tests.kernels.cases import BATCHES, TOLERANCE, build_case, fill_cache, oracle
from tests.kernels.native.test_attention import attend
from tests.kernels.native.test_quantized_linear import quantized, randn

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> NativeOps:
    if platform.machine() != "x86_64" or build.find_compiler() is None:
        pytest.skip("built for x86-64 only")
    patch = pytest.MonkeyPatch()
    patch.setattr(build, "TUNING", ("-march=x86-64",))
    try:
        return NativeOps(bind(build.library(tmp_path_factory.mktemp("portable"))))
    finally:
        patch.undo()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", ["mixed", "long_chunk", "decode_uneven"])
def test_attention(portable: NativeOps, batch: str, dtype: torch.dtype) -> None:
    """Guards the vector code that machines without AVX-512 run: bf16 pairs, masks, tails."""
    for block_size in (16, 10):
        case = build_case(BATCHES[batch], num_heads=9, num_kv_heads=3, block_size=block_size, dtype=dtype)
        layer = fill_cache(portable, case, poison=True)
        for window in (0, 20):
            out = attend(portable, case, layer, window=window)
            torch.testing.assert_close(out.double(), oracle(case, window=window), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_layers(portable: NativeOps, dtype: torch.dtype) -> None:
    """Guards the fallback for weights that the processor can't multiply in their own format."""
    assert not portable.kinds
    weights = [quantized("Q4_1", 40, 64), randn(9, 64)]
    x = randn(13, 64, dtype=dtype)
    got = portable.pack_linear(list(weights), None, dtype=dtype)(x)
    want = ReferenceOps().pack_linear(list(weights), None, dtype=dtype)(x)
    torch.testing.assert_close(got, want, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_operations(portable: NativeOps, dtype: torch.dtype) -> None:
    """Guards rounding to bfloat16 and the exponential without their instructions."""
    reference = ReferenceOps()
    x, weight = randn(5, 66, dtype=dtype), randn(66, dtype=dtype)
    torch.testing.assert_close(
        portable.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **TOLERANCE[dtype]
    )
    for kind in ("silu", "gelu_tanh"):
        got, want = portable.gated_activation(x, kind), reference.gated_activation(x, kind)
        torch.testing.assert_close(got, want, **TOLERANCE[dtype])
