"""What can't be compiled is refused with a reason; what can is compiled once."""

import asyncio
import json
from concurrent.futures import wait
from threading import Event
from typing import Any

import pytest

from server.errors import InvalidRequest
from server.protocol import GrammarSpec
from server.structured import GrammarCompiler
from server.structured import compiler as compiler_module
from server.tokenizer import Tokenizer
from tests.structured.walks import may_end


def json_spec(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


def nested(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


MANY_PROPERTIES = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (json_spec({"type": "banana"}), "banana"),
        (json_spec({"type": "string", "pattern": "("}), "unclosed group"),
        (json_spec({"$ref": "#/nowhere"}), "nowhere"),
        (json_spec({"$ref": "http://example.com/schema.json"}), "example.com"),
        (json_spec(5), "must be a JSON object"),
        (json_spec(False), "must be a JSON object"),
        (GrammarSpec("json_schema", "{"), "not valid JSON"),
        (GrammarSpec("json_schema", "[" * 100_000), "not valid JSON"),
        (json_spec(nested(100)), "nested"),
        (json_spec(MANY_PROPERTIES), "3000 properties"),
        (json_spec({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (json_spec({"enum": []}), "Unsatisfiable"),
        (json_spec({"$ref": "#"}), "no output"),
        (GrammarSpec("regex", "("), "unclosed group"),
        (GrammarSpec("regex", "(?=a)b"), "look-around"),
        (GrammarSpec("regex", "[^x]*" * 500), "fuel"),
        (GrammarSpec("choice", "[]"), "at least one"),
        (GrammarSpec("choice", '["a", 5]'), "strings"),
        (GrammarSpec("choice", '["a", ""]'), "empty"),
        (GrammarSpec("choice", "x"), "choice"),
        (GrammarSpec("grammar", "start: missing"), "missing"),
        (GrammarSpec("grammar", ""), "Empty"),
        (GrammarSpec("grammar", "root ::= ("), "grammar"),
        (GrammarSpec("grammar", "start: T\nT: /a/ & /b/"), "no output"),
        (GrammarSpec("banana", ""), "banana"),
        (GrammarSpec("regex", "a" * (2 << 20)), "bytes"),
        (GrammarSpec("regex", "\ud800"), "regex"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_refused(compiler: GrammarCompiler, spec: GrammarSpec, message: str) -> None:
    """Guards the 400: broken and explosive grammars say what is wrong, for the field the client sent."""
    with pytest.raises(InvalidRequest, match=message) as caught:
        asyncio.run(compiler.check(spec, param="structured_outputs"))
    assert caught.value.param == "structured_outputs"
    assert len(caught.value.message) < 700


@pytest.mark.parametrize(
    "spec",
    [
        json_spec({}),
        json_spec(True),
        json_spec({"type": "string", "pattern": "((a{0,1000}){0,1000}){0,1000}"}),
        json_spec({"type": "string", "maxLength": 100_000_000}),
        json_spec({"type": "array", "items": {"type": "integer"}, "maxItems": 10**9}),
        json_spec({"type": "object", "properties": {"format": {"type": "string", "format": "x-unknown"}}}),
        json_spec({"enum": [{"format": "x-unknown"}]}),
        json_spec({"anyOf": [{"type": "string"}] * 500}),
        GrammarSpec("regex", "((a{0,1000}){0,1000}){0,1000}"),
        GrammarSpec("regex", "(a+)+b"),
    ],
    ids=range(10),
)
def test_large_but_fine(compiler: GrammarCompiler, spec: GrammarSpec) -> None:
    """Guards against refusing what only looks explosive."""
    asyncio.run(compiler.check(spec))


def test_format_in_data_is_kept(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Guards enum and const values that hold a key "format": they are data."""
    state = compiler.start(json_spec({"enum": [{"format": "x-unknown"}]}), tokenizer.encode('{"format":"x-unknown"}'))
    assert may_end(state, tokenizer)


def test_compiles_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the cache: eight choices of a schema compile once; the oldest grammar makes room; errors are kept too."""
    compiled: list[str] = []
    original = compiler_module.grammar_text

    def counted(spec: GrammarSpec, *, param: str) -> str:
        compiled.append(spec.source)
        return original(spec, param=param)

    monkeypatch.setattr(compiler_module, "grammar_text", counted)
    compiler = GrammarCompiler(tokenizer, max_cached=2)
    for _ in range(8):
        compiler.start(GrammarSpec("regex", "a"))
    assert compiled == ["a"]
    for pattern in ("b", "c", "a"):
        compiler.start(GrammarSpec("regex", pattern))
    assert compiled == ["a", "b", "c", "a"]
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            asyncio.run(compiler.check(GrammarSpec("regex", "(")))
    assert compiled[4:] == ["("]
    compiler.close()


def test_worn_grammars_make_room(tokenizer: Tokenizer) -> None:
    """Guards the memory of a server that many grammars pass through: each may grow to 50 MB as outputs follow it."""
    compiler = GrammarCompiler(tokenizer, max_cached_bytes=1_000_000)
    worn, fresh = GrammarSpec("regex", "a+"), GrammarSpec("regex", "b+")
    futures = [compiler.prepare(spec) for spec in (worn, fresh)]
    compiler.start(fresh)
    compiler.start(worn, tokenizer.encode("a") * 11)
    compiler.prepare(GrammarSpec("regex", "c"))
    again = [compiler.prepare(spec) for spec in (worn, fresh)]
    assert [old is new for old, new in zip(futures, again, strict=True)] == [False, False]
    compiler.prepare(GrammarSpec("regex", "d"))
    assert compiler.prepare(fresh) is again[1]
    compiler.close()


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (GrammarSpec("choice", json.dumps([f"word {number}" for number in range(10_000)])), "word 4711"),
        (json_spec({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}), '{"p7":""}'),
    ],
    ids=["choices", "properties"],
)
def test_many_alternatives(compiler: GrammarCompiler, tokenizer: Tokenizer, spec: GrammarSpec, text: str) -> None:
    """Guards grammars with thousands of alternatives, accepted at the door and failed at the first token."""
    assert may_end(compiler.start(spec, tokenizer.encode(text)), tokenizer)


def test_off_the_calling_thread(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the event loop: prepare() begins to compile and returns at once."""
    gate = Event()
    original = compiler_module.grammar_text

    def slow(spec: GrammarSpec, *, param: str) -> str:
        gate.wait(30)
        return original(spec, param=param)

    monkeypatch.setattr(compiler_module, "grammar_text", slow)
    compiler = GrammarCompiler(tokenizer)
    spec = GrammarSpec("regex", "a")
    preparing = compiler.prepare(spec)
    assert not preparing.done()
    gate.set()
    preparing.result(timeout=30)
    compiler.close()


def test_more_waiting_than_cached(tokenizer: Tokenizer) -> None:
    """Guards a queue of more grammars than the cache holds, polled in turn: each becomes ready, none is begun anew."""
    compiler = GrammarCompiler(tokenizer, max_cached=4)
    specs = [GrammarSpec("regex", f"a{number}") for number in range(30)] + [GrammarSpec("regex", "(")]
    futures = [compiler.prepare(spec) for spec in specs]
    wait(futures, timeout=60)
    assert [compiler.prepare(spec) for spec in specs] == futures
    compiler.close()


def test_model_without_end_token(tokenizer: Tokenizer) -> None:
    """Guards a base model that names no end token: refused, instead of outputs that can't end."""
    compiler = GrammarCompiler(tokenizer, end_token_ids=[])
    with pytest.raises(InvalidRequest, match="end token"):
        asyncio.run(compiler.check(GrammarSpec("regex", "a")))
    compiler.close()


def test_waiting_clients_hold_no_threads(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards long prompts, which are encoded on the same threads, from clients that send slow grammars."""
    go_on = Event()
    original = compiler_module.grammar_text

    def slow(spec: GrammarSpec, *, param: str) -> str:
        assert go_on.wait(60)
        return original(spec, param=param)

    monkeypatch.setattr(compiler_module, "grammar_text", slow)
    compiler = GrammarCompiler(tokenizer)

    async def main() -> None:
        checks = [asyncio.create_task(compiler.check(GrammarSpec("regex", f"a{number}"))) for number in range(40)]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(30):
                await asyncio.to_thread(int)
            checks[1].cancel()
        finally:
            go_on.set()
        await asyncio.gather(*checks[:1], *checks[2:])
        await compiler.check(GrammarSpec("regex", "a1"))  # its first client has gone, and took nothing along

    asyncio.run(main())
    compiler.close()
