"""From configurations, as files spell them, to a ModelSpec."""

from pathlib import Path
from typing import Any

import pytest

from server.errors import ModelLoadError
from server.models.registry import GGUF_FAMILIES, HF_FAMILIES, read_spec
from server.models.spec import ModelSpec
from server.weights.gguf_metadata import GgufHeader, GgufTensorInfo
from server.weights.locate import ModelFiles

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def from_config(**settings: Any) -> ModelSpec:
    return read_spec(ModelFiles("m", "hf", Path("m"), {**SMOLLM2, **settings}))


def from_gguf(architecture: str, **settings: Any) -> ModelSpec:
    metadata = {
        "embedding_length": 64,
        "block_count": 6,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "context_length": 512,
        **settings,
    }
    header = GgufHeader(3, {}, (GgufTensorInfo("token_embd.weight", (64, 100), 0, 0),), 0, 0)
    config = {f"{architecture}.{key}": value for key, value in metadata.items()}
    return read_spec(ModelFiles("m", "gguf", Path("m"), {"general.architecture": architecture, **config}, gguf=header))


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 100000},
        {"rope_theta": 100000.0, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 100000, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 100000.0}},
    ],
)
def test_rope_theta_in_both_spellings(settings: dict[str, Any]) -> None:
    """The newer rope_parameters, or the older rope_theta, fall back to 10000."""
    assert from_config(**settings).rope.theta == 100000.0


@pytest.mark.parametrize(("head_dim", "expected"), [(None, 64), (48, 48)])
def test_head_dim(head_dim: int | None, expected: int) -> None:
    """A null head_dim taken for a number, or an explicit one ignored."""
    spec = from_config(head_dim=head_dim)
    assert spec.head_dim == expected
    assert spec.attention_scale == expected**-0.5


@pytest.mark.parametrize(
    ("scaling", "kind", "max_position"),
    [
        ({"type": "linear", "factor": 2.0}, "linear", 16384),
        ({"rope_type": "dynamic", "factor": 4.0}, "dynamic", 32768),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, "yarn", 16384),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}, "yarn", 8192),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
            "llama3",
            8192,
        ),
    ],
)
def test_rope_scaling(scaling: dict[str, Any], kind: str, max_position: int) -> None:
    """The older "type" key unread, or the context that a scaling brings."""
    spec = from_config(rope_scaling=scaling)
    assert (spec.rope.kind, spec.max_position) == (kind, max_position)


def test_partial_rotary() -> None:
    """All of a head rotated where only a part should."""
    assert from_config(partial_rotary_factor=0.5).rope.rotary_dim == 32


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 9}, (9, 9, 9)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (0, 0, 0)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9, "use_sliding_window": False}, (0, 0, 0)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9}, (0, 0, 0)),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            (0, 0, 9),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (9, 0, 9),
        ),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 9}, (0, 0, 0)),
    ],
)
def test_windows(settings: dict[str, Any], windows: tuple[int, ...]) -> None:
    """A window used though it is switched off, or on the wrong layers."""
    assert from_config(num_hidden_layers=3, **settings).windows == windows


def test_gemma3_in_its_older_spelling() -> None:
    """Gemma 3 as first published: top-level rope_theta, rope_scaling for the full layers, a base for the local ones."""
    spec = from_config(
        architectures=["Gemma3ForCausalLM"],
        hidden_activation="gelu_pytorch_tanh",
        num_hidden_layers=7,
        head_dim=256,
        sliding_window=512,
        sliding_window_pattern=6,
        query_pre_attn_scalar=256,
        rope_theta=1000000,
        rope_local_base_freq=10000,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert spec.windows == (512,) * 5 + (0, 512)
    assert (spec.rope.theta, spec.rope.kind, spec.rope.factor) == (1000000.0, "linear", 8.0)
    assert spec.local_rope is not None
    assert (spec.local_rope.theta, spec.local_rope.kind) == (10000.0, "default")
    assert (spec.max_position, spec.norm_offset, spec.embedding_scale) == (8192, 1.0, 24.0)


def test_gguf_spec() -> None:
    """GGUF metadata: key/value heads, head size and RoPE base."""
    spec = from_gguf("qwen3", **{"attention.head_count_kv": 2, "attention.key_length": 32, "rope.freq_base": 1e6})
    assert (spec.num_kv_heads, spec.head_dim, spec.rope.theta, spec.qk_norm) == (2, 32, 1e6, True)
    assert (spec.vocab_size, spec.norm_offset) == (100, 0.0)
    yarn = from_gguf(
        "llama",
        **{
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
        },
    )
    assert yarn.rope.attention_factor == pytest.approx(1.138629, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": None, "model_type": "phi"}, "phi"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "inf"}}, "factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": 576.5}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
        ({"num_key_value_heads": 2}, "evenly"),
        ({"head_dim": 63}, "rotary"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["full"] * 30}, "full"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["full"]}, "layer_types"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_what_is_not_supported_is_named(settings: dict[str, Any], named: str) -> None:
    """An unsupported or broken configuration that loads, or fails with something else than a message that names it."""
    with pytest.raises(ModelLoadError, match=named):
        from_config(**settings)


@pytest.mark.parametrize(
    ("architecture", "settings", "named"),
    [
        ("phi3", {}, "phi3"),
        ("llama", {"expert_count": 8}, "expert_count"),
        ("llama", {"rope.scaling.type": "longrope"}, "longrope"),
        ("llama", {"attention.value_length": 8}, "head sizes"),
        ("llama", {"block_count": None}, "block_count"),
        ("llama", {"block_count": 1 << 40}, "block_count"),
    ],
)
def test_gguf_what_is_not_supported_is_named(architecture: str, settings: dict[str, Any], named: str) -> None:
    """The same for GGUF metadata."""
    with pytest.raises(ModelLoadError, match=named):
        from_gguf(architecture, **settings)


def test_every_family_reads_a_plain_configuration() -> None:
    """A family that can't be reached, or whose reader needs a key that files often lack."""
    for architecture in HF_FAMILIES:
        extra = {"hidden_activation": "gelu_pytorch_tanh"} if "Gemma" in architecture else {}
        assert from_config(architectures=[architecture], **extra).num_layers == 30
    for architecture in GGUF_FAMILIES:
        assert from_gguf(architecture).num_layers == 6
