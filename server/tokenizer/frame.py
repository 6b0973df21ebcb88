"""The tokens that a tokenizer puts around a text of its own accord."""

from tokenizers import Tokenizer as Backend
from tokenizers import processors


def set_frame(backend: Backend, *, bos: str | None, eos: str | None) -> None:
    """Makes add_special_tokens put exactly these around a text. Both must be in the vocabulary."""
    before, after = ([token] if token is not None else [] for token in (bos, eos))
    ids = [(token, backend.token_to_id(token)) for token in {*before, *after}]
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], pair=[*before, "$A", *after, "$B"], special_tokens=ids
    )
