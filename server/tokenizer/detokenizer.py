"""Token ids to text, a few at a time, without ever showing half a character."""

import codecs
from collections.abc import Sequence

from server.tokenizer.tokenizer import Tokenizer

_MAX_PARTIAL_BYTES = 3
"""A UTF-8 character has at most four bytes, so an unfinished one at most three."""


class IncrementalDetokenizer:
    """Decodes one sequence's output. Written by: whoever reads that sequence.

    What push() and flush() return, put together, is the text that the output adds to the prompt: the decoding of all
    output ids, where a character that the prompt left unfinished is completed, and where the first space is kept unless
    the output begins the sequence. A token costs one table look-up, however long the output is.

    prompt_ids: the prompt, or its last few tokens. Empty where the output stands alone.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        context = b"".join([self._token_bytes(id_) for id_ in prompt_ids[-8:] if id_ not in self._skipped])
        begins = not context and all(id_ in self._skipped for id_ in prompt_ids)
        self._strip_space = tokenizer.strips_first_space and begins
        self._decoder.decode(_unfinished_tail(context))

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now. Characters whose last byte is still to come are held back."""
        skipped, token_bytes = self._skipped, self._token_bytes
        data = b"".join([token_bytes(id_) for id_ in token_ids if id_ not in skipped])
        if self._strip_space and data:
            self._strip_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The end has come: U+FFFD where a character stays unfinished, else nothing."""
        return self._decoder.decode(b"", final=True)


def _unfinished_tail(data: bytes) -> bytes:
    """The last bytes of data where they begin a character that they don't complete."""
    for length in range(1, min(_MAX_PARTIAL_BYTES, len(data)) + 1):
        tail = data[-length:]
        if tail[0] >= 0xC0:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            return tail if not decoder.decode(tail) else b""
    return b""
