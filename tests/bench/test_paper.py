"""The simulations are exact and clockless, so that what they show can be held."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.paper import claims, simulation
from benchmarks.paper.reservation import BuddyArena


@pytest.mark.parametrize("number", range(len(claims.CLAIMS)))
def test_claims_hold(number):
    """A change of the scheduler or the pool that costs memory, throughput or cache hits and breaks nothing else."""
    verdict = claims.CLAIMS[number]()
    assert verdict.holds, verdict


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 2000), st.randoms(use_true_random=False))
def test_the_baseline_arena_is_a_fair_one(sizes, num_slots, source):
    """A baseline that leaks or overlaps memory makes us look good."""
    arena = BuddyArena(num_slots)
    held: dict[int, int] = {}
    for size in sizes:
        offset = arena.allocate(size)
        if offset is not None:
            assert offset + size <= num_slots
            assert all(offset + size <= other or other + held[other] <= offset for other in held)
            held[offset] = size
        if held and source.random() < 0.5:
            gone = source.choice(sorted(held))
            arena.release(gone)
            del held[gone]
        assert arena.num_allocated == sum(held.values())
    for offset in list(held):
        arena.release(offset)
    assert arena.allocate(1 << (num_slots.bit_length() - 1)) is not None


def test_time_is_the_cost_models():
    """Throughput ratios that come from the machine instead of the model."""
    job = simulation.Job("a", [1, 2, 3], 5)
    trace = simulation.run([job], num_blocks=4, cost=simulation.CostModel(fixed=1.0, per_token=0.1))
    assert trace.duration == pytest.approx(5 * 1.0 + 0.1 * (3 + 4))
    assert trace.outputs["a"] == [simulation.token_at("a", position) for position in range(3, 8)]
    assert trace.final_blocks_used == 0


def test_workloads_repeat():
    """Two runs of a benchmark that differ for no reason."""
    first, second = (simulation.chat_jobs(50, mean_input=161, mean_output=338, seed=0) for _ in range(2))
    assert first == second
    lengths = [job.num_output for job in simulation.chat_jobs(4000, mean_input=161, mean_output=338, seed=1)]
    assert 280 < sum(lengths) / len(lengths) < 380
