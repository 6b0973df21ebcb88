"""Tiny random checkpoints, made on the spot with transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama-tied-wide-heads": ("Llama", {"tie_word_embeddings": True, "head_dim": 32, "num_key_value_heads": 1}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": ("Llama", _rope("linear", factor=4.0)),
    "llama-dynamic-rope": ("Llama", {**_rope("dynamic", factor=2.0), "max_position_embeddings": 64}),
    "llama-yarn-rope": ("Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7, "head_dim": 16}),
    "qwen2": ("Qwen2", {"use_sliding_window": False, "sliding_window": 8}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3-capped": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "num_hidden_layers": 2,
            "final_logit_softcapping": 2.0,
            "tie_word_embeddings": False,
        },
    ),
}


def make_model(case: str, **overrides: Any) -> PreTrainedModel:
    """The case's model with weights large enough that its tokens vary. float32, eager attention."""
    family, settings = CASES[case]
    names = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}
    config_name, model_name = names.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    config: PreTrainedConfig = getattr(transformers, config_name)(
        **{**SIZES, **settings, **overrides}, attn_implementation="eager"
    )
    torch.manual_seed(7)
    model: PreTrainedModel = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if "norm" in name or "bias" in name else 0.15
            parameter.add_(torch.randn_like(parameter) * scale)
    return model


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder
