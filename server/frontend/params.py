"""What a client asked of the sampler -> SamplingParams: defaults, ranges, vocabulary and context length."""

import math
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from server.config import Limits
from server.errors import InvalidRequest, PromptTooLong
from server.frontend.sampling_defaults import SamplingDefaults
from server.protocol import GrammarSpec, Ready, SamplingParams

_T = TypeVar("_T")
_N = TypeVar("_N", int, float)

_U64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIN_TOP_P = 1e-6
"""Stands for top_p = 0, which OpenAI allows: only the most likely token is left, without a zero to divide by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """As the client sent it. None: the client said nothing and the default is worked out here."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: Collection[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBounds:
    """What one request may fill. All in tokens."""

    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    """Ids that both the model and the tokenizer know."""

    @classmethod
    def of(cls, ready: Ready, *, tokenizer_vocab_size: int) -> "ModelBounds":
        return cls(
            max_model_len=ready.max_model_len,
            num_blocks=ready.num_blocks,
            block_size=ready.block_size,
            vocab_size=min(ready.vocab_size, tokenizer_vocab_size),
        )

    @property
    def cache_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def max_tokens(self) -> int:
        """Longest prompt + output that can be served at all."""
        return min(self.max_model_len, self.cache_tokens)


def resolve_sampling(
    options: SamplingOptions,
    *,
    defaults: SamplingDefaults,
    num_prompt_tokens: int,
    bounds: ModelBounds,
    end_token_ids: Collection[int],
    limits: Limits,
    prompt_param: str = "prompt",
) -> SamplingParams:
    """Raises InvalidRequest that names the field, PromptTooLong where prompt + max_tokens can't be held."""
    max_tokens = _max_tokens(options.max_tokens, num_prompt_tokens, bounds, prompt_param)
    min_tokens = _in_range("min_tokens", options.min_tokens, 0, None)
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is {min_tokens}, beyond the {max_tokens} tokens to write", param="min_tokens")
    stop_token_ids = tuple(dict.fromkeys(options.stop_token_ids or ()))
    check_token_ids(stop_token_ids, bounds.vocab_size, param="stop_token_ids")
    if not options.ignore_eos:
        stop_token_ids += tuple(t for t in end_token_ids if t not in stop_token_ids)
    top_p = _in_range("top_p", _or(options.top_p, defaults.top_p), 0.0, 1.0)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        seed=secrets.randbits(64) if options.seed is None else options.seed & _U64,
        temperature=_in_range("temperature", _or(options.temperature, defaults.temperature), 0.0, None),
        top_p=max(top_p, _MIN_TOP_P),
        top_k=_top_k(_or(options.top_k, defaults.top_k), bounds.vocab_size),
        min_p=_in_range("min_p", _or(options.min_p, defaults.min_p), 0.0, 1.0),
        repetition_penalty=_repetition_penalty(_or(options.repetition_penalty, defaults.repetition_penalty)),
        presence_penalty=_in_range("presence_penalty", _or(options.presence_penalty, 0.0), -2.0, 2.0),
        frequency_penalty=_in_range("frequency_penalty", _or(options.frequency_penalty, 0.0), -2.0, 2.0),
        logit_bias=_logit_bias(options.logit_bias or {}, bounds.vocab_size, limits.max_logit_bias),
        stop_token_ids=stop_token_ids,
        logprobs=_num_logprobs("logprobs", options.logprobs, limits.max_logprobs),
        prompt_logprobs=_num_logprobs("prompt_logprobs", options.prompt_logprobs, limits.max_logprobs),
        grammar=options.grammar,
    )


def derive_seed(seed: int, choice: int) -> int:
    """Seed of one of n choices: choice 0 keeps the client's, so that n = 1 and the first of n agree. (SplitMix64.)"""
    if choice == 0:
        return seed
    z = (seed + choice * _GOLDEN) & _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)


def check_token_ids(token_ids: Collection[int], vocab_size: int, *, param: str) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        bad = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise InvalidRequest(f"token id {bad} is out of vocabulary (0 to {vocab_size - 1})", param=param)


def truncate_prompt(token_ids: list[int], keep: int | None, max_tokens: int | None, bounds: ModelBounds) -> list[int]:
    """The last `keep` tokens; -1 keeps what leaves room for max_tokens (at least one)."""
    if keep is None:
        return token_ids
    if keep == -1:
        keep = max(1, bounds.max_tokens - max(1, max_tokens or 0))
    if not 1 <= keep <= bounds.max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or 1 to {bounds.max_model_len}, not {keep}",
            param="truncate_prompt_tokens",
        )
    return token_ids[-keep:]


def check_stop_strings(stop: str | list[str] | None, limits: Limits) -> tuple[str, ...]:
    """Empty strings count as not given: each would match before the first character."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > limits.max_stop_strings:
        raise InvalidRequest(f"{len(stops)} stop strings, at most {limits.max_stop_strings}", param="stop")
    if sum(len(s.encode()) for s in stops) > limits.max_stop_bytes:
        raise InvalidRequest(f"stop strings are longer than {limits.max_stop_bytes} bytes in all", param="stop")
    return tuple(dict.fromkeys(s for s in stops if s))


def check_num_choices(n: int, best_of: int | None, limits: Limits) -> int:
    _in_range("n", n, 1, limits.max_n)
    if best_of is not None and best_of != n:
        raise InvalidRequest(
            f"best_of = {best_of} is not supported: it must equal n ({n}) or be left out", param="best_of"
        )
    return n


def _max_tokens(asked: int | None, num_prompt_tokens: int, bounds: ModelBounds, prompt_param: str) -> int:
    if asked is not None and asked < 0:
        raise InvalidRequest(f"max_tokens must be 0 or more, not {asked}", param="max_tokens")
    room = bounds.max_tokens - num_prompt_tokens
    if asked is None and room > 0:
        return room
    if asked is not None and asked <= room:
        return asked
    if bounds.max_model_len <= bounds.cache_tokens:
        limit = f"This model's maximum context length is {bounds.max_model_len} tokens"
    else:
        limit = (
            f"The KV cache holds {bounds.cache_tokens} tokens ({bounds.num_blocks} blocks of {bounds.block_size}), "
            f"less than the context length of {bounds.max_model_len}"
        )
    if asked is None or room < 1:
        raise PromptTooLong(
            f"{limit}, and the prompt has {num_prompt_tokens}: no room is left to answer", param=prompt_param
        )
    raise PromptTooLong(
        f"{limit}. You asked for {num_prompt_tokens + asked} tokens: {num_prompt_tokens} in the prompt and {asked} "
        f"as max_tokens. Shorten the prompt or ask for {room} tokens at most",
        param="max_tokens",
    )


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _in_range(name: str, value: _N, low: float, high: float | None) -> _N:
    strange = isinstance(value, float) and not math.isfinite(value)  # an int may be too large for isfinite
    if strange or value < low or (high is not None and value > high):
        span = f"{low} or more" if high is None else f"between {low} and {high}"
        raise InvalidRequest(f"{name} must be {span}, not {value}", param=name)
    return value


def _top_k(top_k: int, vocab_size: int) -> int:
    if top_k in (0, -1) or top_k >= vocab_size:
        return 0
    return _in_range("top_k", top_k, -1, None)


def _repetition_penalty(value: float) -> float:
    """Logits are divided by it: beyond these bounds they would leave float32."""
    return _in_range("repetition_penalty", value, 0.01, 100.0)


def _logit_bias(bias: Mapping[str, float], vocab_size: int, max_entries: int) -> dict[int, float]:
    if len(bias) > max_entries:
        raise InvalidRequest(f"logit_bias has {len(bias)} entries, at most {max_entries}", param="logit_bias")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        if not key.isascii() or not key.removeprefix("-").isdigit() or len(key) > 20:
            raise InvalidRequest(f"logit_bias key {key[:40]!r} is not a token id", param="logit_bias")
        token_id = int(key)
        check_token_ids((token_id,), vocab_size, param="logit_bias")
        if not -100.0 <= value <= 100.0:
            raise InvalidRequest(
                f"logit_bias of token {key} must be between -100 and 100, not {value}", param="logit_bias"
            )
        checked[token_id] = float(value)
    return checked


def _num_logprobs(name: str, value: int | None, most: int) -> int | None:
    return None if value is None else _in_range(name, value, 0, most)
