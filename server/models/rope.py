"""Rotary position embedding: the cos/sin table, for each way of stretching it.

default: Su et al., "RoFormer" (2021). linear: position interpolation, Chen et al. (2023). dynamic: NTK-aware scaling as
bloc97 and emozilla proposed it (2023). yarn: Peng et al., "YaRN" (2023). llama3: the rule of Llama 3.1's release.
"""

import math

import torch

from server.errors import ModelLoadError
from server.models.spec import RopeSpec


def rope_table(rope: RopeSpec, num_positions: int, *, freq_factors: torch.Tensor | None = None) -> torch.Tensor:
    """float32[num_positions, rotary_dim]: cosines in the first half of the last axis, sines in the second.

    freq_factors: float32[rotary_dim // 2] divides the frequencies; a GGUF file's form of llama3 scaling.

    A dynamic embedding's base grows with the length of the sequence. Here position p is rotated as in a sequence of
    p + 1 tokens, so that a token's key depends on nothing behind it: not on chunking, not on what follows. It is what
    transformers computes when it generates token by token.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    if rope.kind == "dynamic":
        lengths = (positions + 1).double()
        frequencies = _frequencies(_dynamic_base(rope, lengths)[:, None], rope.rotary_dim)  # [num_positions, dim / 2]
    else:
        frequencies = inverse_frequencies(rope)[None, :]
    if freq_factors is not None:
        frequencies = frequencies / freq_factors
    angles = positions[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1) * attention_factor(rope)


def inverse_frequencies(rope: RopeSpec, *, seq_len: int = 0) -> torch.Tensor:
    """float32[rotary_dim // 2]: radians a position. seq_len matters to a dynamic embedding only."""
    match rope.kind:
        case "default":
            return _frequencies(rope.theta, rope.rotary_dim)
        case "linear":
            return _frequencies(rope.theta, rope.rotary_dim) / rope.factor
        case "dynamic":
            base = _dynamic_base(rope, torch.tensor(float(seq_len), dtype=torch.float64))
            return _frequencies(base, rope.rotary_dim)
        case "llama3":
            return _llama3(rope)
        case "yarn":
            return _yarn(rope)
    raise ModelLoadError(f"RoPE type {rope.kind!r} is not supported")


def dynamic_base(rope: RopeSpec, seq_len: int) -> float:
    """The base of a dynamic embedding in a sequence of seq_len tokens: theta up to the trained context."""
    return float(_dynamic_base(rope, torch.tensor(float(seq_len), dtype=torch.float64)))


def attention_factor(rope: RopeSpec) -> float:
    """What YaRN multiplies cos and sin by; 1 for the others."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _frequencies(base: float | torch.Tensor, dim: int) -> torch.Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return (1.0 / torch.pow(base, exponents)).float()


def _dynamic_base(rope: RopeSpec, lengths: torch.Tensor) -> torch.Tensor:
    """float64 in and out, any shape."""
    lengths = lengths.clamp(min=rope.original_max_position)
    growth = rope.factor * lengths / rope.original_max_position - (rope.factor - 1)
    return rope.theta * growth ** (rope.rotary_dim / (rope.rotary_dim - 2))


def _llama3(rope: RopeSpec) -> torch.Tensor:
    """Long waves are stretched by factor, short ones stay, those between are blended."""
    frequencies = _frequencies(rope.theta, rope.rotary_dim)
    wavelengths = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = (rope.original_max_position / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    stretched = torch.where(wavelengths > rope.original_max_position / low, frequencies / rope.factor, blended)
    return torch.where(wavelengths < rope.original_max_position / high, frequencies, stretched)


def _yarn(rope: RopeSpec) -> torch.Tensor:
    """Dimensions that turn more than beta_fast times within the trained context stay; below beta_slow they stretch."""

    def dimension(num_rotations: float) -> float:
        turns = rope.original_max_position / (num_rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, rope.rotary_dim - 1.0)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = _frequencies(rope.theta, rope.rotary_dim)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)
