"""Keeps requests out of the scheduler while their grammar compiles, so that no step ever waits for a compiler."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from server.protocol import GenerateRequest, GrammarSpec
from server.structured import CompiledGrammar, GrammarCompiler, GrammarState


class _ReadyGrammar(GrammarSpec, frozen=True, kw_only=True):
    """A grammar that its request brings along, compiled: however many others come meanwhile, it is not lost."""

    compiled: Future[CompiledGrammar]


class _Held:
    """A request that waits, for the compiler first and then for its own grammar."""

    def __init__(self, request: GenerateRequest, grammar: GrammarSpec) -> None:
        self.request = request
        self.grammar = grammar
        self.compiled: Future[CompiledGrammar] | None = None

    def released(self) -> GenerateRequest:
        assert self.compiled is not None, "released before it was compiled"
        ready = _ReadyGrammar(self.grammar.kind, self.grammar.source, compiled=self.compiled)
        sampling = msgspec.structs.replace(self.request.sampling, grammar=ready)
        return msgspec.structs.replace(self.request, sampling=sampling)


class GrammarGate:
    """Written by: EngineCore. The compiler, and the vocabulary it needs, are made when the first grammar comes."""

    def __init__(self, build: Callable[[], GrammarCompiler]) -> None:
        self._build = build
        self._builder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vocabulary")
        self._compiler: Future[GrammarCompiler] | None = None
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request: GenerateRequest) -> bool:
        """Whether it has a grammar; then it comes back through release()."""
        grammar = request.sampling.grammar
        if grammar is None:
            return False
        held = self._held[request.request_id] = _Held(request, grammar)
        self._prepare(held)
        return True

    def release(self) -> list[GenerateRequest]:
        """Those that may run now, in order of arrival. Bad grammars are among them: start() will say what is wrong."""
        ready = [held for held in self._held.values() if self._is_ready(held)]
        for held in ready:
            del self._held[held.request.request_id]
        return [held.released() for held in ready]

    def take(self, request_ids: Sequence[str]) -> list[GenerateRequest]:
        """Gives up waiting for these; ids that are not held are ignored."""
        return [self._held.pop(request_id).request for request_id in request_ids if request_id in self._held]

    def start(self, grammar: GrammarSpec, max_tokens: int) -> GrammarState:
        """The state at the start of an output of so many tokens at most.

        Raises what compiling raised. Waits where the grammar did not come through release().
        """
        compiler = self._begin().result()
        ready = grammar.compiled.result() if isinstance(grammar, _ReadyGrammar) else grammar
        return compiler.start(ready, max_tokens=max_tokens)

    def _is_ready(self, held: _Held) -> bool:
        if held.compiled is None:
            self._prepare(held)
        return held.compiled is not None and held.compiled.done()

    def _prepare(self, held: _Held) -> None:
        """Once, so that a grammar which the cache had to give up meanwhile isn't begun anew."""
        compiler = self._begin()
        if not compiler.done():
            return
        if error := compiler.exception():
            held.compiled = Future()
            held.compiled.set_exception(error)
        else:
            held.compiled = compiler.result().prepare(held.grammar)

    def _begin(self) -> "Future[GrammarCompiler]":
        if self._compiler is None:
            self._compiler = self._builder.submit(self._build)
        return self._compiler
