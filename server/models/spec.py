"""What a decoder-only model is, as plain numbers: everything that decoder.py and the loader need to know. No torch."""

from dataclasses import dataclass

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. Which fields a kind reads: see rope.py.

    rotary_dim: how many of a head's dimensions rotate (partial rotary: fewer than head_dim). even.
    original_max_position: the context the model was trained with before scaling; 0 where the kind does not need it.
    attention_factor: YaRN's scale of cos and sin; None derives it from factor.
    """

    theta: float
    rotary_dim: int
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only transformer. Written by: the family that read it from a checkpoint; then nobody.

    windows: one entry a layer; 0 is full attention, w > 0 sees the last w keys, its own included.
    local_rope: the embedding of the layers with a window where that differs (Gemma 3), else None.
    tie_embeddings: what the configuration says; the loader decides by the tensors that are there.
    norm_offset: added to every norm weight on load (Gemma stores weight - 1 in safetensors).
    sandwich_norms: attention's and the MLP's outputs are normed too, before they are added to the residual.
    attention_scale: multiplies q.k. attention_soft_cap, logit_soft_cap: 0 is off.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    norm_eps: float
    rope: RopeSpec
    windows: tuple[int, ...]
    attention_scale: float
    activation: str = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    local_rope: RopeSpec | None = None
    norm_offset: float = 0.0
    sandwich_norms: bool = False
    embedding_scale: float = 1.0
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim
