"""Clients take turns in the queue."""

from hypothesis import given, settings
from hypothesis import strategies as st

from server.scheduler.turns import Turns
from tests.scheduler.simulation import Simulation, request


def served(simulation: Simulation) -> list[str]:
    order = []
    while simulation.scheduler.has_work:
        order += [row.request_id for row in simulation.step().admitted]
    return order


def test_a_client_with_many_requests_does_not_starve_one_with_few() -> None:
    """Regression: a single request that waits behind the hundred of somebody else."""
    simulation = Simulation(max_num_seqs=2)
    simulation.add(*(request(f"hog{i}", [i, i], max_tokens=4, client="hog") for i in range(40)))
    simulation.step()
    simulation.add(*(request(f"few{i}", [i, 9], max_tokens=4, client="few") for i in range(3)))
    order = ["hog0", "hog1", *served(simulation)]
    assert [order.index(f"few{i}") for i in range(3)] <= [4, 6, 8]
    assert [name for name in order if name.startswith("hog")] == [f"hog{i}" for i in range(40)]


def test_new_clients_without_end_do_not_starve_an_old_request() -> None:
    """Regression: a turn that stays in the future because everyone who arrives is served before it."""
    turns = Turns()
    mine = [turns.take("old") for _ in range(3)][-1]
    for number in range(100):
        turn = turns.take(f"new{number}")
        if turn > mine:
            break
        turns.serve(turn)
        turns.leave(f"new{number}")
    else:
        raise AssertionError("a hundred newcomers went first")
    assert number <= 6


@given(st.lists(st.sampled_from("abc"), max_size=60))
@settings(max_examples=50, deadline=None)
def test_one_client_alone_is_first_come_first_served(others: list[str]) -> None:
    """Regression: turns that reorder a client's own requests, or go back in time."""
    turns = Turns()
    last: dict[str, float] = {}
    for client in others:
        turn = turns.take(client)
        assert turn > last.get(client, -1.0)
        last[client] = turn
        if turn == min(last.values()):
            turns.serve(turn)


def test_a_client_that_is_gone_leaves_nothing() -> None:
    """Regression: an entry for every address that ever asked."""
    turns = Turns()
    for number in range(10):
        turns.take(f"c{number}")
        turns.leave(f"c{number}")
    assert turns._clients == {}
