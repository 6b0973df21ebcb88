"""Whose turn it is when several clients wait: a client with a hundred requests does not make one with one wait."""

from dataclasses import dataclass


@dataclass(slots=True)
class _Client:
    num_open: int = 0
    next_turn: float = 0.0


class Turns:
    """Fair queueing in virtual time, a request counting one whatever its length. Written by: Scheduler.

    A client's requests get turns one apart, so that those of different clients interleave; a client that comes later
    begins at the present turn. The present moves with every request served, by the more the fewer clients are there,
    so that a stream of new clients can't keep an old request waiting either. With one client this is first come, first
    served. (Start-time fair queueing: Goyal, Vin, Cheng 1996.)
    """

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        self._present = 0.0

    def take(self, client: str) -> float:
        """The turn of the client's new request. Each take() is followed by one leave()."""
        entry = self._clients.setdefault(client, _Client())
        entry.num_open += 1
        turn = max(self._present, entry.next_turn)
        entry.next_turn = turn + 1.0
        return turn

    def serve(self, turn: float) -> None:
        """A request of this turn has been admitted."""
        self._present = max(self._present, turn) + 1.0 / max(1, len(self._clients))

    def leave(self, client: str) -> None:
        """A request has ended. A client without any is forgotten."""
        entry = self._clients[client]
        entry.num_open -= 1
        if entry.num_open == 0:
            del self._clients[client]
