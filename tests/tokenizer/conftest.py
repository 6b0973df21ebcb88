"""The default model's tokenizer, loaded once, and tiny ones of each kind."""

import pytest

from server.tokenizer import Tokenizer, load_tokenizer
from server.weights.locate import ModelFiles, locate
from tests.tokenizer.vocabularies import spm_metadata


@pytest.fixture(scope="session")
def default_files() -> ModelFiles:
    return locate("")


@pytest.fixture(scope="session")
def default_tokenizer(default_files: ModelFiles) -> Tokenizer:
    return load_tokenizer(default_files)


@pytest.fixture(scope="session")
def spm_tokenizer(default_files: ModelFiles) -> Tokenizer:
    """SentencePiece with a space prefix and byte fallback, as Llama 2 has it."""
    return load_tokenizer(ModelFiles(name="spm", kind="gguf", path=default_files.path, config=spm_metadata()))


@pytest.fixture(params=["byte_level", "spm"])
def tokenizer(request: pytest.FixtureRequest, default_tokenizer: Tokenizer, spm_tokenizer: Tokenizer) -> Tokenizer:
    return default_tokenizer if request.param == "byte_level" else spm_tokenizer
