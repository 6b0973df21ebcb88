"""One sequence's deltas -> pieces of text: detokenizing, stop strings, finish reasons, token counts."""

from collections.abc import Collection

import msgspec

from server.frontend.tools.deltas import ToolCallDelta
from server.protocol import FinishReason, OutputDelta, TokenLogprobs
from server.tokenizer import IncrementalDetokenizer, StopMatcher


class ScoredToken(msgspec.Struct, frozen=True):
    """A token's log-probabilities, and where its text begins in the sequence's output, in characters."""

    logprobs: TokenLogprobs
    offset: int


class Piece(msgspec.Struct):
    """What one choice gained. The pieces of a choice, concatenated, are its whole answer.

    Written by: OutputProcessor, then the job's parser, before anyone else sees it.
    """

    index: int
    """Which choice: prompt * n + sample."""
    text: str
    token_ids: list[int]
    """Every token read for this piece, also those whose text is still held back, and the one that ended it."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The client's own stop string or stop token id that ended the choice."""
    logprobs: list[ScoredToken] | None = None
    """Of the tokens whose text has come out; the token that ended the choice has no text and no entry."""
    end_logprobs: ScoredToken | None = None
    """Of the token that ended the choice, where its text is hidden."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] | None = None


class OutputProcessor:
    """Written by: itself, through push(). One a choice.

    A stop string ends the choice here, on text; the engine does not know it, so the caller must then abort the request
    (`finished` is True while the delta carried no finish reason).
    """

    def __init__(
        self,
        *,
        index: int,
        detokenizer: IncrementalDetokenizer,
        stop: StopMatcher | None = None,
        min_tokens: int = 0,
        show_stop_token: bool = False,
        client_stop_ids: Collection[int] = (),
        want_logprobs: bool = False,
    ) -> None:
        self._index = index
        self._detokenizer = detokenizer
        self._stop = stop
        self._min_tokens = min_tokens
        self._show_stop_token = show_stop_token
        self._client_stop_ids = frozenset(client_stop_ids)
        self._want_logprobs = want_logprobs
        self._by_token = stop is not None or want_logprobs
        self._pending: list[ScoredToken] = []
        self._num_chars = 0  # that the detokenizer gave
        self._num_emitted = 0  # that were not held back
        self.num_tokens = 0
        """Output tokens up to the end, the one that ended it included."""
        self.num_cached_tokens: int | None = None
        self.finished = False

    def push(self, delta: OutputDelta) -> Piece:
        if delta.num_cached_tokens is not None:
            self.num_cached_tokens = delta.num_cached_tokens
        token_ids = delta.token_ids
        hide_last = delta.stop_token_id is not None and not self._show_stop_token
        shown = token_ids[:-1] if hide_last else token_ids
        if self._by_token:
            return self._push_by_token(delta, shown)
        text = self._detokenizer.push(shown) if shown else ""
        self.num_tokens += len(token_ids)
        piece = Piece(self._index, text, token_ids, prompt_logprobs=delta.prompt_logprobs)
        if delta.finish_reason is not None:
            piece.text += self._detokenizer.flush()
            self._finish(piece, delta)
        return piece

    def _push_by_token(self, delta: OutputDelta, shown: list[int]) -> Piece:
        """Token by token: a stop string must be attributed to the token that completed it, a logprob to its offset."""
        piece = Piece(self._index, "", delta.token_ids, prompt_logprobs=delta.prompt_logprobs)
        logprobs = delta.logprobs if self._want_logprobs and delta.logprobs is not None else None
        for position, token_id in enumerate(shown):
            text = self._detokenizer.push([token_id])
            if logprobs is not None:
                self._pending.append(ScoredToken(logprobs[position], self._num_chars))
            self._num_chars += len(text)
            self.num_tokens += 1
            if self._emit(piece, text, search=self.num_tokens > self._min_tokens):
                piece.token_ids = delta.token_ids[: position + 1]
                break
        if piece.finish_reason is None and delta.finish_reason is not None:
            self.num_tokens += len(delta.token_ids) - len(shown)
            searching = self.num_tokens > self._min_tokens
            if not self._emit(piece, self._detokenizer.flush(), search=searching):
                piece.text += self._stop.flush() if self._stop is not None else ""
                self._finish(piece, delta)
                if logprobs is not None and len(shown) < len(logprobs):
                    piece.end_logprobs = ScoredToken(logprobs[-1], self._num_chars)
        self._release_logprobs(piece)
        return piece

    def _emit(self, piece: Piece, text: str, *, search: bool) -> bool:
        """Appends what may go out. True where a stop string ended the choice."""
        if self._stop is None or not search:
            piece.text += text
            self._num_emitted += len(text)
            return False
        emitted, matched = self._stop.feed(text)
        piece.text += emitted
        self._num_emitted += len(emitted)
        if matched is None:
            return False
        piece.finish_reason = FinishReason.STOP
        piece.stop_reason = matched
        self.finished = True
        return True

    def _finish(self, piece: Piece, delta: OutputDelta) -> None:
        piece.finish_reason = delta.finish_reason
        if delta.stop_token_id in self._client_stop_ids:
            piece.stop_reason = delta.stop_token_id
        self.finished = True

    def _release_logprobs(self, piece: Piece) -> None:
        if not self._want_logprobs:
            return
        if self.finished and not isinstance(piece.stop_reason, str):
            num_ready = len(self._pending)
        else:
            num_ready = next(
                (i for i, t in enumerate(self._pending) if t.offset >= self._num_emitted), len(self._pending)
            )
        piece.logprobs = self._pending[:num_ready]
        self._pending = [] if self.finished else self._pending[num_ready:]
