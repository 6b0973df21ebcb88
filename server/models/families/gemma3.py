"""Gemma 3, text only: five layers with a sliding window and their own RoPE base to one with full attention."""

from dataclasses import replace

from server.models.families.common import activation, gguf_spec, hf_spec, layer_windows
from server.models.fields import Fields
from server.models.rope_config import read_hf_rope
from server.models.spec import ModelSpec, RopeSpec

_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_PATTERN = 6


def from_hf(config: Fields) -> ModelSpec:
    for key in ("use_bidirectional_attention", "attention_bias"):
        config.refuse(key)
    rope_by_type = config.mapping("rope_parameters") or Fields({}, "rope_parameters")
    plain = Fields({key: value for key, value in config.values.items() if key != "rope_parameters"}, config.where)
    spec = hf_spec("gemma3", plain)
    full = read_hf_rope(
        plain,
        head_dim=spec.head_dim,
        max_position=spec.max_position,
        parameters=rope_by_type.mapping("full_attention"),
        theta=_GLOBAL_THETA,
    )
    local_theta = config.float("rope_local_base_freq", _LOCAL_THETA)
    sliding = rope_by_type.mapping("sliding_attention")
    local = (
        read_hf_rope(plain, head_dim=spec.head_dim, max_position=spec.max_position, parameters=sliding)
        if sliding
        else RopeSpec(local_theta, full.rotary_dim)
    )
    window = config.int("sliding_window", 4096)
    pattern = config.int("sliding_window_pattern", _PATTERN)
    default = [(layer + 1) % pattern != 0 for layer in range(spec.num_layers)]
    return replace(
        spec,
        max_position=config.int("max_position_embeddings", 131072),
        rope=full,
        local_rope=local,
        windows=layer_windows(config, spec.num_layers, window, default=default),
        attention_scale=config.float("query_pre_attn_scalar", 256.0) ** -0.5,
        activation=activation(config, "hidden_activation"),
        qk_norm=True,
        tie_embeddings=config.bool("tie_word_embeddings", True),
        norm_offset=1.0,
        sandwich_norms=True,
        embedding_scale=spec.hidden_size**0.5,
        attention_soft_cap=config.float("attn_logit_softcapping", 0.0, positive=False),
        logit_soft_cap=config.float("final_logit_softcapping", 0.0, positive=False),
    )


def from_gguf(meta: Fields) -> ModelSpec:
    """llama.cpp's converter has already added 1 to the norm weights; the 27B model scales its queries differently."""
    spec = gguf_spec("gemma3", meta)
    window = meta.int("attention.sliding_window", 1024)
    is_27b = spec.num_layers == 62
    scale = spec.hidden_size / spec.num_heads if is_27b else spec.head_dim
    local_theta = meta.float("rope.freq_base_swa", _LOCAL_THETA)
    return replace(
        spec,
        local_rope=RopeSpec(local_theta, spec.rope.rotary_dim),
        windows=tuple(0 if (layer + 1) % _PATTERN == 0 else window for layer in range(spec.num_layers)),
        attention_scale=scale**-0.5,
        activation="gelu_tanh",
        qk_norm=True,
        sandwich_norms=True,
        embedding_scale=spec.hidden_size**0.5,
        logit_soft_cap=meta.float("final_logit_softcapping", 0.0, positive=False),
    )
