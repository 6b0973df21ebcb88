"""What is known about one sequence's life, as plain numbers. All times are time.monotonic() seconds."""

from dataclasses import dataclass


@dataclass(slots=True)
class SequenceStats:
    """Written by: the sequence's SequenceObserver. None: it has not come to that yet."""

    arrival_time: float
    num_prompt_tokens: int
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_output_tokens: int = 0

    @property
    def queue_time_s(self) -> float | None:
        return None if self.scheduled_time is None else max(0.0, self.scheduled_time - self.arrival_time)

    @property
    def prefill_time_s(self) -> float | None:
        if self.first_token_time is None or self.scheduled_time is None:
            return None
        return max(0.0, self.first_token_time - self.scheduled_time)

    @property
    def decode_time_s(self) -> float | None:
        if self.first_token_time is None or self.last_token_time is None:
            return None
        return self.last_token_time - self.first_token_time

    @property
    def inference_time_s(self) -> float | None:
        if self.last_token_time is None or self.scheduled_time is None:
            return None
        return max(0.0, self.last_token_time - self.scheduled_time)

    @property
    def time_per_output_token_s(self) -> float | None:
        """Of the tokens after the first; None where there are none."""
        decode = self.decode_time_s
        return None if decode is None or self.num_output_tokens < 2 else decode / (self.num_output_tokens - 1)
