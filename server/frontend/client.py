"""The engine as the API sees it, whatever process it lives in."""

from collections.abc import AsyncIterator
from typing import Any, Protocol

from server.protocol import EngineStats, GenerateRequest, Loading, OutputDelta, Ready


class EngineState(Protocol):
    """What probes and metrics read; no await, no engine round trip."""

    phase: str
    """"starting", "loading weights", ..., "ready", "stalled", "restarting", "draining", "stopped", "failed"."""
    loading: Loading | None
    """How far a start has come; None while none is under way, or says nothing yet."""
    ready: Ready | None
    """The newest Ready; stays set over a restart."""
    stats: EngineStats
    """Gauges of the newest step."""
    last_step_time: float | None
    """time.monotonic() of the newest StepOutput."""
    num_restarts: int
    num_resumed: int

    @property
    def num_waiting(self) -> int:
        """Requests that are open and not running, wherever they wait."""


class EngineClient(Protocol):
    """Owns the engine's life and every open request. All methods run on one event loop."""

    @property
    def state(self) -> EngineState: ...

    async def start(self) -> None:
        """Starts the engine; returns at once. wait_ready() tells when it can serve."""

    async def wait_ready(self) -> Ready:
        """Raises StartupError where the engine can't start."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[OutputDelta]:
        """Deltas until one carries a finish_reason. Deltas that nobody has read yet are merged into one.

        Closing the iterator early (aclose, cancellation) aborts the request. Raises Overloaded when the queue is full,
        EngineRestarting before the first Ready and while draining. Ends with finish_reason ERROR (delta.error says
        why), TIMEOUT (deadline passed) or ABORT where it can't be completed.
        """

    def abort(self, request_ids: list[str]) -> None: ...

    async def inspect(self) -> dict[str, Any]:
        """Page map and requests for /debug."""

    async def reset_prefix_cache(self) -> None: ...

    async def drain(self, timeout_s: float) -> None:
        """Stop admitting, wait for open requests up to the limit, abort what is left."""

    async def stop(self) -> None:
        """End the engine. Nothing of it is left behind."""
