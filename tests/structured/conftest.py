"""One compiler over the default model's vocabulary, padded as some models' logits are."""

from collections.abc import Iterator

import pytest

from server.structured import GrammarCompiler
from server.tokenizer import Tokenizer, load_tokenizer
from server.weights.locate import locate

PADDED_VOCABULARY = 49152 + 40


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(locate(""))


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, vocab_size=PADDED_VOCABULARY)
    yield compiler
    compiler.close()
