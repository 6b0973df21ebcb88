"""Linear layers, embedding, norms and activations of the backends in plain torch."""

import pytest
import torch
from torch.testing import assert_close

from kernels.cpu import linear as cpu_linear
from kernels.ops import Ops, QuantizedWeight
from tests.kernels.cases import TOLERANCE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IDS = ["f32", "bf16", "f16"]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantized(values: torch.Tensor) -> QuantizedWeight:
    """Stands for a matrix of a file: the blocks are opaque, only dequantize tells what they hold."""
    blocks = torch.zeros(values.shape[0], 4, dtype=torch.uint8)
    return QuantizedWeight(blocks, "Q4_1", values.shape[0], values.shape[1], lambda: values)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_linear_stacks_its_parts(ops: Ops, rows: int, with_bias: bool, dtype: torch.dtype) -> None:
    """Parts in the wrong order, a bias that is dropped, a quantised part that is skipped; odd sizes when reordering."""
    parts = [normal(out, 48, seed=out).mul_(48**-0.5) for out in (33, 7, 64)]
    bias = normal(104) if with_bias else None
    x = normal(rows, 48, dtype=dtype, seed=9)
    layer = ops.pack_linear([parts[0], quantized(parts[1]), parts[2].bfloat16()], bias, dtype=dtype)
    out = layer(x)
    merged = torch.cat([parts[0], parts[1], parts[2].bfloat16().float()]).to(dtype).double()
    want = x.double() @ merged.T
    if bias is not None:
        want += bias.to(dtype).double()
    assert out.dtype == dtype
    assert_close(out.double(), want, **TOLERANCE[dtype])


def test_linear_outlives_its_arguments(ops: Ops) -> None:
    """A packed layer that still reads the tensor it was made from."""
    weight = normal(8, 16)
    layer = ops.pack_linear([weight[:4], weight[4:]], None, dtype=torch.bfloat16)
    before = layer(torch.ones(1, 16, dtype=torch.bfloat16))
    weight.fill_(torch.nan)
    assert torch.equal(layer(torch.ones(1, 16, dtype=torch.bfloat16)), before)


def test_linear_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without oneDNN's bfloat16 product, where reordering a weight raises."""
    monkeypatch.setattr(cpu_linear, "reorders_bfloat16", lambda: False)
    monkeypatch.delattr(torch.ops, "mkldnn")
    weight, x = normal(5, 32, dtype=torch.bfloat16), normal(2, 32, dtype=torch.bfloat16, seed=1)
    out = cpu_linear.pack_linear([weight], None, dtype=torch.bfloat16)(x)
    assert_close(out.double(), x.double() @ weight.double().T, atol=0.1, rtol=0.02)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_embedding(ops: Ops, dtype: torch.dtype) -> None:
    """Rows of a quantised table; ids that repeat."""
    table, ids = normal(11, 16), torch.tensor([3, 0, 10, 3])
    for weight in (table, quantized(table)):
        out = ops.pack_embedding(weight, dtype=dtype)(ids)
        assert torch.equal(out, table.to(dtype)[ids])


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("size", [64, 576, 80])
def test_rms_norm(ops: Ops, size: int, dtype: torch.dtype) -> None:
    """Statistics in 16 bits: values whose squares overflow float16; a large eps that is left out."""
    x, weight = normal(5, size, dtype=dtype) * 300, normal(size, dtype=dtype, seed=1)
    want = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 900.0) * weight.double()
    assert_close(ops.rms_norm(x, weight, 900.0).double(), want, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_add_rms_norm(ops: Ops, dtype: torch.dtype) -> None:
    """The norm of x alone, or a residual that isn't the sum that was normed."""
    x, residual = normal(5, 64, dtype=dtype), normal(5, 64, dtype=dtype, seed=1)
    weight = normal(64, dtype=dtype, seed=2)
    total = (x.double() + residual.double()).to(dtype)
    want = total.double() * torch.rsqrt(total.double().square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    out, new_residual = ops.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert torch.equal(new_residual, total)
    assert_close(out.double(), want, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gated_activation(ops: Ops, kind: str, dtype: torch.dtype) -> None:
    """Gate and up swapped; the erf form of GELU for the tanh one (they differ by 5e-4 at 2)."""
    gate_up = normal(7, 160, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    cube = gate + 0.044715 * gate**3
    activated = (
        gate / (1 + (-gate).exp()) if kind == "silu" else 0.5 * gate * (1 + (cube * (2 / torch.pi) ** 0.5).tanh())
    )
    out = ops.gated_activation(gate_up, kind)
    assert out.dtype == dtype
    assert_close(out.double(), activated * up, **TOLERANCE[dtype])


def test_unknown_activation(ops: Ops) -> None:
    """A model's activation that silently becomes another."""
    with pytest.raises(ValueError, match="relu"):
        ops.gated_activation(normal(2, 8), "relu")
