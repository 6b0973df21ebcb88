"""GGUF checkpoints: the same tokens as the Hugging Face model they were made from, and clear ends for broken ones."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from transformers import LlamaConfig, LlamaForCausalLM

from kernels.ops import QuantizedWeight
from server.errors import ModelLoadError, WeightMismatch
from server.models.registry import read_spec
from server.models.rope import inverse_frequencies
from server.weights.dequantize import dequantize
from server.weights.gguf_source import GgufSource
from server.weights.load import open_source
from server.weights.locate import locate
from server.weights.source import dense
from tests.models.checkpoints import make_model
from tests.models.test_parity import PROMPTS, reference_tokens
from tests.runner.driver import Driver, greedy, load, token_ids
from tests.weights.gguf_files import permute, round_weights, write_gguf

GEMMA_KEYS = {"attention.sliding_window": 6, "rope.freq_base": 1000000.0}


@pytest.mark.parametrize(
    ("case", "architecture", "kind", "metadata", "overrides"),
    [
        ("llama", "llama", Kind.F32, {}, {}),
        ("llama", "llama", Kind.F16, {}, {}),
        ("llama-tied-wide-heads", "llama", Kind.Q4_1, {}, {}),
        ("llama", "llama", Kind.Q4_0, {}, {}),
        ("llama", "llama", Kind.Q5_1, {}, {}),
        ("qwen2", "qwen2", Kind.Q8_0, {}, {}),
        ("qwen3", "qwen3", Kind.BF16, {}, {"head_dim": 32}),
        ("llama-linear-rope", "llama", Kind.Q8_0, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}),
        (
            "llama-yarn-rope",
            "llama",
            Kind.F32,
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
            },
            {},
        ),
        ("gemma3", "gemma3", Kind.F32, GEMMA_KEYS, {"query_pre_attn_scalar": 16}),
    ],
)
def test_gguf_gives_the_same_tokens(
    case: str,
    architecture: str,
    kind: Kind,
    metadata: dict[str, object],
    overrides: dict[str, object],
    tmp_path: Path,
) -> None:
    """q and k left permuted, names crossed, a quantisation read wrongly, or Gemma's norms offset twice."""
    model = make_model(case, intermediate_size=128, vocab_size=256, **overrides)
    if kind != Kind.F32:
        round_weights(model, kind)
    driver = Driver(load(write_gguf(model, tmp_path / "tiny.gguf", architecture, kind=kind, metadata=metadata)))
    prompts = [[token % 256 for token in prompt] for prompt in PROMPTS]
    results = driver.generate(prompts, [greedy(32) for _ in prompts], chunk=11)
    assert [token_ids(result) for result in results] == [reference_tokens(model, prompt) for prompt in prompts]


def test_llama3_rope_comes_as_a_tensor(tmp_path: Path) -> None:
    """rope_freqs.weight counted as left over, or not applied."""
    model = make_model("llama-llama3-rope")
    plain = load(write_gguf(model, tmp_path / "a.gguf", "llama")).spec.rope
    scaled = 1.0 / model.model.rotary_emb.inv_freq
    factors = (scaled * inverse_frequencies(plain)).numpy()
    path = write_gguf(model, tmp_path / "b.gguf", "llama", extra={"rope_freqs.weight": factors})
    [result] = Driver(load(path)).generate([PROMPTS[0]], [greedy(32)])
    assert token_ids(result) == reference_tokens(model, PROMPTS[0])


def test_default_model_matches_transformers() -> None:
    """The embedded default: SmolLM2's own 9 query and 3 key/value heads, Q4_1 and Q8_0 blocks, and the tied head."""
    files = locate("")
    spec = read_spec(files)
    source = open_source(files, spec)
    assert spec.rope.theta == 100000.0
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "lm_head.weight":
                parameter.copy_(dense(source.get(name), torch.float32))
    model.tie_weights()
    prompt = [504, 3575, 282, 4649, 314]  # "The capital of France is"
    driver = Driver(load("", backend="cpu", keep_quantized=False))
    [result] = driver.generate([prompt], [greedy(12, logprobs=3, prompt_logprobs=0)], chunk=3)
    with torch.no_grad():
        whole = torch.tensor([prompt + token_ids(result)])
        logits = model.eval()(whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert token_ids(result) == logits.argmax(-1).tolist()
    assert token_ids(result)[0] == 7042  # " Paris"
    for row, expected in zip(result, logits, strict=True):
        assert row.logprobs is not None
        values, ids = expected.topk(3)
        assert row.logprobs[0].top_ids == ids.tolist()
        assert row.logprobs[0].top_logprobs == pytest.approx(values.tolist(), abs=1e-3)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q5_0, Kind.Q6_K])
def test_dequantise_equals_the_gguf_package(kind: Kind) -> None:
    """Our own block decoders differ from the package's in any bit."""
    rng = np.random.default_rng(1)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if kind == Kind.Q6_K:  # the package can't make these, only read them
        blocks = rng.integers(0, 256, (6, 2 * block_bytes), dtype=np.uint8)
        blocks[:, block_bytes - 2 :: block_bytes] = 0
        blocks[:, block_bytes - 1 :: block_bytes] = 0x2C  # a finite scale
    else:
        blocks = gguf.quants.quantize(rng.standard_normal((6, 2 * block), dtype=np.float32), kind)
    expected = gguf.quants.dequantize(blocks, kind)
    assert torch.equal(dequantize(torch.from_numpy(blocks), kind), torch.from_numpy(expected))


@pytest.mark.parametrize("num_heads", [9, 3])
def test_unpermuted_rows(num_heads: int, tmp_path: Path) -> None:
    """The head count of one tensor used for the other; or v and o moved too."""
    model = make_model(
        "llama", hidden_size=72, num_attention_heads=9, num_key_value_heads=3, head_dim=8, num_hidden_layers=1
    )
    files = locate(str(write_gguf(model, tmp_path / "m.gguf", "llama")))
    source = open_source(files, read_spec(files))
    for part in "qkvo":
        name = f"model.layers.0.self_attn.{part}_proj.weight"
        assert torch.equal(dense(source.get(name), torch.float32), model.state_dict()[name])
    weight = model.state_dict()["model.layers.0.self_attn.q_proj.weight"].numpy()
    half = weight.shape[0] // num_heads // 2
    restored = permute(weight, num_heads).reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)
    assert np.array_equal(restored, weight)


def test_quantised_matrices_stay_quantised(tmp_path: Path) -> None:
    """A load that dequantises what a backend could keep, or a permutation that breaks the blocks apart."""
    model = make_model("llama")
    files = locate(str(write_gguf(model, tmp_path / "m.gguf", "llama", kind=Kind.Q4_1)))
    source = open_source(files, read_spec(files))
    name = "model.layers.1.self_attn.k_proj.weight"
    weight = source.get(name)
    assert isinstance(weight, QuantizedWeight)
    assert (weight.kind, weight.blocks.dtype, weight.blocks.shape) == ("Q4_1", torch.uint8, (32, 40))
    expected = gguf.quants.quantize(model.state_dict()[name].numpy(), Kind.Q4_1)
    assert torch.equal(weight.blocks, torch.from_numpy(expected))


@pytest.mark.parametrize(
    ("keep", "extra", "named"),
    [
        (lambda name: name != "blk.1.ffn_up.weight", {}, "1 missing: model.layers.1.mlp.up_proj.weight"),
        (lambda name: "attn_v" not in name, {}, "3 missing"),
        (lambda name: True, {"blk.0.extra.weight": np.zeros(4, np.float32)}, "1 left over: blk.0.extra.weight"),
        (lambda name: True, {"blk.3.attn_q.weight": np.zeros((4, 4), np.float32)}, "left over: model.layers.3"),
        (
            lambda name: name != "blk.2.attn_norm.weight",
            {"blk.2.attn_norm.weight": np.zeros(5, np.float32)},
            r"wrong shape: model.layers.2.input_layernorm.weight is \[5\], not \[64\]",
        ),
    ],
)
def test_mismatch_lists_every_tensor(keep: object, extra: dict[str, np.ndarray], named: str, tmp_path: Path) -> None:
    """A checkpoint with missing, spare or misshapen tensors that loads, or an error that doesn't say which."""
    path = write_gguf(make_model("llama"), tmp_path / "m.gguf", "llama", keep=keep, extra=extra)
    with pytest.raises(WeightMismatch, match=named):
        load(path)


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    """A tensor that reaches beyond the file's end: a bus error at the first read instead of a message."""
    whole = write_gguf(make_model("llama"), tmp_path / "m.gguf", "llama", kind=Kind.Q4_1).read_bytes()
    broken = tmp_path / "broken.gguf"
    for size in [0, 3, 20, len(whole) // 3, len(whole) - 40]:
        broken.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError):
            load(broken)


@pytest.mark.parametrize("seed", range(4))
def test_corrupt_files_never_crash(seed: int, tmp_path: Path) -> None:
    """A damaged header that ends in anything but a model or a ModelLoadError."""
    path = write_gguf(make_model("llama", num_hidden_layers=1), tmp_path / "m.gguf", "llama", kind=Kind.Q8_0)
    whole = bytearray(path.read_bytes())
    rng = np.random.default_rng(seed)
    refused = 0
    for _ in range(40):
        damaged = bytearray(whole)
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(0, 1500))
            damaged[at : at + 8] = struct.pack("<Q", int(rng.integers(0, 2**63)) >> int(rng.integers(0, 63)))
        path.write_bytes(damaged)
        try:
            load(path)
        except ModelLoadError:
            refused += 1
    assert refused > 10


def test_unknown_tensor_type_is_named(tmp_path: Path) -> None:
    """A ggml type from the future taken for bytes of something else."""
    files = locate(str(write_gguf(make_model("llama"), tmp_path / "m.gguf", "llama")))
    assert files.gguf is not None
    spec = read_spec(files)
    first = files.gguf.tensors[0]
    for number, named in [(9999, "unknown type"), (24, "I8")]:
        infos = (type(first)(first.name, first.shape, number, first.offset), *files.gguf.tensors[1:])
        header = type(files.gguf)(3, files.gguf.metadata, infos, files.gguf.data_offset, files.gguf.file_size)
        with pytest.raises(ModelLoadError, match=named):
            GgufSource(files.path, header, spec)
