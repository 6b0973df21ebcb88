"""What probes and metrics read of the engine: no await, no round trip."""

from dataclasses import dataclass, field

from server.frontend.open_requests import OpenRequests
from server.protocol import EngineStats, Loading, Ready


@dataclass(slots=True)
class EngineStatus:
    """Implements EngineState. Written by: SupervisedEngine."""

    open_requests: OpenRequests
    phase: str = "starting"
    loading: Loading | None = None
    ready: Ready | None = None
    stats: EngineStats = field(default_factory=EngineStats)
    last_step_time: float | None = None
    num_restarts: int = 0
    num_resumed: int = 0

    @property
    def num_waiting(self) -> int:
        """Counted here, where all of them are known: the scheduler sees none whose grammar is still compiled."""
        return max(0, self.open_requests.num_unfinished - self.stats.num_running)
