"""Reads a RopeSpec from the spellings that checkpoints use for it. No torch."""

import math

from server.errors import ModelLoadError
from server.models.fields import Fields
from server.models.spec import ROPE_KINDS, RopeSpec

DEFAULT_THETA = 10000.0


def read_hf_rope(
    config: Fields, *, head_dim: int, max_position: int, parameters: Fields | None = None, theta: float | None = None
) -> RopeSpec:
    """Reads rope_theta and the scaling from config.json.

    Two spellings exist: rope_theta at the top level with rope_scaling beside it, and the newer rope_parameters that
    holds both. parameters: the object to read instead (Gemma 3 has one a layer type). theta: what to assume where the
    file names none.
    """
    scaling = parameters or config.mapping("rope_parameters") or config.mapping("rope_scaling") or Fields({}, "rope")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        known = ", ".join(ROPE_KINDS)
        raise ModelLoadError(f"{scaling.where}: rope_type {kind!r} is not supported, only {known}")
    base = scaling.float("rope_theta", config.float("rope_theta", theta or DEFAULT_THETA))
    share = scaling.float("partial_rotary_factor", config.float("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * share)
    if kind == "default":
        return RopeSpec(base, rotary_dim)
    # transformers takes a dynamic embedding's trained context from max_position_embeddings, whatever else is there.
    original = scaling.int(
        "original_max_position_embeddings", config.int("original_max_position_embeddings", 0, least=0), least=0
    )
    if kind == "dynamic" or not original:
        original = max_position
    factor = scaling.float("factor", max_position / original if kind == "yarn" else None)
    return RopeSpec(
        base,
        rotary_dim,
        kind=kind,
        factor=factor,
        original_max_position=original,
        low_freq_factor=scaling.float("low_freq_factor", 1.0 if kind != "llama3" else None),
        high_freq_factor=scaling.float("high_freq_factor", 4.0 if kind != "llama3" else None),
        beta_fast=scaling.float("beta_fast", 32.0),
        beta_slow=scaling.float("beta_slow", 1.0),
        attention_factor=_optional(scaling, "attention_factor"),
        mscale=_optional(scaling, "mscale"),
        mscale_all_dim=_optional(scaling, "mscale_all_dim"),
        truncate=scaling.bool("truncate", True),
    )


def read_gguf_rope(meta: Fields, *, head_dim: int, max_position: int) -> RopeSpec:
    """Reads <arch>.rope.*. A llama3 embedding is not spelled there but in the tensor rope_freqs.weight."""
    theta = meta.float("rope.freq_base", DEFAULT_THETA)
    rotary_dim = meta.int("rope.dimension_count", head_dim)
    kind = meta.get("rope.scaling.type") or ("linear" if meta.get("rope.scale_linear") else "none")
    if kind == "none":
        return RopeSpec(theta, rotary_dim)
    factor = meta.float("rope.scaling.factor", meta.float("rope.scale_linear", 1.0))
    if kind == "linear":
        return RopeSpec(theta, rotary_dim, kind="linear", factor=factor)
    if kind == "yarn":
        # llama.cpp multiplies the paper's factor by attn_factor where transformers lets attention_factor replace it.
        attention_factor = meta.float("rope.scaling.attn_factor", 1.0) * (0.1 * math.log(max(factor, 1.0)) + 1.0)
        return RopeSpec(
            theta,
            rotary_dim,
            kind="yarn",
            factor=factor,
            original_max_position=meta.int("rope.scaling.original_context_length", max_position),
            beta_fast=meta.float("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=meta.float("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=attention_factor,
        )
    raise ModelLoadError(f"{meta.where}: rope scaling {kind!r} is not supported, only none, linear, yarn")


def extended_context(rope: RopeSpec, max_position: int) -> int:
    """How many positions a checkpoint serves whose max_position_embeddings is max_position."""
    if rope.kind in ("linear", "dynamic"):
        return int(max_position * rope.factor)
    if rope.kind == "yarn":
        return max(max_position, int(rope.original_max_position * rope.factor))
    return max_position


def _optional(fields: Fields, key: str) -> float | None:
    return None if fields.get(key) is None else fields.float(key, positive=False)
