"""Mistral: Llama with a sliding window over all layers, in its first version. Its GGUF files call themselves llama."""

from dataclasses import replace

from server.models.families.common import hf_spec, layer_windows
from server.models.fields import Fields
from server.models.spec import ModelSpec


def from_hf(config: Fields) -> ModelSpec:
    spec = hf_spec("mistral", config)
    window = config.int("sliding_window", 0, least=0)
    windows = layer_windows(config, spec.num_layers, window, default=[window > 0] * spec.num_layers)
    return replace(spec, windows=windows)
