"""Weight-only quantised product: x @ w.T with w in groups of 32 that share a scale and, in four bits, a minimum.

The groups are GGUF's: Q8_0 (w = d * code, code in -128..127), Q4_1 (w = d * code + m, code in 0..15) and Q4_0 (Q4_1
with m = -8 * d). The file's blocks interleave codes and scales row by row; here each goes to a tensor of its own,
groups first, so that the rows of one program's tile are contiguous:

    codes   uint8[K / 32, N, 16]  two four-bit codes a byte: byte j holds elements j (low) and j + 16 (high)
            int8 [K / 32, N, 32]
    scales  float16[K / 32, N]    minima the same

A tile of weights is restored in float32, rounded to the activations' dtype and multiplied there. A tile's height and
depth change the order of a row's sums: they depend on the number of rows, unless the caller wants one tile for all.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.ops import QuantizedWeight
from kernels.triton.launch import dot_dtype

GROUP = 32
"""Weights that share a scale."""

_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """See the module's docstring. minima: None for eight-bit codes."""

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    bias: torch.Tensor | None

    @property
    def out_features(self) -> int:
        return self.scales.shape[1]

    @property
    def in_features(self) -> int:
        return self.scales.shape[0] * GROUP


def can_pack(weights: list[QuantizedWeight]) -> bool:
    """Whether the matrices may be stacked and kept quantised: all of four bits, or all of eight."""
    kinds = {weight.kind for weight in weights}
    return kinds <= {"Q4_0", "Q4_1"} or kinds == {"Q8_0"}


def pack(weights: list[QuantizedWeight], bias: torch.Tensor | None, device: torch.device) -> PackedWeight:
    """Stacks matrices that can_pack accepts. bias: [sum of out_features] or None; kept in its dtype."""
    parts = [_split(weight) for weight in weights]
    codes, scales = (torch.cat([part[i] for part in parts], dim=1).to(device) for i in (0, 1))
    minima = None if weights[0].kind == "Q8_0" else torch.cat([part[2] for part in parts], dim=1).to(device)
    return PackedWeight(codes, scales, minima, None if bias is None else bias.to(device))


def _split(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scales, minima) of one matrix; minima mean nothing for Q8_0."""
    size = _BLOCK_BYTES[weight.kind]
    blocks = weight.blocks.view(weight.out_features, weight.in_features // GROUP, size).transpose(0, 1)
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    if weight.kind == "Q8_0":
        return blocks[..., 2:].contiguous().view(torch.int8), scales, scales
    if weight.kind == "Q4_0":
        return blocks[..., 2:].contiguous(), scales, -8 * scales
    return blocks[..., 4:].contiguous(), scales, blocks[..., 2:4].contiguous().view(torch.float16)[..., 0]


@triton.jit(do_not_specialize=["num_rows"])
def quantized_matmul_kernel(
    out_ptr: tl.tensor,  # [M, N], contiguous
    x_ptr: tl.tensor,  # [M, K]
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,  # f16 [K / 32, N]
    minima_ptr: tl.tensor,
    bias_ptr: tl.tensor,  # [N]
    num_rows: int,
    x_stride: int,
    N: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    FOUR_BIT: tl.constexpr,
    BIAS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_G: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
) -> None:
    """Grid: (ceil(M / TILE_M), ceil(N / TILE_N)), rows fastest: programs that share weights run side by side.

    TILE_G groups are read at once. Their first halves (16 elements each) make one product, their second halves another.
    """
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    row_mask = (rows < num_rows)[:, None]
    column_mask = columns < N
    halves = tl.arange(0, TILE_G * 16)  # element 16 * g + i of these is element i of group g's half
    x_tile = x_ptr + rows.to(tl.int64)[:, None] * x_stride + (halves // 16 * 32 + halves % 16)[None, :]
    code_bytes: tl.constexpr = 16 if FOUR_BIT else 32
    groups = tl.arange(0, TILE_G)
    of_group = groups[None, :] * N + columns[:, None]  # [TILE_N, TILE_G]
    codes_tile = codes_ptr + (of_group * code_bytes)[:, :, None] + tl.arange(0, 16)[None, None, :]
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, NUM_GROUPS, TILE_G):
        live = start + groups < NUM_GROUPS
        group_mask = column_mask[:, None] & live[None, :]
        x_mask = row_mask & (start + halves // 16 < NUM_GROUPS)[None, :]
        x_low = tl.load(x_tile + start * 32, mask=x_mask, other=0.0).to(DOT_DTYPE)
        x_high = tl.load(x_tile + start * 32 + 16, mask=x_mask, other=0.0).to(DOT_DTYPE)
        codes = codes_tile + tl.cast(start, tl.int64) * (N * code_bytes)
        low = tl.load(codes, mask=group_mask[:, :, None], other=0)
        if FOUR_BIT:
            high = low >> 4
            low = low & 15
        else:
            high = tl.load(codes + 16, mask=group_mask[:, :, None], other=0)
        scales = tl.load(scales_ptr + start * N + of_group, mask=group_mask, other=0.0).to(tl.float32)[:, :, None]
        low = low.to(tl.float32) * scales
        high = high.to(tl.float32) * scales
        if FOUR_BIT:
            minima = tl.load(minima_ptr + start * N + of_group, mask=group_mask, other=0.0).to(tl.float32)[:, :, None]
            low += minima
            high += minima
        low = tl.trans(tl.reshape(low.to(DOT_DTYPE), (TILE_N, TILE_G * 16)))
        high = tl.trans(tl.reshape(high.to(DOT_DTYPE), (TILE_N, TILE_G * 16)))
        acc = tl.dot(x_low, low, acc, input_precision="ieee")
        acc = tl.dot(x_high, high, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=row_mask & column_mask[None, :])


def quantized_matmul(
    x: torch.Tensor, weight: PackedWeight, *, out_dtype: torch.dtype | None = None, batch_invariant: bool = False
) -> torch.Tensor:
    """x [M, K], last axis contiguous -> [M, N] in out_dtype, by default x's: x @ w.T + bias, float32 sums.

    batch_invariant: a row's bits don't depend on the other rows, nor on how many there are.
    """
    num_rows, num_columns = x.shape[0], weight.out_features
    out = x.new_empty((num_rows, num_columns), dtype=out_dtype or x.dtype)
    if batch_invariant:
        tile_m, tile_n, tile_g = 32, 32, 4
    else:
        tile_m, tile_n, tile_g = (16, 32, 8) if num_rows <= 16 else (64, 64, 2)
    unused = weight.scales
    grid = (triton.cdiv(num_rows, tile_m), triton.cdiv(num_columns, tile_n))
    quantized_matmul_kernel[grid](
        out, x, weight.codes, weight.scales,
        unused if weight.minima is None else weight.minima, unused if weight.bias is None else weight.bias,
        num_rows, x.stride(0),
        N=num_columns, NUM_GROUPS=weight.in_features // GROUP,
        FOUR_BIT=weight.minima is not None, BIAS=weight.bias is not None,
        TILE_M=tile_m, TILE_N=tile_n, TILE_G=tile_g, DOT_DTYPE=dot_dtype(x.dtype), num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
