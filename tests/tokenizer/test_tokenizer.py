"""Encoding, decoding and the special tokens."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from server.errors import InvalidRequest, ModelLoadError
from server.tokenizer import Tokenizer, load_tokenizer
from server.weights.locate import ModelFiles, locate
from tests.tokenizer.vocabularies import byte_level_backend, write_hf_folder

QWEN_LIKE = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]

ORDINARY = st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs", "Cc"]) | st.sampled_from("😀\n\t")
"""The default model's vocabulary lacks some control characters' bytes, and some that only rare planes need."""


def test_torch_free() -> None:
    """Guards the API process's start-up time and memory: nothing here may pull torch in."""
    code = "import sys, server.tokenizer, server.weights.locate; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("12345", ["1", "2", "3", "4", "5"]),
        ("  1", ["  ", "1"]),
        ("The capital of France is", ["The", " capital", " of", " France", " is"]),
        ("it's", ["it", "'s"]),
    ],
)
def test_default_model_splits(default_tokenizer: Tokenizer, text: str, pieces: list[str]) -> None:
    """Guards the pre-tokenizer named "smollm": digits stand alone, spaces in front of them stay together."""
    assert [default_tokenizer.token_text(id_) for id_ in default_tokenizer.encode(text)] == pieces


def test_default_model_adds_no_bos(default_tokenizer: Tokenizer) -> None:
    """Guards against a BOS token in front of a model that was trained without one."""
    assert default_tokenizer.bos_token_id == 1
    assert default_tokenizer.encode("") == []
    assert default_tokenizer.encode("a") == default_tokenizer.encode("a", add_special_tokens=False)


@settings(max_examples=200)
@given(text=st.text(alphabet=ORDINARY, max_size=60))
def test_byte_level_round_trip(default_tokenizer: Tokenizer, text: str) -> None:
    """Guards decode(encode(text)) == text for every text that the vocabulary has the bytes of."""
    assert default_tokenizer.decode(default_tokenizer.encode(text, allow_special=False)) == text


@settings(max_examples=200)
@given(text=st.text(alphabet=[*"helo wrd xy", "é", "한", "😀"], max_size=40))
def test_sentencepiece_round_trip(spm_tokenizer: Tokenizer, text: str) -> None:
    """Guards the space prefix: added on the way in, taken off on the way out, and byte fallback both ways."""
    assert spm_tokenizer.decode(spm_tokenizer.encode(text)) == text


@settings(max_examples=200)
@given(ids=st.lists(st.integers(0, 49151), max_size=24))
def test_byte_level_decode_equals_the_library(default_tokenizer: Tokenizer, ids: list[int]) -> None:
    """Guards our own decoding, invalid UTF-8 included, against the library's."""
    expected = default_tokenizer._backend.decode(ids, skip_special_tokens=True)
    assert default_tokenizer.decode(ids) == expected


def test_special_spelling(tokenizer: Tokenizer) -> None:
    """Guards both policies for a control token's spelling in a text."""
    spelling = tokenizer.special_tokens["eos_token"]
    text = f"hello{spelling}world"
    assert tokenizer.eos_token_id in tokenizer.encode(text)
    ids = tokenizer.encode(text, allow_special=False)
    assert not set(ids) & tokenizer.special_ids - {tokenizer.bos_token_id}
    assert tokenizer.decode(ids) == text


def test_skip_special_tokens(default_tokenizer: Tokenizer) -> None:
    """Guards skip_special_tokens both ways."""
    ids = default_tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert default_tokenizer.decode(ids) == "hi"
    assert default_tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


def test_ids_without_a_token(tokenizer: Tokenizer) -> None:
    """Guards against models whose embedding is padded beyond the vocabulary: such an id is empty text, no crash."""
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([tokenizer.vocab_size]) == ""


def test_token_bytes(default_tokenizer: Tokenizer, spm_tokenizer: Tokenizer) -> None:
    """Guards raw bytes: parts of characters, byte-fallback tokens and SentencePiece's space."""
    parts = [default_tokenizer.token_bytes(id_) for id_ in default_tokenizer.encode("한😀")]
    assert b"".join(parts) == "한😀".encode()
    assert len(parts) > 2
    byte_token = spm_tokenizer.token_to_id("<0xE3>")
    assert byte_token is not None
    assert spm_tokenizer.token_bytes(byte_token) == b"\xe3"
    assert spm_tokenizer.token_text(byte_token) == "\ufffd"
    hello = spm_tokenizer.token_to_id("▁hello")
    assert hello is not None
    assert spm_tokenizer.token_text(hello) == " hello"


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_unpaired_surrogates(tokenizer: Tokenizer, text: str) -> None:
    """Guards against a 500: JSON can carry "\\ud800", UTF-8 can't."""
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode(text)


@pytest.mark.parametrize("text", ["", "a", "hello world " * 50, "\n" * 1000, "한국어" * 100, " " * 999])
def test_min_num_tokens_is_a_lower_bound(tokenizer: Tokenizer, text: str) -> None:
    """Guards the cheap refusal of huge texts: it must never refuse one that fits."""
    assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text))


def test_min_num_tokens_is_of_use(default_tokenizer: Tokenizer) -> None:
    """Guards that a text of megabytes is seen to exceed a context of 8192 tokens without encoding it."""
    assert default_tokenizer.min_num_tokens("word " * 1_600_000) > 8192


# --------------------------------------------------------------------------------------------- Hugging Face folders


def load_hf(folder: Path) -> tuple[ModelFiles, Tokenizer]:
    files = locate(str(folder))
    return files, load_tokenizer(files)


def test_end_tokens_are_a_union(tmp_path: Path) -> None:
    """Guards the end tokens: [1, 2] in generation_config and 3 in the tokenizer give all; so does the template."""
    backend = byte_level_backend(QWEN_LIKE)
    end = backend.token_to_id("<|endoftext|>")
    turn = backend.token_to_id("<|im_end|>")
    folder = write_hf_folder(
        tmp_path / "model",
        backend,
        generation_config={"eos_token_id": [1, 2]},
        config={"model_type": "qwen2", "eos_token_id": 2},
        tokenizer_config={"eos_token": {"content": "<|endoftext|>"}, "chat_template": "x<|im_end|>"},
    )
    _, tokenizer = load_hf(folder)
    assert tokenizer.end_token_ids == {1, 2, end, turn}
    assert tokenizer.eos_token_id == end


@pytest.mark.parametrize(("flag", "expected"), [(True, ["<|begin|>"]), (False, []), (None, [])])
def test_add_bos_token_of_the_configuration(tmp_path: Path, flag: bool | None, expected: list[str]) -> None:
    """Guards add_bos_token where tokenizer.json itself adds none."""
    config = {"bos_token": "<|begin|>"} | ({} if flag is None else {"add_bos_token": flag})
    _, tokenizer = load_hf(write_hf_folder(tmp_path / "m", byte_level_backend(QWEN_LIKE), tokenizer_config=config))
    assert [tokenizer.token_text(id_) for id_ in tokenizer.encode("")] == expected
    assert tokenizer.encode("cat", add_special_tokens=False) == tokenizer.encode("cat")[len(expected) :]


def test_padding_and_truncation_are_off(tmp_path: Path) -> None:
    """Guards against a tokenizer.json that was saved with truncation on: prompts would be cut silently."""
    backend = byte_level_backend(QWEN_LIKE)
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    _, tokenizer = load_hf(write_hf_folder(tmp_path / "m", backend))
    assert tokenizer.decode(tokenizer.encode("the cat sat on the mat")) == "the cat sat on the mat"


@pytest.mark.parametrize("content", [None, "{}", "not json", '{"model": 5}'])
def test_broken_tokenizer_files(tmp_path: Path, content: str | None) -> None:
    """Guards the start-up error of a folder whose tokenizer is missing or broken."""
    folder = write_hf_folder(tmp_path / "m", byte_level_backend(QWEN_LIKE))
    (folder / "tokenizer.json").unlink()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_tokenizer(locate(str(folder)))


def test_unknown_decoder_is_refused() -> None:
    """Guards against guessing at token bytes: WordPiece and the like are no family that we serve."""
    with pytest.raises(ModelLoadError, match="decoder"):
        Tokenizer(Backend(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")))
