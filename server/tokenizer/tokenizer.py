"""Text to token ids and back."""

import json
import secrets
from collections.abc import Iterable, Mapping
from functools import cached_property

from tokenizers import Tokenizer as Backend

from server.errors import InvalidRequest, ModelLoadError
from server.tokenizer.token_bytes import codec_of

_NORMALIZER_SHRINK = 4
"""Most characters that Unicode composition (NFC, NFKC) folds into one in practice."""


class Tokenizer:
    """A vocabulary and its rules. Written by: nobody after construction; safe to share between threads.

    backend: who splits and merges. special_tokens: the named ones ("bos_token", "eos_token", ...) by spelling.
    end_token_ids: tokens that end an answer. Text with unpaired surrogates raises InvalidRequest.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        end_token_ids: Iterable[int] = (),
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._codec = codec_of(backend.decoder.__getstate__() if backend.decoder else None)
        self._added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(id_ for id_, token in self._added.items() if token.special)
        self._bytes: list[bytes | None] = [None] * max(
            backend.get_vocab_size(with_added_tokens=True), max(self._added, default=-1) + 1
        )
        self.special_tokens = dict(special_tokens or {})
        self.end_token_ids = frozenset(end_token_ids)

    # ------------------------------------------------------------------------------------------------ the vocabulary

    @property
    def vocab_size(self) -> int:
        """Number of ids that have a token. The model's embedding may be padded beyond it."""
        return len(self._bytes)

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: those that skip_special_tokens leaves out."""
        return self._special_ids

    @property
    def strips_first_space(self) -> bool:
        """Whether a sequence that begins with a space loses it when decoded (SentencePiece with a space prefix)."""
        return self._codec.strips_first_space

    @cached_property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @cached_property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end token; `end_token_ids` has all that end an answer."""
        return self._named_id("eos_token")

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry, by its exact spelling in the vocabulary."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, perhaps a part of a character; b"" for ids without a token."""
        if not 0 <= token_id < len(self._bytes):
            return b""
        known = self._bytes[token_id]
        if known is None:
            token = self._backend.id_to_token(token_id)
            known = b"" if token is None else self._codec.to_bytes(token)
            self._bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """One token as text; U+FFFD stands for bytes that are no whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    # ------------------------------------------------------------------------------------------------------ encoding

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Token ids of a text.

        add_special_tokens: the tokenizer's own frame, usually one BOS token. allow_special: whether the spelling of a
        control token in the text becomes that token; else it stays text.
        """
        if allow_special or not self.has_special_spelling(text):
            return self._encode(self._backend, text, add_special_tokens)
        return self._encode(self._guarded.backend, text, add_special_tokens)

    def encode_guarded(self, text: str, guarded: Mapping[str, str]) -> list[int]:
        """encode() without a frame, of a text in which some control-token spellings are only text.

        guarded: placeholder -> the spelling it stands for, which must stay text. All others are control tokens.
        """
        guard = self._guarded
        for spelling, replacement in guard.spellings.items():
            text = text.replace(spelling, replacement)
        for placeholder, spelling in guarded.items():
            text = text.replace(placeholder, spelling)
        return self._encode(guard.backend, text, False)

    def has_special_spelling(self, text: str) -> bool:
        return any(spelling in text for spelling in self.special_spellings)

    @cached_property
    def special_spellings(self) -> tuple[str, ...]:
        """Spellings of the control tokens, longest first."""
        spellings = {self._added[id_].content for id_ in self._special_ids}
        return tuple(sorted(spellings, key=lambda spelling: (-len(spelling), spelling)))

    def min_num_tokens(self, text: str) -> int:
        """A number of tokens that the encoding of the text does not go below; costs next to nothing.

        It lets a server refuse a text of megabytes without encoding it.
        """
        if self._can_fuse:
            return 0
        num_chars = sum(map(len, text.split())) if self._absorbs_space else len(text)
        return num_chars // self._max_token_chars

    def _encode(self, backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
        try:
            ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise _unencodable() from error
        return ids

    @cached_property
    def _can_fuse(self) -> bool:
        """Whether a run of unknown characters becomes a single token, however long it is."""
        model = self._backend.model
        return bool(getattr(model, "fuse_unk", False)) and not getattr(model, "byte_fallback", False)

    @cached_property
    def _absorbs_space(self) -> bool:
        return any(token.lstrip or token.rstrip for token in self._added.values())

    @cached_property
    def _max_token_chars(self) -> int:
        longest = max((len(token) for token in self._backend.get_vocab(with_added_tokens=True)), default=1)
        folds = self._backend.normalizer is not None and not self.strips_first_space
        return max(1, longest * (_NORMALIZER_SHRINK if folds else 1))

    @cached_property
    def _guarded(self) -> "_GuardedBackend":
        return _GuardedBackend(self._backend, self.special_spellings)

    # ------------------------------------------------------------------------------------------------------ decoding

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a sequence that begins with token_ids; U+FFFD for what is not valid UTF-8."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(id_) for id_ in token_ids if id_ not in skipped])
        if self._codec.strips_first_space and data[:1] == b" ":
            data = data[1:]
        return data.decode("utf-8", "replace")

    def _named_id(self, name: str) -> int | None:
        spelling = self.special_tokens.get(name)
        return None if spelling is None else self.token_to_id(spelling)


class _GuardedBackend:
    """The same tokenizer, except that control tokens answer to spellings that nobody can guess.

    Built through the definition's JSON, so that every rule around the tokens stays what it is. spellings: the usual
    one -> the guarded one.
    """

    def __init__(self, backend: Backend, special_spellings: Iterable[str]) -> None:
        nonce = secrets.token_hex(8)
        self.spellings = {s: f"\ue000{nonce}.{index}\ue001" for index, s in enumerate(special_spellings)}
        definition = json.loads(backend.to_str())
        model = definition["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {self._guard(token): id_ for token, id_ in model["vocab"].items()}
        else:
            model["vocab"] = [[self._guard(token), score] for token, score in model["vocab"]]
        if model.get("unk_token") is not None:
            model["unk_token"] = self._guard(model["unk_token"])
        for token in definition["added_tokens"]:
            token["content"] = self._guard(token["content"])
        self.backend = Backend.from_str(json.dumps(definition))
        moved = [
            s for s, guarded in self.spellings.items() if self.backend.token_to_id(guarded) != backend.token_to_id(s)
        ]
        if moved:
            raise ModelLoadError(f"the tokenizer's control tokens change their ids when it is rebuilt: {moved[:5]}")

    def _guard(self, token: str) -> str:
        return self.spellings.get(token, token)


def _unencodable() -> InvalidRequest:
    return InvalidRequest("the text is not valid Unicode: it holds an unpaired surrogate")
