"""Dense product x @ w.T whose rows don't depend on one another, neither on how many there are nor on where one lies.

A vendor library chooses its kernel by the whole shape: in another batch a row's sums are added in another order. Here
the weight's width and the dtype choose the tile, and a row's sums run over K in that tile's steps, in order, by the
same instructions: batch invariance (He et al. 2025, "Defeating Nondeterminism in LLM Inference").
"""

import torch
import triton
import triton.language as tl

from kernels.triton.launch import Target, dot_dtype, matmul_config


@triton.jit(do_not_specialize=["num_rows"])
def matmul_kernel(
    out_ptr: tl.tensor,  # [M, N], contiguous
    x_ptr: tl.tensor,  # [M, K]
    weight_ptr: tl.tensor,  # [N, K], contiguous
    bias_ptr: tl.tensor,  # [N]
    num_rows: int,
    x_stride: int,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
) -> None:
    """Grid: (ceil(M / TILE_M), ceil(N / TILE_N)), rows fastest: programs that share weights run side by side."""
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    row_mask = (rows < num_rows)[:, None]
    column_mask = columns < N
    steps = tl.arange(0, TILE_K)
    x_tile = x_ptr + rows.to(tl.int64)[:, None] * x_stride + steps[None, :]
    weight_tile = weight_ptr + columns.to(tl.int64)[:, None] * K + steps[None, :]
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, K, TILE_K):
        live = (start + steps < K)[None, :]
        x = tl.load(x_tile + start, mask=row_mask & live, other=0.0).to(DOT_DTYPE)
        weight = tl.load(weight_tile + start, mask=column_mask[:, None] & live, other=0.0).to(DOT_DTYPE)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=row_mask & column_mask[None, :])


def matmul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, target: Target, out_dtype: torch.dtype
) -> torch.Tensor:
    """x [M, K], last axis contiguous -> [M, N] in out_dtype: x @ weight.T + bias, float32 sums, rounded once.

    weight: [N, K], contiguous, float32, float16 or bfloat16 as x. bias: [N] or None.
    """
    num_rows, (num_columns, depth) = x.shape[0], weight.shape
    config = matmul_config(target, num_columns, x.dtype)
    out = x.new_empty((num_rows, num_columns), dtype=out_dtype)
    grid = (triton.cdiv(num_rows, config.rows), triton.cdiv(num_columns, config.columns))
    matmul_kernel[grid](
        out, x, weight, weight if bias is None else bias, num_rows, x.stride(0),
        N=num_columns, K=depth, BIAS=bias is not None,
        TILE_M=config.rows, TILE_N=config.columns, TILE_K=config.depth, DOT_DTYPE=dot_dtype(x.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
