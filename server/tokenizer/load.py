"""A Tokenizer from a model's files."""

from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as Backend

from server.errors import ModelLoadError
from server.tokenizer.frame import set_frame
from server.tokenizer.gguf_vocab import backend_from_gguf, named_tokens_from_gguf
from server.tokenizer.tokenizer import Tokenizer
from server.weights.locate import ModelFiles

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|end_of_turn|>", "<|return|>")
_GGUF_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Builds the tokenizer. Raises ModelLoadError where the files lack one or it is of an unknown kind."""
    if files.kind == "gguf":
        backend = backend_from_gguf(files.config)
        named = named_tokens_from_gguf(files.config)
    else:
        backend = _backend_from_json(files)
        named = _named_tokens(files, backend)
    return Tokenizer(backend, special_tokens=named, end_token_ids=_end_token_ids(files, backend, named))


def _backend_from_json(files: ModelFiles) -> Backend:
    if files.tokenizer_file is None:
        raise ModelLoadError(
            f"{files.path} has no tokenizer.json. Other formats (tokenizer.model, vocab.json) can be converted: "
            "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        backend = Backend.from_file(str(files.tokenizer_file))
    except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
        raise ModelLoadError(f"can't read {files.tokenizer_file}: {error}") from error
    wants_bos = files.tokenizer_config.get("add_bos_token")
    bos = _spelling(files.tokenizer_config.get("bos_token"))
    if isinstance(wants_bos, bool) and bos is not None and backend.token_to_id(bos) is not None:
        frame = backend.encode("", add_special_tokens=True).tokens
        if wants_bos and bos not in frame:
            set_frame(backend, bos=bos, eos=None)
        elif not wants_bos and frame == [bos]:
            set_frame(backend, bos=None, eos=None)
    return backend


def _named_tokens(files: ModelFiles, backend: Backend) -> dict[str, str]:
    named = {name: _spelling(files.tokenizer_config.get(name)) for name in _NAMED}
    for name in ("bos_token", "eos_token", "pad_token"):
        if named[name] is None:
            ids = list(_ids(files.config.get(f"{name}_id")))
            named[name] = backend.id_to_token(ids[0]) if ids else None
    return {name: spelling for name, spelling in named.items() if spelling is not None}


def _spelling(value: Any) -> str | None:
    """tokenizer_config.json writes a token as a string or as an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _end_token_ids(files: ModelFiles, backend: Backend, named: dict[str, str]) -> Iterator[int]:
    """The union of what the configurations and the tokenizer say, and of the turn ends in the chat template."""
    if files.kind == "gguf":
        for key in _GGUF_END_KEYS:
            yield from _ids(files.config.get(f"tokenizer.ggml.{key}"))
    else:
        yield from _ids(files.generation_config.get("eos_token_id"))
        yield from _ids(files.config.get("eos_token_id"))
        text_config = files.config.get("text_config")
        if isinstance(text_config, dict):
            yield from _ids(text_config.get("eos_token_id"))
    if "eos_token" in named:
        yield from _ids(backend.token_to_id(named["eos_token"]))
    template = files.chat_template or ""
    for spelling in _TURN_ENDS:
        if spelling in template:
            yield from _ids(backend.token_to_id(spelling))


def _ids(value: Any) -> Iterator[int]:
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0:
            yield entry
