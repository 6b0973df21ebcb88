"""What the decode and prefill kernels share: where a paged key lies, how it scores, and the running softmax.

Softmax is online (Milakov and Gimelshein 2018; FlashAttention, Dao 2022) and in base 2: scores arrive multiplied by
log2(e), so `exp2` is the hardware's own instruction.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_paged(
    base: tl.tensor,
    block_ids: tl.tensor,
    offsets_in_block: tl.tensor,
    dims: tl.tensor,
    mask: tl.tensor,
    stride_block: int,
    stride_token: int,
    DOT_DTYPE: tl.constexpr,
) -> tl.tensor:
    """[TILE, D_PAD] of one head's keys or values, in DOT_DTYPE. Masked lanes are 0 and touch no memory.

    block_ids: int64[TILE]; a cache holds more than 2**31 elements long before it fills a card.
    """
    rows = block_ids * stride_block + offsets_in_block * stride_token
    return tl.load(base + rows[:, None] + dims[None, :], mask=mask, other=0.0).to(DOT_DTYPE)


@triton.jit
def scores_base2(dots: tl.tensor, scale: float, SOFT_CAP: tl.constexpr) -> tl.tensor:
    """float32 q.k -> log2(e) * cap(scale * q.k); cap(x) = SOFT_CAP * tanh(x / SOFT_CAP), or x where SOFT_CAP is 0."""
    scores = dots * scale
    if SOFT_CAP > 0:
        # tanh without libdevice, which the interpreter doesn't have; the exponent is <= 0, so nothing overflows.
        decay = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E / SOFT_CAP))
        magnitude = SOFT_CAP * (1.0 - decay) / (1.0 + decay)
        scores = tl.where(scores < 0, -magnitude, magnitude)
    return scores * LOG2_E


@triton.jit
def softmax_step(
    scores: tl.tensor, values: tl.tensor, best: tl.tensor, total: tl.tensor, acc: tl.tensor, DOT_DTYPE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Folds one tile into (best, total, acc). scores: float32[ROWS, TILE], -inf where masked; values: [TILE, D_PAD]."""
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    # A row that has seen only masked keys keeps best = -inf; -inf - -inf would be NaN.
    anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores - anchor[:, None])
    decay = tl.exp2(best - anchor)
    total = total * decay + tl.sum(weights, axis=1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(DOT_DTYPE), values, acc, input_precision="ieee")
    return new_best, total, acc
