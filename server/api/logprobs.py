"""Log-probabilities in the three shapes that clients read: legacy completions, chat, and vLLM's prompt_logprobs."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from server.frontend.output import ScoredToken
from server.protocol import TokenLogprobs
from server.tokenizer import Tokenizer

_FLOOR = -9999.0
"""JSON has no -inf; OpenAI and vLLM send this."""


def chat_logprobs(tokens: Iterable[ScoredToken], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Entries of choices[].logprobs.content."""
    return [
        {
            **_chat_token(token.logprobs.token_id, token.logprobs.logprob, tokenizer),
            "top_logprobs": [
                _chat_token(token_id, logprob, tokenizer)
                for token_id, logprob in zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True)
            ],
        }
        for token in tokens
    ]


def legacy_logprobs(tokens: Sequence[ScoredToken], tokenizer: Tokenizer, *, base_offset: int = 0) -> dict[str, Any]:
    """choices[].logprobs of a text completion. base_offset: characters of the text before the output (the echo)."""
    return {
        "tokens": [legacy_token(t.logprobs.token_id, tokenizer) for t in tokens],
        "token_logprobs": [_finite(t.logprobs.logprob) for t in tokens],
        "top_logprobs": [_legacy_top(t.logprobs, tokenizer) for t in tokens],
        "text_offset": [base_offset + t.offset for t in tokens],
    }


def legacy_prompt_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], tokenizer: Tokenizer
) -> dict[str, Any]:
    """The same for an echoed prompt. The first token has nothing before it, so its entries are null."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, offset = [], 0
    for token_id in token_ids:
        offsets.append(offset)
        offset += len(decoder.decode(tokenizer.token_bytes(token_id)))
    return {
        "tokens": [legacy_token(token_id, tokenizer) for token_id in token_ids],
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [None if entry is None else _legacy_top(entry, tokenizer) for entry in logprobs],
        "text_offset": offsets,
    }


def join_legacy(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    if first is None or second is None:
        return first or second
    return {key: first[key] + second[key] for key in first}


def with_top(logprobs: Sequence[TokenLogprobs | None], count: int) -> list[TokenLogprobs | None]:
    """Entries that keep the `count` most likely tokens: two fields can ask for different numbers of the same prompt."""
    return [
        None
        if entry is None
        else msgspec.structs.replace(entry, top_ids=entry.top_ids[:count], top_logprobs=entry.top_logprobs[:count])
        for entry in logprobs
    ]


def prompt_logprobs_object(
    logprobs: Sequence[TokenLogprobs | None], tokenizer: Tokenizer
) -> list[dict[str, Any] | None]:
    """vLLM's prompt_logprobs: one object a prompt token, from token id to its figures."""
    return [None if entry is None else _ranked(entry, tokenizer) for entry in logprobs]


def legacy_token(token_id: int, tokenizer: Tokenizer) -> str:
    """As text, or as OpenAI spells a part of a character: bytes:\\xf0\\x9f."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _legacy_top(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """The most likely tokens, and the token itself, as OpenAI does: up to k + 1 entries."""
    top = {
        legacy_token(token_id, tokenizer): _finite(logprob)
        for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
    }
    top.setdefault(legacy_token(entry.token_id, tokenizer), _finite(entry.logprob))
    return top


def _ranked(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    ranked = {
        str(token_id): _figures(token_id, logprob, rank, tokenizer)
        for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1)
    }
    ranked.setdefault(str(entry.token_id), _figures(entry.token_id, entry.logprob, entry.rank, tokenizer))
    return ranked


def _figures(token_id: int, logprob: float, rank: int, tokenizer: Tokenizer) -> dict[str, Any]:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}


def _finite(logprob: float) -> float:
    return max(logprob, _FLOOR)
