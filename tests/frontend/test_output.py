"""Deltas to pieces: what the endpoints rely on, whatever way the tokens are cut into deltas."""

import asyncio
import itertools
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.frontend.generation import merge
from server.frontend.output import OutputProcessor
from server.frontend.params import derive_seed
from server.protocol import FinishReason, OutputDelta, TokenLogprobs
from server.tokenizer import IncrementalDetokenizer, StopMatcher, Tokenizer, load_tokenizer
from server.weights.locate import locate

TEXT = " Hello, wide world! 안녕하세요 세계 😀😃 done"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(locate("", offline=True))


def run(
    tokenizer: Tokenizer, tokens: list[int], cuts: list[int], *, stops: list[str], logprobs: bool, min_tokens: int = 0
) -> tuple[str, list[int], str | int | None, int]:
    """Text, offsets of the logprobs, stop reason and token count, with deltas cut at `cuts`."""
    processor = OutputProcessor(
        index=0,
        detokenizer=IncrementalDetokenizer(tokenizer),
        stop=StopMatcher(stops) if stops else None,
        min_tokens=min_tokens,
        want_logprobs=logprobs,
    )
    edges = sorted({0, len(tokens), *(c % (len(tokens) + 1) for c in cuts)})
    pieces = []
    for start, end in itertools.pairwise(edges):
        chunk = tokens[start:end]
        scores = [TokenLogprobs(t, -1.0, 1, [], []) for t in chunk] if logprobs else None
        last = FinishReason.LENGTH if end == len(tokens) else None
        pieces.append(processor.push(OutputDelta("r", chunk, finish_reason=last, logprobs=scores)))
        if processor.finished:
            break
    assert [p.finish_reason is not None for p in pieces] == [False] * (len(pieces) - 1) + [True]
    offsets = [t.offset for p in pieces for t in p.logprobs or ()]
    return "".join(p.text for p in pieces), offsets, pieces[-1].stop_reason, processor.num_tokens


@settings(max_examples=80)
@given(
    cuts=st.lists(st.integers(0, 60), max_size=12),
    stops=st.lists(st.sampled_from(["wide", "o, w", "하세", "😃", "zzz", "done!", "😀😃 do"]), max_size=3),
    logprobs=st.booleans(),
    min_tokens=st.integers(0, 12),
)
def test_cuts_change_nothing(
    tokenizer: Tokenizer, cuts: list[int], stops: list[str], logprobs: bool, min_tokens: int
) -> None:
    """Guards that merged deltas, single tokens and everything between give the same text, offsets, reason and count."""
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    cut = run(tokenizer, tokens, cuts, stops=stops, logprobs=logprobs, min_tokens=min_tokens)
    single = run(tokenizer, tokens, list(range(len(tokens))), stops=stops, logprobs=logprobs, min_tokens=min_tokens)
    assert cut == single
    text, offsets, stop_reason, _ = cut
    assert TEXT.startswith(text)
    assert all(offset < len(text) for offset in offsets)
    if stop_reason is None:
        assert text == TEXT
    elif min_tokens == 0:
        assert not any(stop in text for stop in stops)


def test_unfinished_character_at_the_end(tokenizer: Tokenizer) -> None:
    """Guards the end: half a character becomes U+FFFD there, once, and not before."""
    tokens = tokenizer.encode("😀", add_special_tokens=False)
    assert len(tokens) > 1
    assert run(tokenizer, tokens[:-1], [0, 1], stops=[], logprobs=False)[0] == "\ufffd"


def test_seeds_of_choices() -> None:
    """Guards choice 0 = the client's own seed, and distinct 64-bit seeds for the others."""
    seeds = [derive_seed(2**64 - 1, choice) for choice in range(100)]
    assert seeds[0] == 2**64 - 1
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**64 for seed in seeds)


async def counted(first: int, num: int, closed: list[int]) -> AsyncGenerator[int, None]:
    try:
        for i in range(num):
            await asyncio.sleep(0)
            yield first + i
        if first == 90:
            raise ValueError("ninety")
    finally:
        closed.append(first)


def test_merge() -> None:
    """Guards order within a stream, that an early end closes every stream, and that one failure ends them all."""

    async def main() -> None:
        closed: list[int] = []
        items = [item async for item in merge([counted(f, 5, closed) for f in (0, 10, 20)])]
        assert [i for i in items if i < 10] == [0, 1, 2, 3, 4]
        assert sorted(items) == [*range(5), *range(10, 15), *range(20, 25)]
        closed.clear()
        merged = merge([counted(f, 10**6, closed) for f in (0, 10)])
        await anext(merged)
        await merged.aclose()
        assert sorted(closed) == [0, 10]
        closed.clear()
        with pytest.raises(ValueError, match="ninety"):
            async for _ in merge([counted(90, 2, closed), counted(0, 10**6, closed)]):
                pass
        assert sorted(closed) == [0, 90]

    asyncio.run(main())
