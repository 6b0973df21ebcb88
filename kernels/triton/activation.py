"""Gated activations (Shazeer 2020): act(gate) * up."""

import torch
import triton
import triton.language as tl

TILE = 1024


@triton.jit
def gated_activation_kernel(
    out_ptr: tl.tensor,  # [T, I], contiguous
    gate_up_ptr: tl.tensor,  # [T, 2 * I]
    stride: int,
    WIDTH: tl.constexpr,
    GELU: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Grid: (T, ceil(I / TILE))."""
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = lanes < WIDTH
    source = gate_up_ptr + token * stride + lanes
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        # gelu_tanh: 0.5 * (1 + tanh(u)) is sigmoid(2 * u), u = sqrt(2 / pi) * (x + 0.044715 * x**3).
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        activated = gate * tl.sigmoid(gate)
    tl.store(out_ptr + token * WIDTH + lanes, (activated * up).to(out_ptr.dtype.element_ty), mask=mask)


def gated_activation(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """[T, 2*I], last axis contiguous -> [T, I]: act(gate) * up. kind: "silu" or "gelu_tanh", else ValueError."""
    if kind not in ("silu", "gelu_tanh"):
        raise ValueError(f"unknown activation {kind!r}: silu and gelu_tanh are known")
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_tokens, width))
    gated_activation_kernel[(num_tokens, triton.cdiv(width, TILE))](
        out, gate_up, gate_up.stride(0), WIDTH=width, GELU=kind == "gelu_tanh", TILE=TILE, num_warps=4
    )
    return out
