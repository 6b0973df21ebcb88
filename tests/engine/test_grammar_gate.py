"""Requests with grammars wait at the gate, and nowhere else."""

import time
from collections.abc import Iterator

import pytest

from server.engine.grammar_gate import GrammarGate
from server.errors import InvalidRequest
from server.protocol import GenerateRequest, GrammarSpec, SamplingParams
from server.structured import GrammarCompiler
from server.structured import compiler as compiler_module
from server.tokenizer import load_tokenizer
from server.weights.locate import locate

CACHED = 2


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sources in the order in which they were compiled."""
    sources: list[str] = []
    original = compiler_module.grammar_text

    def counted(spec: GrammarSpec, *, param: str) -> str:
        sources.append(spec.source)
        return original(spec, param=param)

    monkeypatch.setattr(compiler_module, "grammar_text", counted)
    return sources


@pytest.fixture
def gate() -> Iterator[GrammarGate]:
    compiler = GrammarCompiler(load_tokenizer(locate("")), max_cached=CACHED)
    yield GrammarGate(lambda: compiler)
    compiler.close()


def request(pattern: str | None) -> GenerateRequest:
    grammar = None if pattern is None else GrammarSpec("regex", pattern)
    return GenerateRequest(f"r {pattern}", [1], SamplingParams(max_tokens=8, seed=1, grammar=grammar), 0.0)


def released(gate: GrammarGate, number: int) -> list[GenerateRequest]:
    requests: list[GenerateRequest] = []
    deadline = time.monotonic() + 60
    while len(requests) < number:
        assert time.monotonic() < deadline
        requests += gate.release()
        time.sleep(0.001)
    return requests


def test_no_step_compiles(gate: GrammarGate, compiled: list[str]) -> None:
    """Guards the step: requests whose grammars the cache gave up while they waited for a place compiled them in it."""
    patterns = [f"a{number}" for number in range(5 * CACHED)]
    assert all(gate.hold(request(pattern)) for pattern in patterns)
    waiting = released(gate, len(patterns))
    assert len(gate) == 0
    for _ in range(2):  # the second time: after a preemption
        for admitted in waiting:
            assert admitted.sampling.grammar is not None
            gate.start(admitted.sampling.grammar, 8)
    assert sorted(compiled) == sorted(patterns)


def test_what_the_gate_gives_back(gate: GrammarGate) -> None:
    """Guards requests from getting lost at the gate: plain ones pass, bad and abandoned ones come out."""
    assert not gate.hold(request(None))
    gate.hold(request("("))
    gate.hold(request("b"))
    assert [r.request_id for r in gate.take(["r b", "unknown"])] == ["r b"]
    (bad,) = released(gate, 1)
    assert bad.sampling.grammar is not None
    with pytest.raises(InvalidRequest):
        gate.start(bad.sampling.grammar, 8)
