"""What GGUF calls a tensor, in Hugging Face's words."""

import re

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")


def hf_name(gguf_name: str, *, sandwich_norms: bool) -> str:
    """Translates a GGUF tensor name; one that it doesn't know comes back as it is, and counts as left over."""
    if gguf_name in _TOP:
        return _TOP[gguf_name]
    match = _BLOCK.fullmatch(gguf_name)
    if match is None:
        return gguf_name
    layer, part, kind = match.groups()
    translated = (_SANDWICH.get(part) if sandwich_norms else None) or _LAYER.get(part)
    return f"model.layers.{int(layer)}.{translated}.{kind}" if translated else gguf_name
