"""Keeps requests out of the scheduler while their grammar compiles, so that no step ever waits for a compiler."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from server.protocol import GenerateRequest, GrammarSpec
from server.structured import GrammarCompiler, GrammarState


class GrammarGate:
    """Written by: EngineCore. The compiler, and the vocabulary it needs, are made when the first grammar comes."""

    def __init__(self, build: Callable[[], GrammarCompiler]) -> None:
        self._build = build
        self._builder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vocabulary")
        self._compiler: Future[GrammarCompiler] | None = None
        self._held: dict[str, GenerateRequest] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request: GenerateRequest) -> bool:
        """Whether it has to wait; then it comes back through release()."""
        if request.sampling.grammar is None or self._is_ready(request.sampling.grammar):
            return False
        self._held[request.request_id] = request
        return True

    def release(self) -> list[GenerateRequest]:
        """Those that may run now, in order of arrival. Bad grammars are among them: start() will say what is wrong."""
        ready = [r for r in self._held.values() if r.sampling.grammar is None or self._is_ready(r.sampling.grammar)]
        for request in ready:
            del self._held[request.request_id]
        return ready

    def take(self, request_ids: Sequence[str]) -> list[GenerateRequest]:
        """Gives up waiting for these; ids that are not held are ignored."""
        return [self._held.pop(request_id) for request_id in request_ids if request_id in self._held]

    def start(self, grammar: GrammarSpec, max_tokens: int) -> GrammarState:
        """The state at the start of an output of so many tokens at most.

        Raises what compiling raised. Waits where hold() was not asked.
        """
        return self._begin().result().start(grammar, max_tokens=max_tokens)

    def _is_ready(self, grammar: GrammarSpec) -> bool:
        compiler = self._begin()
        return compiler.done() and (compiler.exception() is not None or compiler.result().is_ready(grammar))

    def _begin(self) -> "Future[GrammarCompiler]":
        if self._compiler is None:
            self._compiler = self._builder.submit(self._build)
        return self._compiler
