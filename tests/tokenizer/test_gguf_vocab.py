"""Vocabularies of GGUF files, against the library's own tokenizers and hand-made ones."""

import random
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Split

from server.errors import ModelLoadError
from server.tokenizer import Tokenizer
from server.tokenizer.gguf_vocab import backend_from_gguf, merges_from_scores
from tests.tokenizer.vocabularies import byte_level_backend, gguf_metadata_of, spm_metadata

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
PLAIN = ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = ByteLevel(add_prefix_space=False, use_regex=True)


def texts(count: int) -> list[str]:
    rng = random.Random(7)
    alphabet = [*"the cat'sLL 12.,;\n\t _", "é", "e\u0301", "한", "😀", "ß", "  ", "'ve"]
    return ["".join(rng.choice(alphabet) for _ in range(rng.randint(0, 40))) for _ in range(count)]


@pytest.mark.parametrize("pairs", [False, True], ids=["merges as text", "merges as pairs"])
@pytest.mark.parametrize(
    ("name", "pre", "options"),
    [
        ("gpt-2", [GPT2], {}),
        ("smollm", [Digits(individual_digits=True), GPT2], {}),
        ("qwen2", [Split(Regex(QWEN2), "isolated"), PLAIN], {"nfc": True}),
        ("llama-bpe", [Split(Regex(LLAMA3), "isolated"), PLAIN], {"ignore_merges": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_byte_level_equals_the_original(name: str, pre: list[Any], options: dict[str, Any], pairs: bool) -> None:
    """Guards each pre-tokenizer: the GGUF of a vocabulary encodes as its tokenizer.json does."""
    original = byte_level_backend(pre, **options)
    rebuilt = backend_from_gguf(gguf_metadata_of(original, name, merges_as_pairs=pairs))
    for text in [*texts(150), "a<|im_end|>b<tool_call>c"]:
        ids = rebuilt.encode(text, add_special_tokens=False).ids
        assert ids == original.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize(
    ("change", "adds_bos"),
    [
        ({}, False),
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.add_bos_token": True}, True),
    ],
)
def test_bos_of_byte_level(change: dict[str, Any], adds_bos: bool) -> None:
    """Guards whether a BOS token is put in front: the key decides, else the kind of vocabulary."""
    metadata = gguf_metadata_of(byte_level_backend([GPT2]), "gpt-2") | change
    assert backend_from_gguf(metadata).encode("").tokens == (["<|begin|>"] if adds_bos else [])


def test_vocabulary_of_49152_means_no_bos() -> None:
    """Guards a quirk of Granite's and SmolLM's files: they name a BOS that must not be added."""
    metadata = gguf_metadata_of(byte_level_backend([GPT2]), "llama-bpe")
    missing = 49152 - len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += [f"unused{index}" for index in range(missing)]
    metadata["tokenizer.ggml.token_type"] += [5] * missing
    assert backend_from_gguf(metadata).encode("").ids == []


def test_frame_with_eos() -> None:
    """Guards add_eos_token."""
    metadata = spm_metadata() | {"tokenizer.ggml.add_eos_token": True}
    tokens = backend_from_gguf(metadata).encode("hello").tokens
    assert tokens == ["<s>", "▁hello", "</s>"]


@pytest.mark.parametrize(
    ("prefix", "text", "tokens"),
    [
        (True, "hello world", ["▁hello", "▁world"]),
        (True, " hello", ["▁", "▁hello"]),
        (True, "xé", ["▁", "x", "<0xC3>", "<0xA9>"]),
        (True, "hello<|turn|>hello", ["▁hello", "<|turn|>", "▁hello"]),
        (False, "hello world", ["hello", "▁world"]),
        (False, "x  y", ["x", "▁▁", "y"]),
        (False, "hellow", ["hello", "w"]),
        (False, "a<note>b", ["<0x61>", "<note>", "<0x62>"]),
        (False, "", []),
    ],
)
def test_sentencepiece(prefix: bool, text: str, tokens: list[str]) -> None:
    """Guards merges from scores, byte fallback, the space prefix (Llama 2) and its absence (Gemma)."""
    backend = backend_from_gguf(spm_metadata(add_space_prefix=prefix))
    assert backend.encode(text, add_special_tokens=False).tokens == tokens
    expected = text.replace("<|turn|>", "")
    decoded = Tokenizer(backend).decode(backend.encode(text).ids)
    assert decoded == (expected.replace("hellohello", "hello hello") if prefix else expected)


def test_best_score_merges_first() -> None:
    """Guards SentencePiece's order: "abc" with a better "bc" than "ab" becomes a + bc."""
    vocab = {token: index for index, token in enumerate(["a", "b", "c", "ab", "bc"])}
    assert merges_from_scores(vocab, [0.0, 0.0, 0.0, -2.0, -1.0]) == [("b", "c"), ("a", "b")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "t5"),
        ({"tokenizer.ggml.pre": "made-up"}, "made-up"),
        ({"tokenizer.ggml.tokens": None}, "tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type"),
        ({"tokenizer.ggml.merges": ["abc"]}, "merges"),
        ({"tokenizer.ggml.merges": ["qqq zzz"]}, "broken"),
        ({"tokenizer.ggml.bos_token_id": 10**9}, "bos_token_id"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0]}, "scores"),
    ],
)
def test_broken_vocabularies(change: dict[str, Any], message: str) -> None:
    """Guards the start-up error of corrupt or foreign vocabularies."""
    metadata = gguf_metadata_of(byte_level_backend([pre_tokenizers.ByteLevel()]), "gpt-2") | change
    with pytest.raises(ModelLoadError, match=message):
        backend_from_gguf(metadata)
