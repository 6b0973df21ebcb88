"""Which families we serve, and how each one's configuration becomes a ModelSpec. No torch."""

from collections.abc import Callable, Mapping
from typing import Any

from server.errors import ModelLoadError
from server.models.families import gemma3, llama, mistral, qwen
from server.models.fields import Fields
from server.models.spec import ModelSpec
from server.weights.locate import ModelFiles

Reader = Callable[[Fields], ModelSpec]

HF_FAMILIES: dict[str, Reader] = {
    "LlamaForCausalLM": llama.from_hf,
    "MistralForCausalLM": mistral.from_hf,
    "Qwen2ForCausalLM": qwen.qwen2_from_hf,
    "Qwen3ForCausalLM": qwen.qwen3_from_hf,
    "Gemma3ForCausalLM": gemma3.from_hf,
}
"""By config.json's "architectures"."""

GGUF_FAMILIES: dict[str, Reader] = {
    "llama": llama.from_gguf,
    "qwen2": qwen.qwen2_from_gguf,
    "qwen3": qwen.qwen3_from_gguf,
    "gemma3": gemma3.from_gguf,
}
"""By general.architecture."""

_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def read_spec(files: ModelFiles) -> ModelSpec:
    """Raises ModelLoadError, which names what is missing or not supported."""
    spec = _read_gguf(files) if files.kind == "gguf" else _read_hf(files.config)
    _check(spec)
    return spec


def _read_hf(config: Mapping[str, Any]) -> ModelSpec:
    fields = Fields(config, "config.json")
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    name = name or _MODEL_TYPES.get(str(config.get("model_type")), config.get("model_type"))
    reader = HF_FAMILIES.get(str(name))
    if reader is None:
        raise ModelLoadError(f"architecture {name!r} is not supported, only {', '.join(HF_FAMILIES)}")
    for key in ("quantization_config", "num_experts", "num_local_experts"):
        fields.refuse(key)
    return reader(fields)


def _read_gguf(files: ModelFiles) -> ModelSpec:
    """The embedding's rows are the truth about the vocabulary: <arch>.vocab_size is often absent."""
    name = files.config.get("general.architecture")
    reader = GGUF_FAMILIES.get(str(name))
    if reader is None:
        raise ModelLoadError(f"GGUF architecture {name!r} is not supported, only {', '.join(GGUF_FAMILIES)}")
    embedding = next(
        (info for info in (files.gguf.tensors if files.gguf else ()) if info.name == "token_embd.weight"), None
    )
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{files.path} has no token_embd.weight matrix")
    values = {**files.config, f"{name}.vocab_size": embedding.shape[1]}
    return reader(Fields(values, files.path.name, prefix=f"{name}."))


def _check(spec: ModelSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise ModelLoadError(f"{spec.num_heads} heads can't share {spec.num_kv_heads} key/value heads evenly")
    for rope in (spec.rope, spec.local_rope):
        if rope is not None and (rope.rotary_dim % 2 or not 4 <= rope.rotary_dim <= spec.head_dim):
            raise ModelLoadError(f"{rope.rotary_dim} rotary dimensions do not fit into heads of {spec.head_dim}")
