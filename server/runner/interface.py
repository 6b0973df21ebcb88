"""What the engine core needs of a runner. The real one computes with a model; tests use a scripted one."""

from typing import Protocol

from server.scheduler.batch import SampledTokens, ScheduledBatch


class Runner(Protocol):
    """Launch and collect are separate so that the loop may overlap step N + 1's scheduling with step N's computing."""

    def launch(self, batch: ScheduledBatch) -> object:
        """Starts the step and returns a handle. Applies batch.released_rows, then batch.admitted."""

    def collect(self, handle: object) -> SampledTokens:
        """Waits for the step's sampled tokens."""
