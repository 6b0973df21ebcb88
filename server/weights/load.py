"""From a checkpoint to a Decoder: names and shapes checked first, then one tensor after another, packed as it comes."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.ops import DecoderLayer, Linear, Ops, QkvLayout, QuantizedWeight, Weight
from server.errors import ModelLoadError, WeightMismatch
from server.models.decoder import Decoder
from server.models.spec import ModelSpec
from server.weights.footprint import allocated
from server.weights.gguf_source import GgufSource
from server.weights.locate import ModelFiles
from server.weights.safetensors_source import SafetensorsSource
from server.weights.source import WeightSource, dense, same

log = logging.getLogger(__name__)

EMBEDDING, LM_HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
ROPE_FACTORS = "rope_freqs.weight"
_IGNORED = ("rotary_emb.inv_freq", "masked_bias", ".attn.bias")
"""Buffers that old versions of transformers saved; they follow from the configuration."""


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this spec must have; the LM head, which may be absent, aside."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, hidden), FINAL_NORM: (hidden,)}
    projections = [
        ("self_attn.q_proj", spec.q_size, hidden, spec.qkv_bias),
        ("self_attn.k_proj", spec.kv_size, hidden, spec.qkv_bias),
        ("self_attn.v_proj", spec.kv_size, hidden, spec.qkv_bias),
        ("self_attn.o_proj", hidden, spec.q_size, spec.output_bias),
        ("mlp.gate_proj", inner, hidden, spec.mlp_bias),
        ("mlp.up_proj", inner, hidden, spec.mlp_bias),
        ("mlp.down_proj", hidden, inner, spec.mlp_bias),
    ]
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if spec.sandwich_norms:
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    if spec.qk_norm:
        norms |= {"self_attn.q_norm": spec.head_dim, "self_attn.k_norm": spec.head_dim}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        for name, rows, columns, biased in projections:
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if biased:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
    return shapes


def check_names(spec: ModelSpec, source: WeightSource) -> None:
    """Raises WeightMismatch that lists every missing, left-over and wrongly shaped tensor."""
    expected = expected_shapes(spec)
    optional = {LM_HEAD: expected[EMBEDDING], ROPE_FACTORS: (spec.rope.rotary_dim // 2,)}
    known = expected | optional
    found = source.shapes
    missing = [name for name in expected if name not in found]
    left_over = [name for name in found if name not in known and not name.endswith(_IGNORED)]
    wrong = [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in known.items()
        if name in found and found[name] != shape
    ]
    problems = [("missing", missing), ("left over", left_over), ("of a wrong shape", wrong)]
    lines = [f"{len(names)} {what}: " + ", ".join(names) for what, names in problems if names]
    if lines:
        raise WeightMismatch("the checkpoint's tensors do not match its configuration; " + "; ".join(lines))


def load_model(
    files: ModelFiles,
    spec: ModelSpec,
    ops: Ops,
    *,
    dtype: torch.dtype,
    device: torch.device,
    keep_quantized: bool = True,
    on_progress: Callable[[float], None] | None = None,
) -> Decoder:
    """Loads a checkpoint.

    dtype: of the activations and of every weight that is not kept quantised. keep_quantized: whether the backend gets
    a GGUF's quantised matrices as they are, and may keep them so. on_progress: gets the share done, 0..1, after each
    layer.

    Only one layer's tensors exist twice at any time. Raises ModelLoadError, WeightMismatch.
    """
    source = open_source(files, spec)
    try:
        check_names(spec, source)
        before = allocated(device)
        loader = _Loader(source, spec, ops, dtype, device, keep_quantized)
        model = loader.load(on_progress or (lambda share: None))
        after = allocated(device)
        if before is not None and after is not None:
            model.weight_bytes = max(after - before, 0)
        return model
    finally:
        source.close()


def open_source(files: ModelFiles, spec: ModelSpec) -> WeightSource:
    if files.kind == "gguf":
        if files.gguf is None:
            raise ModelLoadError(f"{files.path} has no GGUF header")
        return GgufSource(files.path, files.gguf, spec)
    return SafetensorsSource(files.tensor_files)


@dataclass(slots=True)
class _Loader:
    """One load. weight_bytes counts what it hands to the backend."""

    source: WeightSource
    spec: ModelSpec
    ops: Ops
    dtype: torch.dtype
    device: torch.device
    keep_quantized: bool
    weight_bytes: int = 0

    def load(self, on_progress: Callable[[float], None]) -> Decoder:
        spec = self.spec
        steps = spec.num_layers + 2
        embedding = self._weight(EMBEDDING)
        embed = self.ops.pack_embedding(embedding, dtype=self.dtype)
        lm_head = self.ops.pack_linear([self._lm_head(embedding)], None, dtype=self.dtype, out_dtype=torch.float32)
        del embedding
        on_progress(1 / steps)
        factors = dense(self.source.get(ROPE_FACTORS), torch.float32) if ROPE_FACTORS in self.source.shapes else None
        layers = []
        for index in range(spec.num_layers):
            layers.append(self._layer(index))
            on_progress((index + 2) / steps)
        final_norm = self._norm(FINAL_NORM)
        on_progress(1.0)
        return Decoder(
            spec=spec,
            ops=self.ops,
            dtype=self.dtype,
            embed=embed,
            layers=layers,
            final_norm=final_norm,
            lm_head=lm_head,
            freq_factors=factors,
            device=self.device,
            weight_bytes=self.weight_bytes,
        )

    def _lm_head(self, embedding: Weight) -> Weight:
        """The head that is there; the embedding where there is none, or where it is a copy."""
        if LM_HEAD not in self.source.shapes:
            if not self.spec.tie_embeddings:
                log.warning(
                    "the checkpoint has no %s, though its configuration does not tie it to the embedding", LM_HEAD
                )
            return embedding
        head = self._weight(LM_HEAD, count=False)
        if same(head, embedding):
            return embedding
        if self.spec.tie_embeddings:
            log.warning("the configuration ties %s to the embedding, but the checkpoint's differs: it is kept", LM_HEAD)
        self._count(head)
        return head

    def _layer(self, index: int) -> DecoderLayer:
        spec = self.spec
        prefix = f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        layout = QkvLayout(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            q_norm=self._norm(f"{attention}q_norm.weight") if spec.qk_norm else None,
            k_norm=self._norm(f"{attention}k_norm.weight") if spec.qk_norm else None,
            norm_eps=spec.norm_eps,
        )
        after = self._norm(f"{prefix}post_attention_layernorm.weight")
        sandwich = spec.sandwich_norms
        return DecoderLayer(
            input_norm=self._norm(f"{prefix}input_layernorm.weight"),
            qkv=self._linear([f"{attention}{part}_proj" for part in "qkv"], spec.qkv_bias),
            qkv_layout=layout,
            output=self._linear([f"{attention}o_proj"], spec.output_bias),
            mlp_norm=self._norm(f"{prefix}pre_feedforward_layernorm.weight") if sandwich else after,
            gate_up=self._linear([f"{mlp}gate_proj", f"{mlp}up_proj"], spec.mlp_bias),
            down=self._linear([f"{mlp}down_proj"], spec.mlp_bias),
            local_rope=spec.local_rope is not None and spec.windows[index] > 0,
            window=spec.windows[index],
            post_attention_norm=after if sandwich else None,
            post_mlp_norm=self._norm(f"{prefix}post_feedforward_layernorm.weight") if sandwich else None,
        )

    def _linear(self, names: list[str], biased: bool) -> Linear:
        weights = [self._weight(f"{name}.weight") for name in names]
        bias = None
        if biased:
            parts = [dense(self.source.get(f"{name}.bias"), self.dtype) for name in names]
            bias = torch.cat(parts).to(self.device)
        return self.ops.pack_linear(weights, bias, dtype=self.dtype)

    def _weight(self, name: str, *, count: bool = True) -> Weight:
        weight = self.source.get(name)
        if not isinstance(weight, QuantizedWeight) or not self.keep_quantized:
            weight = dense(weight, self.dtype).to(self.device)
        if count:
            self._count(weight)
        return weight

    def _count(self, weight: Weight) -> None:
        self.weight_bytes += (weight.blocks if isinstance(weight, QuantizedWeight) else weight).nbytes

    def _norm(self, name: str) -> torch.Tensor:
        """[C] or [D], in the activations' dtype; the offset is added in float32."""
        weight = dense(self.source.get(name), torch.float32) + self.spec.norm_offset
        return weight.to(self.dtype).to(self.device)
