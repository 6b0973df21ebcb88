"""Token sampling, one program a row: temperature, top-k, top-p of what top-k left, min-p, then Gumbel-max.

Nothing is sorted. With the largest logit subtracted every score is <= 0, so the bits of -score are an integer key that
grows as tokens get less likely; the key where top-k or top-p cuts is found by searching the range of keys, PIVOTS of
them to a pass over the row, which lies in the L2 cache. Tokens that tie at the cut are kept together.

Gumbel-max (Gumbel 1954): argmax of score + noise is a draw from the softmax. A token's noise is Philox4x32-10 (Salmon
et al. 2011) with key = seed and counter = (token id, position): it depends on nothing else, neither batch nor row.
Hence a resumed request continues as it would have. (The sampler in server.sampling draws from the same distributions
with other random numbers.)
"""

import torch
import triton
import triton.language as tl

INF_KEY = tl.constexpr(0x7F800000)
"""The key of score -inf."""


@triton.jit
def _keys(
    row: tl.tensor, start: int, vocab_size: int, best: float, inverse_temperature: float, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(keys i32[TILE], scores f32[TILE]) of one tile; INF_KEY and -inf beyond the vocabulary."""
    ids = start + tl.arange(0, TILE)
    logits = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    scores = (logits - best) * inverse_temperature
    return tl.abs(scores).to(tl.int32, bitcast=True), scores


@triton.jit
def _cut(
    row: tl.tensor,
    vocab_size: int,
    best: float,
    inverse_temperature: float,
    high: tl.tensor,
    target: float,
    BY_MASS: tl.constexpr,
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The least key <= high up to which the tokens reach target: in number, or in unnormalised mass if BY_MASS."""
    low = -1
    while high - low > 1:
        step = (high - low - 1) // (PIVOTS + 1) + 1
        pivots = tl.minimum(low + step * (1 + tl.arange(0, PIVOTS)), high)
        reached = tl.zeros([PIVOTS], tl.float32)
        for start in range(0, vocab_size, TILE):
            keys, scores = _keys(row, start, vocab_size, best, inverse_temperature, TILE)
            amounts = tl.exp(scores) if BY_MASS else tl.where(keys < INF_KEY, 1.0, 0.0)
            below = keys[None, :] <= pivots[:, None]
            reached += tl.sum(tl.where(below, amounts[None, :], 0.0), axis=1)
        enough = reached >= target
        new_high = tl.min(tl.where(enough, pivots, high), axis=0)
        # A pivot that doesn't reach the target lies below new_high, because the amounts only grow.
        low = tl.max(tl.where(enough | (pivots >= new_high), low, pivots), axis=0)
        high = new_high
    return high


@triton.jit
def _exponential(bits: tl.tensor) -> tl.tensor:
    """uint32 -> float32, exponentially distributed: -log(1 - v), v = bits / 2**32, precise where v is small.

    Small values are the large noises that win, so that end keeps all 32 bits.
    """
    v = (bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * 0.25)))
    return tl.where(v < 0.01, series, -tl.log(tl.maximum(1.0 - v, 1.0 / 33554432.0)))


@triton.jit(do_not_specialize=["vocab_size"])
def sample_kernel(
    out_ptr: tl.tensor,  # i64 [S]
    logits_ptr: tl.tensor,  # [S, V]
    temperature_ptr: tl.tensor,  # f32 [S]
    top_k_ptr: tl.tensor,  # i32 [S]
    top_p_ptr: tl.tensor,  # f32 [S]
    min_p_ptr: tl.tensor,  # f32 [S]
    seeds_ptr: tl.tensor,  # i64 [S], the bits of a uint64
    positions_ptr: tl.tensor,  # i64 [S]
    vocab_size: int,
    logits_stride: int,
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Grid: (S,)."""
    index = tl.program_id(0)
    row = logits_ptr + index.to(tl.int64) * logits_stride
    best = float("-inf")
    best_id = tl.full([], 0, tl.int32)
    num_nan = 0
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        logits = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        num_nan += tl.sum((logits != logits).to(tl.int32), axis=0)
        tile_best = tl.max(logits, axis=0)
        tile_id = tl.min(tl.where(logits == tile_best, ids, vocab_size), axis=0)
        best_id = tl.where(tile_best > best, tile_id, best_id)
        best = tl.maximum(best, tile_best)
    if num_nan > 0 or tl.abs(best) == float("inf"):
        tl.store(out_ptr + index, tl.full([], -1, tl.int64))
        return
    temperature = tl.load(temperature_ptr + index)
    if temperature <= 0:
        tl.store(out_ptr + index, best_id.to(tl.int64))
        return
    inverse_temperature = 1.0 / temperature

    cut = tl.full([], INF_KEY, tl.int32)
    top_k = tl.load(top_k_ptr + index)
    if top_k > 0 and top_k < vocab_size:
        cut = _cut(row, vocab_size, best, inverse_temperature, cut, top_k.to(tl.float32), False, PIVOTS, TILE)
    top_p = tl.load(top_p_ptr + index)
    if top_p < 1:
        mass = 0.0
        for start in range(0, vocab_size, TILE):
            keys, scores = _keys(row, start, vocab_size, best, inverse_temperature, TILE)
            mass += tl.sum(tl.where(keys <= cut, tl.exp(scores), 0.0), axis=0)
        cut = _cut(row, vocab_size, best, inverse_temperature, cut, top_p * mass, True, PIVOTS, TILE)

    min_p = tl.load(min_p_ptr + index)
    seed = tl.load(seeds_ptr + index)
    position = tl.load(positions_ptr + index)
    winner = float("-inf")
    winner_id = best_id
    for start in range(0, vocab_size, TILE):
        keys, scores = _keys(row, start, vocab_size, best, inverse_temperature, TILE)
        ids = start + tl.arange(0, TILE)
        zeros = tl.zeros([TILE], tl.int32)
        bits, _, _, _ = tl.philox(seed, ids, zeros + position.to(tl.int32), zeros, zeros)
        noisy = scores - tl.log(_exponential(bits))
        # exp(0) = 1 is the likeliest token's weight, which min_p is relative to.
        noisy = tl.where((keys <= cut) & (tl.exp(scores) >= min_p), noisy, float("-inf"))
        tile_winner = tl.max(noisy, axis=0)
        tile_id = tl.min(tl.where(noisy == tile_winner, ids, vocab_size), axis=0)
        winner_id = tl.where(tile_winner > winner, tile_id, winner_id)
        winner = tl.maximum(winner, tile_winner)
    tl.store(out_ptr + index, winner_id.to(tl.int64))


def sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """One token a row, i64[S], on the logits' device, without a sync; -1 where the logits are not finite.

    logits: [S, V], last axis contiguous, left as they are. temperature, top_p, min_p: f32[S]; a temperature of 0 is
    greedy, ties to the lowest id. top_k: i32[S], <= 0 is off. seeds, positions: i64[S]; a seed has the bits of a
    uint64, a position is that of the token to be chosen, < 2**32.
    """
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    sample_kernel[(num_rows,)](
        out, logits, temperature, top_k, top_p, min_p, seeds, positions, vocab_size, logits.stride(0),
        PIVOTS=8, TILE=1024, num_warps=8,
    )  # fmt: skip
    return out
