"""Streams of tokens to streams of text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.tokenizer import IncrementalDetokenizer, Tokenizer

BYTE_LEVEL_IDS = st.lists(st.integers(0, 49155), max_size=30)
SPM_IDS = st.lists(st.integers(0, 290), max_size=30)


def stream(detokenizer: IncrementalDetokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """Pushes ids in portions of the given sizes, then one by one, and flushes."""
    pieces, pos = [], 0
    for size in sizes:
        pieces.append(detokenizer.push(ids[pos : pos + size]))
        pos += size
    pieces += [detokenizer.push([id_]) for id_ in ids[pos:]]
    return [*pieces, detokenizer.flush()]


@given(ids=BYTE_LEVEL_IDS, sizes=st.lists(st.integers(0, 4), max_size=6), skip=st.booleans())
def test_byte_level_pieces(default_tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool) -> None:
    """Guards streamed == not streamed for any ids, invalid UTF-8 included, however they arrive."""
    pieces = stream(IncrementalDetokenizer(default_tokenizer, skip_special_tokens=skip), ids, sizes)
    assert "".join(pieces) == default_tokenizer.decode(ids, skip_special_tokens=skip)


@given(ids=SPM_IDS, sizes=st.lists(st.integers(0, 4), max_size=6), skip=st.booleans())
def test_sentencepiece_pieces(spm_tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool) -> None:
    """Guards the same for SentencePiece: its first space, and runs of byte tokens."""
    pieces = stream(IncrementalDetokenizer(spm_tokenizer, skip_special_tokens=skip), ids, sizes)
    assert "".join(pieces) == spm_tokenizer.decode(ids, skip_special_tokens=skip)


@given(prompt=SPM_IDS, ids=SPM_IDS)
def test_output_goes_on_with_the_prompt(spm_tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> None:
    """Guards spaces and characters at the joint: prompt text + output text == text of both."""
    detokenizer = IncrementalDetokenizer(spm_tokenizer, prompt_ids=prompt)
    output = "".join(stream(detokenizer, ids, []))
    before = IncrementalDetokenizer(spm_tokenizer)
    assert before.push(prompt) + output == spm_tokenizer.decode(prompt + ids)


@pytest.mark.parametrize("text", ["안녕하세요 세계", "😀👩‍👩‍👧 ok", "naïve 漢字", "é" * 20])
def test_never_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    """Guards against U+FFFD in the stream of a valid text."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = stream(detokenizer, tokenizer.encode(text), [])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_space_after_a_prompt(spm_tokenizer: Tokenizer) -> None:
    """Guards "The capital is" + " Paris": the space is kept behind a prompt and dropped at a beginning."""
    hello = [spm_tokenizer.token_to_id("▁hello") or 0]
    assert IncrementalDetokenizer(spm_tokenizer).push(hello) == "hello"
    bos = [spm_tokenizer.bos_token_id or 0]
    assert IncrementalDetokenizer(spm_tokenizer, prompt_ids=bos).push(hello) == "hello"
    assert IncrementalDetokenizer(spm_tokenizer, prompt_ids=bos + hello).push(hello) == " hello"


def test_unfinished_character_at_the_end(default_tokenizer: Tokenizer) -> None:
    """Guards an answer cut by max_tokens in the middle of a character: one U+FFFD, at the end only."""
    ids = default_tokenizer.encode("한")[:-1]
    detokenizer = IncrementalDetokenizer(default_tokenizer)
    assert detokenizer.push(ids) == ""
    assert detokenizer.flush() == "\ufffd"


def test_character_begun_by_the_prompt(default_tokenizer: Tokenizer) -> None:
    """Guards a prompt of token ids that ends within a character: the output completes it."""
    ids = default_tokenizer.encode("한")
    assert len(ids) >= 2
    assert IncrementalDetokenizer(default_tokenizer, prompt_ids=ids[:1]).push(ids[1:]) == "한"
