"""The order in which blocks are taken."""

import random

import pytest

from paging import OutOfBlocks
from paging.free_queue import FreeQueue


def test_take_append_and_prepend_keep_the_order() -> None:
    """Catches a queue that is not first in, first out, or that turns a run of blocks round."""
    queue = FreeQueue(5)
    assert queue.take(5) == [1, 2, 3, 4, 5]
    queue.append([3, 1])
    queue.append([4])
    queue.prepend([5, 2])
    assert list(queue) == [5, 2, 3, 1, 4]
    assert queue.take(3) == [5, 2, 3]
    assert len(queue) == 2


def test_taking_too_many_takes_none() -> None:
    """Catches a partial allocation that nobody gives back."""
    queue = FreeQueue(3)
    with pytest.raises(OutOfBlocks, match="4 blocks wanted, 3 free"):
        queue.take(4)
    assert queue.take(3) == [1, 2, 3]
    queue.prepend([])
    queue.append([])
    assert list(queue) == []


def test_random_operations_match_a_list() -> None:
    """Catches broken links: the ends of the list, and blocks removed from its middle."""
    rng = random.Random(0)
    queue, model, out = FreeQueue(12), list(range(1, 13)), []
    for _ in range(5000):
        choice = rng.random()
        if choice < 0.3:
            count = rng.randrange(len(model) + 1)
            assert queue.take(count) == model[:count]
            out += model[:count]
            del model[:count]
        elif choice < 0.6 and model:
            block = rng.choice(model)
            queue.remove(block)
            model.remove(block)
            out.append(block)
        elif out:
            rng.shuffle(out)
            blocks = [out.pop() for _ in range(rng.randrange(len(out) + 1))]
            if choice < 0.8:
                queue.append(blocks)
                model += blocks
            else:
                queue.prepend(blocks)
                model[:0] = blocks
        assert list(queue) == model
        assert len(queue) == len(model)
        queue.check_invariants()
