"""The free blocks, in the order in which they will be taken.

An intrusive doubly-linked list: `_next[b]` and `_prev[b]` are the neighbours of block b. The null block's two entries
are the list's ends, so no operation has a special case for an empty list.

    head                                tail
    [9] -> [4] -> [7] -> [2] -> [5] -> [3]        take() from the head, append() at the tail, remove() anywhere
    nothing worth keeping | oldest ... newest cached content

Two lists of ints rather than a record a block: runs of blocks are taken and put back in one pass, and the
garbage collector has two objects to look at instead of a hundred thousand.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from paging.errors import InvariantViolation, OutOfBlocks

NULL_BLOCK = 0
"""Target of padding. Never free, never allocated."""

_ABSENT = -1


class FreeQueue:
    """Every operation is O(1) a block. Written by: BlockPool only."""

    def __init__(self, num_blocks: int) -> None:
        """Blocks 1 .. num_blocks, all free, to be taken in that order."""
        ids = list(range(num_blocks + 1))  # both lists point to the same int objects: half the memory to walk through
        self._next = [*ids[1:], NULL_BLOCK]
        self._prev = [num_blocks, *ids[:-1]]
        self._len = num_blocks

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        """From the next one to be taken to the last. O(n): for checks, not for a step."""
        return _walk(self._next)

    def take(self, count: int) -> list[int]:
        """The first `count` blocks, off the queue. Raises OutOfBlocks, with nothing taken."""
        if count > self._len:
            raise OutOfBlocks(f"{count} blocks wanted, {self._len} free")
        following = self._next
        taken = []
        block = following[NULL_BLOCK]
        for _ in range(count):
            taken.append(block)
            after = following[block]
            following[block] = _ABSENT
            block = after
        following[NULL_BLOCK] = block
        self._prev[block] = NULL_BLOCK
        self._len -= count
        return taken

    def append(self, blocks: Sequence[int]) -> None:
        """To the tail, to be taken after all others and in the order given."""
        following, preceding = self._next, self._prev
        last = preceding[NULL_BLOCK]
        for block in blocks:
            following[last] = block
            preceding[block] = last
            last = block
        following[last] = NULL_BLOCK
        preceding[NULL_BLOCK] = last
        self._len += len(blocks)

    def prepend(self, blocks: Sequence[int]) -> None:
        """To the head, to be taken before all others and in the order given."""
        following, preceding = self._next, self._prev
        last = NULL_BLOCK
        first = following[NULL_BLOCK]
        for block in blocks:
            following[last] = block
            preceding[block] = last
            last = block
        following[last] = first
        preceding[first] = last
        self._len += len(blocks)

    def remove(self, block: int) -> None:
        """From wherever it is."""
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self._next[block] = _ABSENT
        self._len -= 1

    def check_invariants(self) -> None:
        """Raises InvariantViolation where the links, walked from either end, don't lead through all free blocks."""
        limit = self._len + 1  # broken links may run in a circle
        forward, backward = list(islice(self, limit)), list(islice(_walk(self._prev), limit))
        if forward != backward[::-1]:
            raise InvariantViolation("the free queue reads differently from its two ends")
        num_absent = self._next.count(_ABSENT)
        if len(forward) != self._len or len(forward) + num_absent + 1 != len(self._next):
            raise InvariantViolation(
                f"free queue: {len(forward)} blocks linked, {self._len} counted, {num_absent} absent"
            )


def _walk(links: list[int]) -> Iterator[int]:
    block = links[NULL_BLOCK]
    while block != NULL_BLOCK:
        yield block
        block = links[block]
