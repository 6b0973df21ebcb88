"""What the families' configurations have in common."""

from server.errors import ModelLoadError
from server.models.fields import Fields
from server.models.rope_config import extended_context, read_gguf_rope, read_hf_rope
from server.models.spec import ModelSpec

# Beyond any model that exists: a broken file must not make us build lists of billions of entries.
MAX_LAYERS, MAX_HEADS, MAX_HIDDEN, MAX_VOCABULARY = 1 << 10, 1 << 10, 1 << 17, 1 << 22

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def hf_spec(family: str, config: Fields) -> ModelSpec:
    """The spec of a plain Llama-like config.json: full attention, no biases. Families replace what differs."""
    hidden, heads = config.int("hidden_size", most=MAX_HIDDEN), config.int("num_attention_heads", most=MAX_HEADS)
    head_dim = config.int("head_dim", hidden // heads)
    max_position = config.int("max_position_embeddings", 2048)
    rope = read_hf_rope(config, head_dim=head_dim, max_position=max_position)
    num_layers = config.int("num_hidden_layers", most=MAX_LAYERS)
    return ModelSpec(
        family=family,
        vocab_size=config.int("vocab_size", most=MAX_VOCABULARY),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=config.int("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=config.int("intermediate_size", most=8 * MAX_HIDDEN),
        max_position=extended_context(rope, max_position),
        norm_eps=config.float("rms_norm_eps", 1e-6),
        rope=rope,
        windows=(0,) * num_layers,
        attention_scale=head_dim**-0.5,
        activation=activation(config, "hidden_act"),
        tie_embeddings=config.bool("tie_word_embeddings", False),
    )


def gguf_spec(family: str, meta: Fields) -> ModelSpec:
    """The spec of a plain Llama-like GGUF file. vocab_size is the embedding's, which the caller knows: see registry."""
    hidden, heads = meta.int("embedding_length", most=MAX_HIDDEN), meta.int("attention.head_count", most=MAX_HEADS)
    head_dim = meta.int("attention.key_length", hidden // heads)
    if meta.int("attention.value_length", head_dim) != head_dim:
        raise ModelLoadError(f"{meta.where}: keys and values of different head sizes are not supported")
    meta.refuse("expert_count", 0)
    max_position = meta.int("context_length", 2048)
    num_layers = meta.int("block_count", most=MAX_LAYERS)
    return ModelSpec(
        family=family,
        vocab_size=meta.int("vocab_size", most=MAX_VOCABULARY),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=meta.int("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=meta.int("feed_forward_length", most=8 * MAX_HIDDEN),
        max_position=max_position,
        norm_eps=meta.float("attention.layer_norm_rms_epsilon", 1e-6),
        rope=read_gguf_rope(meta, head_dim=head_dim, max_position=max_position),
        windows=(0,) * num_layers,
        attention_scale=head_dim**-0.5,
        tie_embeddings=True,
    )


def activation(config: Fields, key: str) -> str:
    name = config.get(key) or "silu"
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelLoadError(f"{config.where}: {key} = {name!r} is not supported, only {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def layer_windows(config: Fields, num_layers: int, window: int, *, default: list[bool]) -> tuple[int, ...]:
    """One window a layer. layer_types says which layers have one; default (True: has one) where it is absent."""
    types = config.get("layer_types")
    if types is None:
        sliding = default
    else:
        if not isinstance(types, list) or len(types) != num_layers:
            raise ModelLoadError(f"{config.where}: layer_types must name a type for each of the {num_layers} layers")
        unknown = {str(kind) for kind in types} - {"full_attention", "sliding_attention"}
        if unknown:
            raise ModelLoadError(f"{config.where}: layer type {sorted(unknown)[0]!r} is not supported")
        sliding = [kind == "sliding_attention" for kind in types]
    if any(sliding) and not window:
        raise ModelLoadError(f"{config.where}: layers use sliding attention but there is no sliding_window")
    return tuple(window if slides else 0 for slides in sliding)
