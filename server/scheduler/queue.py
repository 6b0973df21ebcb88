"""Requests in the order in which they are served, whatever the policy."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from server.scheduler.request import Request

_by_order = attrgetter("order")


class RequestQueue:
    """A list sorted by Request.order. Written by: Scheduler only.

    First come, first served, turns between clients and priorities are only in what `order` holds. A preempted request
    comes back to the place it had, which under "fcfs" is before all that never ran. Adding at the end and taking from
    the front, the usual cases, move a few kilobytes at most.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Requests may be removed from the end while this runs: they are then not visited."""
        return iter(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_by_order)

    def remove(self, request: Request) -> None:
        """Raises ValueError where it is not in the queue."""
        index = bisect_left(self._requests, request.order, key=_by_order)
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"request {request.request_id} is not queued")
        del self._requests[index]
