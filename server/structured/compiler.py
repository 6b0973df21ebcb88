"""Grammars, compiled once each, off the step thread."""

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from server.errors import InvalidRequest, UnsupportedFeature
from server.protocol import GrammarSpec
from server.structured.ending import Budget, EndingTokens
from server.structured.grammar import MAX_LEXER_STATES, CompiledGrammar, reason_of
from server.structured.grammar_text import grammar_text
from server.structured.state import GrammarState
from server.tokenizer import Tokenizer

_MAX_SOURCE_BYTES = 1 << 20
_MAX_MESSAGE_CHARS = 500
_MAX_CACHED = 64
_MAX_CACHED_BYTES = 512 << 20
_LIMITS = LLParserLimits(
    initial_lexer_fuel=2_000_000,  # about 40 ms
    step_lexer_fuel=200_000,  # about 15 ms
    step_max_items=50_000,
    max_items_in_row=20_000,  # enough for 10,000 choices or 1,000 properties
    max_lexer_states=MAX_LEXER_STATES,
    max_grammar_size=200_000,
    verbose_errors=False,  # the others hold pieces of the schema
)


class GrammarCompiler:
    """Compiles and caches grammars for one vocabulary. Safe to share between threads.

    Both processes have one. In the API process check() tells a client what is wrong with its schema; the engine's then
    compiles the same text with the same limits, so what was accepted there works here.

    vocab_size: of the model's logits, which may be padded beyond the tokenizer's. end_token_ids: allowed where an
    output may end. max_cached_bytes: of the grammars' own estimates, which are high; it makes some compile again.
    Building it is cheap; the first grammar costs about 0.3 s more, for the trie of the vocabulary.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int | None = None,
        end_token_ids: Collection[int] | None = None,
        max_cached: int = _MAX_CACHED,
        max_cached_bytes: int = _MAX_CACHED_BYTES,
        max_source_bytes: int = _MAX_SOURCE_BYTES,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self._end_token_ids = frozenset(tokenizer.end_token_ids if end_token_ids is None else end_token_ids)
        self._max_cached = max_cached
        self._max_cached_bytes = max_cached_bytes
        self._max_source_bytes = max_source_bytes
        self._cache: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()
        self._lock = Lock()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._vocabulary: LLTokenizer | None = None
        self._ending_tokens: EndingTokens | None = None
        """Made with the vocabulary, so before any grammar is ready."""

    def prepare(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """Begins to compile, if that was not done before. The future fails with InvalidRequest for a bad grammar."""
        with self._lock:
            found = self._cache.get(spec)
            if found is None:
                self._make_room()
                found = self._cache[spec] = self._worker.submit(self._compile, spec)
            self._cache.move_to_end(spec)
            return found

    async def check(self, spec: GrammarSpec, *, param: str = "response_format") -> None:
        """Raises InvalidRequest that says what is wrong. It takes mostly milliseconds, at most 1 s, and no thread.

        So clients with slow grammars wait for one another, but nobody who wants a thread waits for them.
        """
        try:
            # Shielded: others wait for the same grammar, so whoever gives up must not cancel it.
            await asyncio.shield(asyncio.wrap_future(self.prepare(spec)))
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=param) from error

    def start(
        self,
        grammar: GrammarSpec | CompiledGrammar,
        output_ids: Sequence[int] = (),
        *,
        max_tokens: int | None = None,
    ) -> GrammarState:
        """The state behind output_ids (a resumed request's output so far). Blocks while a GrammarSpec is compiled.

        max_tokens: of the whole output, which then comes to its end before they run out, where the grammar can end so
        soon. Raises InvalidRequest for a bad grammar, RuntimeError where output_ids do not follow it.
        """
        if isinstance(grammar, GrammarSpec):
            grammar = self.prepare(grammar).result()
        matcher = grammar.matcher.deep_copy()
        budget = None
        if max_tokens is not None and self._ending_tokens is not None:
            budget = Budget(grammar.spec, self._ending_tokens, matcher, max_tokens=max_tokens)
        state = GrammarState(grammar, matcher, end_token_ids=self._end_token_ids, budget=budget)
        state.advance(output_ids)
        return state

    def close(self) -> None:
        """Ends the worker. What it has begun is finished first."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _make_room(self) -> None:
        """For one more. What is still compiling stays: who waits for it would only begin it anew."""
        sizes = {spec: _most_bytes(future) for spec, future in self._cache.items() if future.done()}
        num_bytes = sum(sizes.values())
        for spec, size in sizes.items():
            if len(self._cache) < self._max_cached and num_bytes <= self._max_cached_bytes:
                return
            num_bytes -= size
            del self._cache[spec]

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """On the worker."""
        num_bytes = len(spec.source.encode("utf-8", "surrogatepass"))
        if num_bytes > self._max_source_bytes:
            raise InvalidRequest(f"the {spec.kind} has {num_bytes} bytes; the most is {self._max_source_bytes}")
        if self._vocabulary is None:
            self._vocabulary = self._build_vocabulary()
            token_bytes = [self._tokenizer.token_bytes(id_) for id_ in range(self._vocab_size)]
            self._ending_tokens = EndingTokens(token_bytes, self._end_token_ids, vocab_size=self._vocab_size)
        text = grammar_text(spec, param="response_format")
        matcher = LLMatcher(self._vocabulary, text, log_level=0, limits=_LIMITS)
        _raise_for(spec, matcher)
        first = matcher.deep_copy()
        mask = np.zeros((self._vocab_size + 31) // 32, dtype=np.int32)
        first.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        _raise_for(spec, first)
        if not mask.any():
            raise InvalidRequest(f"no output satisfies the {spec.kind}")
        return CompiledGrammar(spec, matcher)

    def _build_vocabulary(self) -> LLTokenizer:
        if not self._end_token_ids:
            raise UnsupportedFeature("structured outputs need a model with an end token; this one has none")
        return LLTokenizer(
            TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size, min(self._end_token_ids))),
            n_vocab=self._vocab_size,
            eos_token=sorted(self._end_token_ids),
        )


def _most_bytes(compiled: Future[CompiledGrammar]) -> int:
    return 0 if compiled.cancelled() or compiled.exception() is not None else compiled.result().most_bytes


def _raise_for(spec: GrammarSpec, matcher: LLMatcher) -> None:
    if not matcher.is_error():
        return
    reason = reason_of(matcher)
    if not reason:
        raise InvalidRequest(f"no output satisfies the {spec.kind}")
    raise InvalidRequest(f"the {spec.kind} can't be used: {reason[:_MAX_MESSAGE_CHARS]}")


class _Vocabulary:
    """The tokenizer as llguidance wants to see it. Control tokens are no text: no grammar allows their spelling."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(id_ for id_ in tokenizer.special_ids if id_ < vocab_size)
        self.tokens = [tokenizer.token_bytes(id_) for id_ in range(vocab_size)]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False, allow_special=False)
