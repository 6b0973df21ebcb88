"""Qwen 2, 2.5 (biases on q, k and v) and Qwen 3 (an RMSNorm on each head's q and k instead)."""

from dataclasses import replace

from server.models.families.common import gguf_spec, hf_spec, layer_windows
from server.models.fields import Fields
from server.models.spec import ModelSpec


def qwen2_from_hf(config: Fields) -> ModelSpec:
    return replace(_from_hf("qwen2", config), qkv_bias=True)


def qwen3_from_hf(config: Fields) -> ModelSpec:
    bias = config.bool("attention_bias", False)
    return replace(_from_hf("qwen3", config), qk_norm=True, qkv_bias=bias, output_bias=bias)


def qwen2_from_gguf(meta: Fields) -> ModelSpec:
    return replace(gguf_spec("qwen2", meta), qkv_bias=True)


def qwen3_from_gguf(meta: Fields) -> ModelSpec:
    return replace(gguf_spec("qwen3", meta), qk_norm=True)


def _from_hf(family: str, config: Fields) -> ModelSpec:
    """sliding_window is set in most files and counts only with use_sliding_window; the lower layers stay full."""
    spec = hf_spec(family, config)
    if not config.bool("use_sliding_window", False):
        return spec
    window = config.int("sliding_window", 0, least=0)
    first = config.int("max_window_layers", 28, least=0)
    default = [window > 0 and layer >= first for layer in range(spec.num_layers)]
    return replace(spec, windows=layer_windows(config, spec.num_layers, window, default=default))
