"""What paged memory's bookkeeping costs: nanoseconds a block. No model, no tensors."""

import random
from collections.abc import Callable, Iterator

from paging import NO_MATCH, BlockHash, KVCacheManager, extend_hashes
from server.bench.ceilings import median_seconds

BLOCK_SIZE = 16
BLOCKS_PER_ROW = 64


def manager_of(num_blocks: int, *, enable_prefix_cache: bool = True) -> KVCacheManager:
    return KVCacheManager(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_requests=num_blocks // BLOCKS_PER_ROW,
        max_blocks_per_request=BLOCKS_PER_ROW,
        enable_prefix_cache=enable_prefix_cache,
    )


def allocate_and_free(num_blocks: int) -> float:
    """Nanoseconds a block: one admitted and released in a pool that is otherwise full."""
    manager = manager_of(num_blocks)
    for row in range(1, manager.max_requests):
        manager.admit(row, NO_MATCH, BLOCKS_PER_ROW * BLOCK_SIZE)
    rounds = 500

    def work() -> None:
        for _ in range(rounds):
            manager.admit(0, NO_MATCH, BLOCKS_PER_ROW * BLOCK_SIZE)
            manager.release(0)

    return median_seconds(work) / rounds / BLOCKS_PER_ROW * 1e9


def allocate_and_evict(num_blocks: int) -> float:
    """Nanoseconds a block, where every block taken still has cached content to forget, and gets new content."""
    manager = manager_of(num_blocks)
    num_rounds = 2 * manager.max_requests
    chains: Iterator[list[BlockHash]] = iter(
        [chain(seed) for seed in range(num_rounds * 9)]  # median_seconds makes 8 calls
    )

    def work() -> None:
        for _ in range(num_rounds):
            manager.admit(0, NO_MATCH, BLOCKS_PER_ROW * BLOCK_SIZE)
            manager.commit(0, next(chains))
            manager.release(0)

    return median_seconds(work) / num_rounds / BLOCKS_PER_ROW * 1e9


def chain(seed: int) -> list[BlockHash]:
    """Hashes of one row's worth of blocks, different for every seed."""
    hashes: list[BlockHash] = []
    extend_hashes(hashes, [seed] * (BLOCKS_PER_ROW * BLOCK_SIZE), block_size=BLOCK_SIZE)
    return hashes


def hash_blocks() -> float:
    """Nanoseconds a block of 16 tokens."""
    num_blocks = 512
    tokens = [random.Random(0).randrange(50_000) for _ in range(num_blocks * BLOCK_SIZE)]
    return median_seconds(lambda: extend_hashes([], tokens, block_size=BLOCK_SIZE)) / num_blocks * 1e9


def look_up() -> float:
    """Nanoseconds a block of a prefix that is cached from end to end."""
    manager = manager_of(BLOCKS_PER_ROW * 64)
    for row in range(manager.max_requests):
        manager.admit(row, NO_MATCH, BLOCKS_PER_ROW * BLOCK_SIZE)
        manager.commit(row, chain(row))
    wanted = chain(manager.max_requests // 2)
    rounds = 200

    def work() -> None:
        for _ in range(rounds):
            manager.match(wanted)

    return median_seconds(work) / rounds / len(wanted) * 1e9


COSTS: tuple[tuple[str, Callable[[], float]], ...] = (
    ("allocate and free, 1,024 blocks", lambda: allocate_and_free(1_024)),
    ("allocate and free, 102,400 blocks", lambda: allocate_and_free(102_400)),
    ("allocate by eviction, 1,024 blocks", lambda: allocate_and_evict(1_024)),
    ("hash 16 tokens", hash_blocks),
    ("look up a cached block", look_up),
)
