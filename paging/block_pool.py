"""Who holds which block. Reference counts live here and nowhere else."""

from collections import Counter
from collections.abc import Iterable, Sequence

from paging.errors import InvariantViolation
from paging.free_queue import NULL_BLOCK, FreeQueue
from paging.hashing import BlockHash
from paging.prefix_index import PrefixIndex


class BlockPool:
    """All blocks but the null block. Written by: KVCacheManager only.

    A block's life:

        free, anonymous --allocate--> held, anonymous --name--> held, named
              ^                             |                       |  ^
              +-----------release-----------+               release |  | acquire (a prefix hit)
              |                                                     v  |
              +-----------------allocate (evicts)------------ free, named

    "Named" is: its content is in the prefix index. A free block without a name has nothing worth keeping and is taken
    first; free blocks with a name follow, least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        """num_blocks: usable ones, ids 1 .. num_blocks."""
        self.num_blocks = num_blocks
        self.num_cached = 0
        """Blocks that are free and named."""
        self._references = [0] * (num_blocks + 1)
        self._free = FreeQueue(num_blocks)
        self._index = PrefixIndex(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that allocate() can hand out, the cached ones included."""
        return len(self._free)

    def num_references(self, block: int) -> int:
        return self._references[block]

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Blocks that hold the first hashes' content. They may be free: acquire() them before anything is allocated."""
        return self._index.longest_prefix(hashes)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, each with one reference; what they held before is forgotten.

        Raises OutOfBlocks, with nothing taken, where fewer are free.
        """
        blocks = self._free.take(count)
        references = self._references
        for block in blocks:
            references[block] = 1
        if self.num_cached:
            self.num_cached -= self._index.forget(blocks)
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each; a free one comes off the free queue with its content intact."""
        for block in blocks:
            if self._references[block] == 0:
                self._free.remove(block)
                if self._index.hash_of(block) is not None:
                    self.num_cached -= 1
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops a reference to each block of a sequence, given in sequence order.

        Named ones are queued from the last to the first, so that a chain is evicted from its end: without its first
        blocks the rest of it could not be found.
        """
        references = self._references
        hash_of = self._index.hash_of
        anonymous: list[int] = []
        named: list[int] = []
        for block in reversed(blocks):
            left = references[block] - 1
            references[block] = left
            if left == 0:
                (anonymous if hash_of(block) is None else named).append(block)
        self._free.prepend(anonymous[::-1])
        self._free.append(named)
        self.num_cached += len(named)

    def name(self, block: int, block_hash: BlockHash) -> None:
        """Makes a held, full block findable by its content. Where the content is known already, nothing happens."""
        self._index.add(block, block_hash)

    def forget_all(self) -> None:
        """Empties the prefix index. Who holds a block keeps it."""
        self._index.clear()
        self.num_cached = 0

    def check_invariants(self, held: Counter[int]) -> None:
        """held: how often each block stands in a row. Raises InvariantViolation.

        O(blocks), but mostly in C: it runs whenever the engine falls idle, and a hundred thousand blocks are not rare.
        """
        if NULL_BLOCK in held or self._references[NULL_BLOCK]:
            raise InvariantViolation("the null block is held")
        expected = [0] * (self.num_blocks + 1)
        for block, count in held.items():
            expected[block] = count
        if self._references != expected:
            wrong = {b: (r, held[b]) for b, r in enumerate(self._references) if r != held[b]}
            raise InvariantViolation(f"blocks whose references differ from the rows they are in: {wrong}")
        self._free.check_invariants()
        free = list(self._free)
        if len(free) != self.num_blocks - len(held) or any(map(held.__contains__, free)):
            raise InvariantViolation(f"{len(free)} blocks are free and {len(held)} held, of {self.num_blocks}")
        self._index.check_invariants()
        num_cached = sum(name is not None for name in map(self._index.hash_of, free))
        if num_cached != self.num_cached:
            raise InvariantViolation(f"{num_cached} free blocks are named, counted {self.num_cached}")
