"""Random operations against a naive account (see model.py)."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.paging.model import CheckedCache

NUM_OPERATIONS = 100_000
NUM_CACHES = 40


def _random_operation(cache: CheckedCache, rng: random.Random) -> None:
    choice = rng.random()
    rows = list(cache.rows)
    if choice < 0.002:
        cache.reset()
    elif cache.free_rows and (choice < 0.3 or not rows):
        # A small alphabet and prefixes of one period: many prompts begin alike.
        prompt = [rng.choice([0, 0, 0, 1]) for _ in range(rng.randrange(1, 6 * cache.block_size))]
        cache.admit(cache.free_rows[0], prompt, rng.choice(["", "", "salt"]), rng.randrange(1, len(prompt) + 1))
    elif choice < 0.6:
        if not cache.extend(rng.choice(rows), rng.randrange(1, 2 * cache.block_size)):
            cache.release(rows[-1])
    elif choice < 0.85:
        cache.commit(rng.choice(rows))
    else:
        cache.release(rng.choice(rows))


@pytest.mark.parametrize("part", range(4))
def test_a_hundred_thousand_operations_leak_nothing(part: int) -> None:
    """Catches a leaked or doubly owned block, a miscounted reference, a hash that outlives its block's content, and a
    write into a block that someone else reads. Target M5."""
    hits = 0
    for number in range(part, NUM_CACHES, 4):
        rng = random.Random(number)
        cache = CheckedCache(
            num_blocks=rng.randrange(4, 40),
            block_size=rng.choice([1, 2, 3, 4, 8]),
            max_requests=rng.randrange(1, 7),
            enable_prefix_cache=rng.random() < 0.9,
        )
        while cache.num_operations < NUM_OPERATIONS // NUM_CACHES:
            _random_operation(cache, rng)
        for row in list(cache.rows):
            cache.release(row)
        assert cache.manager.usage().used == 0
        hits += cache.num_hits
    assert hits > 300, "the operations were too tame to tell anything about sharing"


class CacheMachine(RuleBasedStateMachine):
    """The same operations, chosen by hypothesis: it shrinks a failure to the few that matter."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 4), max_requests=st.integers(1, 4))
    def start(self, num_blocks: int, block_size: int, max_requests: int) -> None:
        self.cache = CheckedCache(num_blocks=num_blocks, block_size=block_size, max_requests=max_requests)

    @precondition(lambda self: self.cache.free_rows)
    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=16),
        salt=st.sampled_from(["", "salt"]),
        num_new=st.integers(1, 16),
    )
    def admit(self, prompt: list[int], salt: str, num_new: int) -> None:
        self.cache.admit(self.cache.free_rows[0], prompt, salt, num_new)

    @precondition(lambda self: self.cache.rows)
    @rule(data=st.data(), num_new=st.integers(1, 8))
    def extend(self, data: st.DataObject, num_new: int) -> None:
        self.cache.extend(data.draw(st.sampled_from(sorted(self.cache.rows))), num_new)

    @precondition(lambda self: self.cache.rows)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.cache.commit(data.draw(st.sampled_from(sorted(self.cache.rows))))

    @precondition(lambda self: self.cache.rows)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.cache.release(data.draw(st.sampled_from(sorted(self.cache.rows))))

    @rule()
    def reset(self) -> None:
        self.cache.reset()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for row in list(self.cache.rows):
                self.cache.release(row)
            assert self.cache.manager.usage().used == 0


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.__doc__ = """Catches what the random driver catches, with a minimal example."""
TestCacheMachine.settings = settings(max_examples=80, stateful_step_count=40)
