"""Llama 1 to 3 and what shares its architecture: SmolLM, TinyLlama, Yi, ..."""

from dataclasses import replace

from server.models.families.common import gguf_spec, hf_spec
from server.models.fields import Fields
from server.models.spec import ModelSpec


def from_hf(config: Fields) -> ModelSpec:
    bias = config.bool("attention_bias", False)
    return replace(hf_spec("llama", config), qkv_bias=bias, output_bias=bias, mlp_bias=config.bool("mlp_bias", False))


def from_gguf(meta: Fields) -> ModelSpec:
    return gguf_spec("llama", meta)
