"""The default model in transformers, float32, read from the GGUF by other code than the server's."""

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_oracle(file: Path) -> LlamaForCausalLM:
    """Raises KeyError for a file of another family than llama."""
    reader = gguf.GGUFReader(file)

    def figure(name: str) -> float:
        value: float = reader.fields[f"llama.{name}"].contents()
        return value

    heads, kv_heads = int(figure("attention.head_count")), int(figure("attention.head_count_kv"))
    weights = {tensor.name: torch.from_numpy(_floats(tensor)) for tensor in reader.tensors}
    config = LlamaConfig(
        vocab_size=weights["token_embd.weight"].shape[0],
        hidden_size=int(figure("embedding_length")),
        intermediate_size=int(figure("feed_forward_length")),
        num_hidden_layers=int(figure("block_count")),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=figure("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": figure("rope.freq_base")},
        max_position_embeddings=int(figure("context_length")),
        tie_word_embeddings="output.weight" not in weights,
    )
    state = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
    }
    state["lm_head.weight"] = weights.get("output.weight", weights["token_embd.weight"])
    for name, weight in weights.items():
        if name.startswith("blk."):
            _, layer, kind, _ = name.split(".")
            rotated = {"attn_q": heads, "attn_k": kv_heads}.get(kind)
            state[f"model.layers.{layer}.{_NAMES[kind]}.weight"] = (
                weight if rotated is None else _halves(weight, rotated)
            )
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model.eval()


def _floats(tensor: gguf.ReaderTensor) -> np.ndarray:
    shape = [int(size) for size in reversed(tensor.shape)]
    return np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(shape)


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF keeps the two rotated dimensions side by side, transformers half a head apart."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
