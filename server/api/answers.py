"""An answer, whole or as a stream of events: what every generating endpoint does with what it generates."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from server.api.errors import json_response
from server.api.service import Service
from server.api.sse import typed_frame
from server.api.transport import EventStream, until_disconnect
from server.frontend.generation import Generation, Usage
from server.frontend.output import Piece

Event = dict[str, Any]


class Answer(Protocol):
    """Either whole() or frames() is called, once."""

    closing: bytes
    """Ends the stream."""

    async def whole(self) -> dict[str, Any]: ...

    def frames(self) -> AsyncGenerator[bytes, None]: ...

    def error_frame(self, error: Exception) -> bytes:
        """Says in a stream that has begun that it failed."""


async def respond(request: Request, answer: Answer, service: Service, *, stream: bool | None) -> Response:
    if stream:
        return EventStream(
            answer.frames(),
            error_frame=answer.error_frame,
            closing=answer.closing,
            keep_alive_s=service.config.stream_keep_alive_s,
        )
    return json_response(await until_disconnect(request.receive, answer.whole()))


class EventBuilder(Protocol):
    """Grows an answer piece by piece and tells it as typed events. Events that nobody iterates over are not made."""

    answer: dict[str, Any]

    def begin(self, usage: Usage) -> Iterator[Event]: ...

    def push(self, piece: Piece, usage: Usage) -> Iterator[Event]: ...

    def fail(self, error: Exception) -> Iterator[Event]: ...


class TypedAnswer:
    """The Answer of APIs whose events have types: OpenAI's responses, Anthropic's messages. Written by: itself."""

    closing = b""

    def __init__(self, generation: Generation, builder: EventBuilder) -> None:
        self._generation = generation
        self._builder = builder

    async def whole(self) -> dict[str, Any]:
        async with aclosing(self._generation.pieces()) as pieces:
            async for piece in pieces:
                for _ in self._builder.push(piece, self._generation.usage):
                    pass
        return self._builder.answer

    async def frames(self) -> AsyncGenerator[bytes, None]:
        usage, begun = self._generation.usage, False
        async with aclosing(self._generation.pieces()) as pieces:
            async for piece in pieces:
                # Each event is encoded before the next is made: the answer in it goes on growing.
                frames = [] if begun else [typed_frame(event) for event in self._builder.begin(usage)]
                begun = True
                frames += [typed_frame(event) for event in self._builder.push(piece, usage)]
                if frames:
                    yield b"".join(frames)

    def error_frame(self, error: Exception) -> bytes:
        return b"".join(map(typed_frame, self._builder.fail(error)))
