"""A tokenizer from the vocabulary inside a GGUF file (its `tokenizer.ggml.*` keys).

Two models cover the families we serve. "gpt2" is byte-level BPE: the file has the merges, and names the pre-tokenizer,
whose regular expressions are known by that name only. "llama" is SentencePiece BPE: the file has scores, and the merges
follow from them: of all pairs of neighbors that form a token, the token with the best score is formed first.
"""

import re
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from server.errors import ModelLoadError
from server.tokenizer.frame import set_frame

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_PREFIX = "tokenizer.ggml."
_NAMED_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_NO_BOS_VOCABULARY = 49152
"""Granite and SmolLM: their files name a BOS token that the models were not trained to see in front."""

# Splits by pre-tokenizer. Each expression splits what the one before it left; matches become pieces of their own.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD_START = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_WORD_START}{_UPPER}*{_LOWER}+|{_WORD_START}{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "phi-2"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
}
_WHOLE_TOKENS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
"""A piece that is in the vocabulary becomes that token, whatever the merges would make of it. These also want a BOS."""
_INNER_SPACE = re.compile("[^▁]▁")
_COMPOSES_UNICODE = frozenset({"qwen2", "deepseek-r1-qwen"})


def backend_from_gguf(metadata: dict[str, Any]) -> Backend:
    """Builds the tokenizer that a GGUF's metadata describes. Raises ModelLoadError where it is broken or unknown."""
    tokens = _list_of(metadata, "tokens", str)
    types = _list_of(metadata, "token_type", int, length=len(tokens)) if _PREFIX + "token_type" in metadata else []
    kind = metadata.get(_PREFIX + "model")
    try:
        if kind == "gpt2":
            backend = _byte_level(metadata, tokens)
        elif kind == "llama":
            backend = _sentencepiece(metadata, tokens)
        else:
            raise ModelLoadError(f"tokenizer model {kind!r} is not supported; gpt2 and llama are")
        backend.add_tokens(
            [
                AddedToken(token, special=type_ != _USER_DEFINED, normalized=False)
                for token, type_ in zip(tokens, types, strict=False)
                if type_ in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
            ]
        )
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises plain Exception for a vocabulary that contradicts itself
        raise ModelLoadError(f"the GGUF's vocabulary is broken: {error}") from error
    named = named_tokens_from_gguf(metadata)
    set_frame(
        backend,
        bos=named.get("bos_token") if _adds_bos(metadata, kind, len(tokens)) else None,
        eos=named.get("eos_token") if metadata.get(_PREFIX + "add_eos_token") is True else None,
    )
    return backend


def named_tokens_from_gguf(metadata: dict[str, Any]) -> dict[str, str]:
    """{"bos_token": "<s>", ...}, of those that the file names."""
    tokens = _list_of(metadata, "tokens", str)
    named = {}
    for name, key in _NAMED_KEYS.items():
        token_id = metadata.get(_PREFIX + key)
        if isinstance(token_id, int):
            if not 0 <= token_id < len(tokens):
                raise ModelLoadError(f"{_PREFIX}{key} is {token_id}, the vocabulary has {len(tokens)} tokens")
            named[name] = tokens[token_id]
    return named


def _adds_bos(metadata: dict[str, Any], kind: str, vocab_size: int) -> bool:
    """The key decides; where it is absent, the kind of vocabulary does."""
    explicit = metadata.get(_PREFIX + "add_bos_token")
    if isinstance(explicit, bool):
        return explicit
    if vocab_size == _NO_BOS_VOCABULARY:
        return False
    return kind == "llama" or metadata.get(_PREFIX + "pre") in _WHOLE_TOKENS_FIRST


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> Backend:
    pre = metadata.get(_PREFIX + "pre", "default")
    splits = _SPLITS.get(pre)
    if splits is None:
        raise ModelLoadError(f"pre-tokenizer {pre!r} is not known; these are: {', '.join(sorted(_SPLITS))}")
    merges = [_merge(entry) for entry in _list_of(metadata, "merges", object)]
    backend = Backend(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre in _WHOLE_TOKENS_FIRST,
        )
    )
    if pre in _COMPOSES_UNICODE:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _merge(entry: object) -> tuple[str, str]:
    """Written as "a b" or as ["a", "b"]. Byte-level tokens hold no space."""
    parts = entry.split(" ") if isinstance(entry, str) else entry
    if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
        raise ModelLoadError(f"{_PREFIX}merges holds {entry!r}, which is not a pair")
    return parts[0], parts[1]


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> Backend:
    scores = _list_of(metadata, "scores", float, length=len(tokens))
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = metadata.get(_PREFIX + "unknown_token_id", 0)
    has_unknown = isinstance(unknown, int) and 0 <= unknown < len(tokens)
    backend = Backend(
        models.BPE(
            vocab=vocab,
            merges=merges_from_scores(vocab, scores),
            unk_token=tokens[unknown] if has_unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds_space = metadata.get(_PREFIX + "add_space_prefix", True) is not False
    to_pieces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_pieces]) if adds_space else to_pieces
    if not any(_INNER_SPACE.search(token) for token in tokens):
        # No token spans a word's end: splitting there changes nothing, and merging is no longer quadratic in the text.
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁]*|[^▁]+"), behavior="isolated")
    strip = [decoders.Strip(content=" ", left=1, right=0)] if adds_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip],
    )
    return backend


def merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to form a token from two others, best score first. scores: by token id."""
    found = []
    for token, token_id in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[token_id], vocab[left], vocab[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _list_of(metadata: dict[str, Any], key: str, kind: type, length: int | None = None) -> list[Any]:
    values = metadata.get(_PREFIX + key)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ModelLoadError(f"the GGUF has no proper {_PREFIX}{key}: its vocabulary can't be read")
    if length is not None and len(values) != length:
        raise ModelLoadError(f"{_PREFIX}{key} has {len(values)} entries for {length} tokens")
    return values
