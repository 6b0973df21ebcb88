"""Every request that has not ended yet, and who may wait for a place."""

import time
from collections import Counter
from collections.abc import Callable, Iterator

from server.errors import Overloaded
from server.frontend.open_request import OpenRequest
from server.frontend.service_rate import ServiceRate
from server.protocol import FinishReason, GenerateRequest


class OpenRequests:
    """In order of arrival. Written by: SupervisedEngine only.

    max_waiting: how many may be open that no step has seen yet. abort: tells the engine, if there is one.
    """

    def __init__(self, *, max_waiting: int, abort: Callable[[str], None]) -> None:
        self._requests: dict[str, OpenRequest] = {}
        self._max_waiting = max_waiting
        self._abort = abort
        self._rate = ServiceRate()

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(self._requests.values())

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: str) -> OpenRequest | None:
        return self._requests.get(request_id)

    @property
    def num_unfinished(self) -> int:
        return sum(not r.finished for r in self)

    def add(self, request: GenerateRequest) -> OpenRequest:
        """Raises Overloaded where the queue is full, unless somebody else takes more of it than their share."""
        waiting = [r for r in self if not r.started and not r.finished]
        if len(waiting) >= self._max_waiting:
            self._make_way(request.client, waiting)
        added = self._requests[request.request_id] = OpenRequest(request)
        return added

    def _make_way(self, client: str, waiting: list[OpenRequest]) -> None:
        """Takes the newest place of the client that has the most. Raises Overloaded where that is this very client."""
        refusal = Overloaded(
            f"{len(waiting)} requests are waiting and the queue holds {self._max_waiting}; try again later",
            retry_after=self._rate.seconds_for(len(waiting)),
        )
        places = Counter(r.request.client for r in waiting)
        greedy, most = places.most_common(1)[0]
        if most <= places[client] + 1:
            raise refusal
        loser = next(r for r in reversed(waiting) if r.request.client == greedy)
        loser.refusal = refusal
        self._abort(loser.request.request_id)
        loser.end(FinishReason.ABORT)

    def forget(self, open_request: OpenRequest) -> None:
        """Its reader has read the end, or has gone: then the engine is told."""
        request_id = open_request.request.request_id
        if self._requests.get(request_id) is not open_request:
            return
        del self._requests[request_id]
        if not open_request.finished:
            self._abort(request_id)
        elif open_request.refusal is None:
            self._rate.count_finished()

    def mark_started(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if open_request := self._requests.get(request_id):
                open_request.started = True

    def expire(self, *, grace_s: float) -> None:
        """Ends those whose deadline is past by more than that."""
        now = time.monotonic() - grace_s
        for open_request in self:
            deadline = open_request.request.deadline
            if deadline is not None and deadline < now and not open_request.finished:
                self._abort(open_request.request.request_id)
                open_request.end(FinishReason.TIMEOUT)

    def end_all(self, reason: FinishReason, message: str) -> None:
        for open_request in self:
            open_request.end(reason, message)
