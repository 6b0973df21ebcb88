"""RMSNorm (Zhang and Sennrich 2019), alone or fused with the residual addition that comes before it."""

import torch
import triton
import triton.language as tl

from kernels.triton.launch import padded


@triton.jit
def rms_norm_kernel(
    out_ptr: tl.tensor,  # [T, C], contiguous
    x_ptr: tl.tensor,  # [T, C]
    residual_ptr: tl.tensor,  # [T, C], read and written if ADD
    weight_ptr: tl.tensor,  # [C]
    x_stride: int,
    residual_stride: int,
    eps: float,
    CHANNELS: tl.constexpr,
    CHANNELS_PAD: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    """Grid: (T,). A row lives in registers between its two uses."""
    token = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, CHANNELS_PAD)
    mask = channels < CHANNELS
    x = tl.load(x_ptr + token * x_stride + channels, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        at = residual_ptr + token * residual_stride + channels
        dtype = residual_ptr.dtype.element_ty
        # Rounded before it is normalised: the rounded sum is what the next layer adds to.
        total = (x + tl.load(at, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(at, total, mask=mask)
        x = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / CHANNELS + eps)
    weight = tl.load(weight_ptr + channels, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * CHANNELS + channels, (x * inverse * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, C], last axis contiguous -> [T, C] in x's dtype; statistics in float32.

    residual: [T, C], if given, becomes residual + x in place, and that sum is what is normalised.
    """
    num_tokens, channels = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rms_norm_kernel[(num_tokens,)](
        out, x, x if residual is None else residual, weight,
        x.stride(0), 0 if residual is None else residual.stride(0), eps,
        CHANNELS=channels, CHANNELS_PAD=padded(channels), ADD=residual is not None,
        num_warps=4 if channels <= 4096 else 8,
    )  # fmt: skip
    return out
