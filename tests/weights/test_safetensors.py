"""Hugging Face folders: one file or several, tied or not, complete or not."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from server.errors import ModelLoadError, WeightMismatch
from tests.models.checkpoints import make_model, save
from tests.models.test_parity import PROMPTS, reference_tokens
from tests.runner.driver import Driver, greedy, load, token_ids


def generated(folder: Path) -> list[int]:
    [result] = Driver(load(folder)).generate([PROMPTS[0]], [greedy(32)])
    return token_ids(result)


def test_shards(tmp_path: Path) -> None:
    """Tensors of all files but one counted as missing."""
    model = make_model("llama")
    save(model, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert generated(tmp_path) == reference_tokens(model, PROMPTS[0])


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    """Two tensors of one name: which one counts would depend on the order of the files."""
    save(make_model("llama"), tmp_path, max_shard_size="100KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    save_file({**load_file(files[0]), **load_file(files[1])}, files[0])
    with pytest.raises(ModelLoadError, match="another file"):
        load(tmp_path)


def edit(folder: Path, *, config: dict[str, object] | None = None, **tensors: torch.Tensor | None) -> None:
    """Replaces configuration entries and tensors (None removes one); __ in a name stands for a dot."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    values = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        values.pop(name, None)
        if tensor is not None:
            values[name] = tensor
    save_file(values, folder / "model.safetensors")


def test_absent_head_is_the_embedding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A head of random numbers, or a refusal, where the file has none; silence where the configuration disagrees."""
    model = make_model("llama-tied-wide-heads")
    save(model, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    expected = reference_tokens(model, PROMPTS[0])
    with caplog.at_level(logging.WARNING):
        assert generated(tmp_path) == expected
        assert not caplog.records
        edit(tmp_path, config={"tie_word_embeddings": False})
        assert generated(tmp_path) == expected
        assert "lm_head" in caplog.text


def test_equal_copy_of_the_head_is_tied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A copy of the embedding under the head's name held twice, or warned about."""
    model = make_model("llama-tied-wide-heads")
    save(model, tmp_path)
    edit(tmp_path, lm_head__weight=model.get_input_embeddings().weight.detach().clone())
    with caplog.at_level(logging.WARNING):
        assert generated(tmp_path) == reference_tokens(model, PROMPTS[0])
    assert not caplog.records


def test_different_head_is_kept_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A configuration that says tied thrown over the tensor that is there."""
    model = make_model("llama")
    save(model, tmp_path)
    edit(tmp_path, config={"tie_word_embeddings": True})
    with caplog.at_level(logging.WARNING):
        assert generated(tmp_path) == reference_tokens(model, PROMPTS[0])
    assert "differs" in caplog.text


def test_mismatch_lists_all_kinds_at_once(tmp_path: Path) -> None:
    """An error that stops at the first tensor, so that a user mends them one by one."""
    save(make_model("llama"), tmp_path)
    edit(
        tmp_path,
        model__norm__weight=None,
        model__layers__0__mlp__down_proj__weight=None,
        model__layers__0__mlp__spare__weight=torch.zeros(3),
        model__layers__1__input_layernorm__weight=torch.zeros(3),
    )
    with pytest.raises(WeightMismatch) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert "2 missing: model.norm.weight, model.layers.0.mlp.down_proj.weight" in message
    assert "1 left over: model.layers.0.mlp.spare.weight" in message
    assert "model.layers.1.input_layernorm.weight is [3], not [64]" in message


def test_old_rotary_buffers_are_no_left_overs(tmp_path: Path) -> None:
    """Checkpoints of old transformers versions refused for a buffer that follows from the configuration."""
    model = make_model("llama")
    save(model, tmp_path)
    edit(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8))
    assert generated(tmp_path) == reference_tokens(model, PROMPTS[0])


def test_integer_tensors_are_refused(tmp_path: Path) -> None:
    """A checkpoint quantised by some other tool read as if its integers were weights."""
    save(make_model("llama"), tmp_path)
    edit(tmp_path, model__norm__weight=torch.zeros(64, dtype=torch.int8))
    with pytest.raises(ModelLoadError, match="I8"):
        load(tmp_path)


@pytest.mark.parametrize("damage", ["empty", "truncated", "absurd header length", "absurd offsets", "not JSON"])
def test_broken_files_are_refused(damage: str, tmp_path: Path) -> None:
    """A truncated or lying file that ends in a crash or a giant allocation instead of a message."""
    save(make_model("llama"), tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header["model.norm.weight"]["data_offsets"] = [0, 1 << 60]
    lying = json.dumps(header).encode()
    broken = {
        "empty": b"",
        "truncated": whole[: len(whole) // 2],
        "absurd header length": (1 << 62).to_bytes(8, "little") + whole[8:],
        "absurd offsets": len(lying).to_bytes(8, "little") + lying + whole[8 + length :],
        "not JSON": whole[:8] + b"!" * length + whole[8 + length :],
    }
    path.write_bytes(broken[damage])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load(tmp_path)


def test_half_precision_checkpoint_in_float32(tmp_path: Path) -> None:
    """Weights left in the file's dtype where the activations have another."""
    model = make_model("qwen3").to(torch.bfloat16).to(torch.float32)
    save(model.to(torch.bfloat16), tmp_path)
    expected = reference_tokens(model.to(torch.float32), PROMPTS[0])
    assert generated(tmp_path) == expected


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    """A progress bar that never fills, or runs backwards."""
    save(make_model("llama"), tmp_path)
    shares: list[float] = []
    load(tmp_path, on_progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) > 3
