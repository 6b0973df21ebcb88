"""The only door to the KV cache's blocks. It decides with ints and never touches a tensor."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paging.block_pool import BlockPool
from paging.errors import InvariantViolation
from paging.hashing import BlockHash
from paging.page_table import PageTable


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Blocks that hold num_tokens tokens."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Blocks found in the prefix cache. Holds no reference: good until the next admit, extend or release.

    num_revived: how many of them are free now, so that admitting takes them out of the free ones.
    """

    block_ids: tuple[int, ...] = ()
    num_revived: int = 0


NO_MATCH = PrefixMatch()


@dataclass(frozen=True, slots=True)
class BlockUsage:
    """used + cached + free = all usable blocks. cached: free to take, but their content can still be hit."""

    used: int
    cached: int
    free: int


class KVCacheManager:
    """Blocks for running requests, each of which is a row. Written by: itself; called by the Scheduler only.

        match --> admit --> extend, commit, extend, ... --> release

    A row's tokens 0 .. n - 1 have a place after admit(row, _, n) or extend(row, n) returned True. commit() tells that
    the first blocks' keys and values are computed and will not change: from then on others may share them.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_requests: int,
        max_blocks_per_request: int,
        enable_prefix_cache: bool = True,
    ) -> None:
        """num_blocks: usable ones, ids 1 .. num_blocks; 0 is the null block, so the tensors hold num_blocks + 1."""
        if min(num_blocks, block_size, max_requests, max_blocks_per_request) < 1:
            raise ValueError("a KV cache needs at least one block, one token a block, one row and one block a row")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_requests = max_requests
        self.max_blocks_per_request = max_blocks_per_request
        self.enable_prefix_cache = enable_prefix_cache
        self._pool = BlockPool(num_blocks)
        self.page_table = PageTable(max_requests=max_requests, max_blocks_per_request=max_blocks_per_request)
        self._capacity = [0] * max_requests  # tokens that have a place
        self._num_committed = [0] * max_requests  # blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken, cached ones included."""
        return self._pool.num_free

    def blocks_of(self, row: int) -> list[int]:
        """The row's blocks, in sequence order. The caller must not change it."""
        return self.page_table.row(row)

    def match(self, hashes: Sequence[BlockHash]) -> PrefixMatch:
        """The longest run of leading blocks that are cached. hashes: of a request's leading full blocks."""
        if not self.enable_prefix_cache:
            return NO_MATCH
        blocks = self._pool.longest_prefix(hashes)
        if not blocks:
            return NO_MATCH
        revived = sum(self._pool.num_references(block) == 0 for block in blocks)
        return PrefixMatch(block_ids=tuple(blocks), num_revived=revived)

    def admit(self, row: int, match: PrefixMatch, num_tokens: int) -> bool:
        """Fills an empty row with the match's blocks and new ones, so that num_tokens tokens have a place.

        Where too few blocks are free: returns False, and nothing has changed.
        """
        num_new = blocks_needed(num_tokens, self.block_size) - len(match.block_ids)
        if max(num_new, 0) + match.num_revived > self._pool.num_free:
            return False
        self._pool.acquire(match.block_ids)
        self.page_table.append(row, match.block_ids)
        self._capacity[row] = len(match.block_ids) * self.block_size
        self._num_committed[row] = len(match.block_ids)
        return self.extend(row, num_tokens)

    def extend(self, row: int, num_tokens: int) -> bool:
        """Makes sure that the row's first num_tokens tokens have a place. False, and no change, where blocks lack."""
        missing = num_tokens - self._capacity[row]
        if missing <= 0:
            return True
        count = blocks_needed(missing, self.block_size)
        if count > self._pool.num_free:
            return False
        self.page_table.append(row, self._pool.allocate(count))
        self._capacity[row] += count * self.block_size
        return True

    def commit(self, row: int, hashes: Sequence[BlockHash]) -> None:
        """Makes the row's first len(hashes) blocks findable: they are computed, others may read them."""
        if not self.enable_prefix_cache:
            return
        blocks = self.page_table.row(row)
        for position in range(self._num_committed[row], len(hashes)):
            self._pool.name(blocks[position], hashes[position])
        self._num_committed[row] = len(hashes)

    def release(self, row: int) -> None:
        """Empties the row. What was committed stays findable until its blocks are needed."""
        self._pool.release(self.page_table.clear(row))
        self._capacity[row] = 0
        self._num_committed[row] = 0

    def reset_prefix_cache(self) -> None:
        """Forgets all cached content. Rows keep their blocks, and what they commit later can be found again."""
        self._pool.forget_all()

    def usage(self) -> BlockUsage:
        cached = self._pool.num_cached
        free = self._pool.num_free
        return BlockUsage(used=self.num_blocks - free, cached=cached, free=free - cached)

    def check_invariants(self) -> None:
        """Raises InvariantViolation. O(blocks + page table): when idle, and in tests."""
        self.page_table.check_invariants()
        held: Counter[int] = Counter()
        for row in range(self.max_requests):
            blocks = self.page_table.row(row)
            held.update(blocks)
            if self._capacity[row] != len(blocks) * self.block_size:
                raise InvariantViolation(f"row {row}: capacity {self._capacity[row]} with {len(blocks)} blocks")
            if not 0 <= self._num_committed[row] <= len(blocks):
                raise InvariantViolation(f"row {row}: {self._num_committed[row]} of {len(blocks)} blocks committed")
        self._pool.check_invariants(held)
