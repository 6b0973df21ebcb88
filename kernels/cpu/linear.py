"""Linear layers by oneDNN, on weights that were reordered once for it."""

import torch
import torch.nn.functional as F

from kernels.ops import Linear, Weight


def pack_linear(weights: list[Weight], bias: torch.Tensor | None, *, dtype: torch.dtype) -> Linear:
    """Quantised weights are dequantised to dtype. bfloat16 is reordered where oneDNN can use it; else F.linear."""
    merged = torch.cat([dense(weight, dtype) for weight in weights]) if len(weights) > 1 else dense(weights[0], dtype)
    bias = None if bias is None else bias.to(dtype)
    if dtype is not torch.bfloat16 or not reorders_bfloat16():
        return lambda x: F.linear(x, merged, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(merged)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = multiply(x, packed, bias, "none", [], "")
        return out

    return linear


def pack_embedding(weight: Weight, *, dtype: torch.dtype) -> Linear:
    table = dense(weight, dtype)
    return lambda ids: F.embedding(ids, table)


def dense(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The matrix in dtype, [out, in]. Not a copy where it is a tensor of that dtype already."""
    return (weight if isinstance(weight, torch.Tensor) else weight.dequantize()).to(dtype)


def reorders_bfloat16() -> bool:
    """Whether this build of torch and this processor have oneDNN's bfloat16 matrix product."""
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
