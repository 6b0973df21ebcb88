"""Encoding of OpenAI's stream events. The head of a chunk is the same for a whole answer, so it is encoded once."""

from typing import Any

import msgspec

from server.api.errors import as_serving_error, error_object

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def frame(payload: Any) -> bytes:
    return b"data: " + _encode(payload) + b"\n\n"


def typed_frame(event: dict[str, Any]) -> bytes:
    """For clients that read the event's type from a line of its own."""
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\n" + frame(event)


def error_frame(error: Exception) -> bytes:
    return frame({"error": error_object(as_serving_error(error))})


class ChunkEncoder:
    """Chunks of one answer.

    head: the fields before `choices`. text_path: where a plain piece's text goes, ("text",) or ("delta", "content").
    """

    def __init__(self, head: dict[str, Any], *, text_path: tuple[str, ...], with_usage: bool) -> None:
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._no_usage = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
        self._before_text = "".join(
            f',"{name}":' if i == 0 else f'{{"{name}":' for i, name in enumerate(text_path)
        ).encode()
        self._after_text = b"}" * (len(text_path) - 1) + b',"logprobs":null,"finish_reason":null}'
        self._text_heads: dict[int, bytes] = {}

    def text(self, index: int, text: str) -> bytes:
        """The plain case, which is nearly every chunk of nearly every stream."""
        head = self._text_heads.get(index)
        if head is None:
            head = self._text_heads[index] = self._head + b'{"index":%d' % index + self._before_text
        return head + _encode(text) + self._after_text + self._no_usage

    def choice(self, choice: dict[str, Any], *, usage: dict[str, Any] | None = None, **fields: Any) -> bytes:
        """Any choice. fields: further ones of the chunk."""
        return self._close(self._head + _encode(choice), usage, fields)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last chunk: no choices."""
        return self._close(self._head, usage, {})

    def _close(self, start: bytes, usage: dict[str, Any] | None, fields: dict[str, Any]) -> bytes:
        if not fields:
            return start + (self._no_usage if usage is None else b'],"usage":' + _encode(usage) + b"}\n\n")
        ending = self._no_usage[1:-3] if usage is None else b',"usage":' + _encode(usage)
        return start + b"]" + ending + b"," + _encode(fields)[1:] + b"\n\n"
