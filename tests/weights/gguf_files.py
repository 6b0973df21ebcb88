"""Tiny GGUF files for tests: a Hugging Face model written with the gguf package as llama.cpp's converter would."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from transformers import PreTrainedModel

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of a llama's q and k."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_name(hf_name: str, *, gemma: bool) -> str:
    stem, kind = hf_name.rsplit(".", 1)
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    names = LAYER_NAMES | (GEMMA_NAMES if gemma else {})
    return f"blk.{layer}.{names[part]}.{kind}"


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    architecture: str,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    keep: Callable[[str], bool] = lambda name: True,
) -> Path:
    """Writes the model's matrices as `kind` and its vectors as float32.

    metadata: more keys, without the architecture. extra: more tensors. keep: which GGUF tensor names to write.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    gemma = architecture == "gemma3"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    for key, value in (metadata or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add = writer.add_uint32 if isinstance(value, int) else add
        add(f"{architecture}.{key}", value)
    tied = getattr(config, "tie_word_embeddings", False)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        array = tensor.to(torch.float32).numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = permute(array, heads)
        if gemma and "norm" in name:
            array = array + 1
        target = gguf_name(name, gemma=gemma)
        if not keep(target):
            continue
        if array.ndim == 2 and kind != GGMLQuantizationType.F32:
            writer.add_tensor(target, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, np.ascontiguousarray(array))
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def round_weights(model: PreTrainedModel, kind: GGMLQuantizationType) -> None:
    """Replaces the model's matrices by what they are after quantising: the same numbers that the file holds."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                blocks = gguf.quants.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, kind)))
