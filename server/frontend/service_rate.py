"""How quickly requests are being finished, to tell refused clients when to come back."""

import time
from collections import deque

_WINDOW = 64
_MEMORY_S = 60.0
"""Older ends say nothing about the load of now: the server may have been idle since."""
_MIN_S, _MAX_S, _UNKNOWN_S = 1.0, 120.0, 5.0


class ServiceRate:
    """Written by: SupervisedEngine."""

    def __init__(self) -> None:
        self._finished: deque[float] = deque(maxlen=_WINDOW)

    def count_finished(self) -> None:
        self._finished.append(time.monotonic())

    def seconds_for(self, num_requests: int) -> float:
        """Estimate of the time to finish so many, from the last ones' pace; between 1 s and 2 minutes."""
        now = time.monotonic()
        while self._finished and now - self._finished[0] > _MEMORY_S:
            self._finished.popleft()
        if len(self._finished) < 2:
            return _UNKNOWN_S
        pace = (now - self._finished[0]) / len(self._finished)
        return min(_MAX_S, max(_MIN_S, num_requests * pace))
