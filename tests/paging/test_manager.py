"""What a scheduler may rely on."""

import numpy as np
import pytest

from paging import NO_MATCH, InvariantViolation, KVCacheManager, extend_hashes


def _manager(num_blocks: int = 10, *, block_size: int = 4, enable_prefix_cache: bool = True) -> KVCacheManager:
    return KVCacheManager(
        num_blocks=num_blocks,
        block_size=block_size,
        max_requests=4,
        max_blocks_per_request=8,
        enable_prefix_cache=enable_prefix_cache,
    )


def _hashes(tokens: list[int], salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, block_size=4, salt=salt)
    return hashes


def _compute(manager: KVCacheManager, row: int, tokens: list[int]) -> None:
    """Admits without a prefix and commits all full blocks."""
    assert manager.admit(row, NO_MATCH, len(tokens))
    manager.commit(row, _hashes(tokens))


def test_the_page_table_shows_the_blocks_and_pads_with_the_null_block() -> None:
    """Catches a table that a runner can write, that holds stale blocks, or that hands out block 0."""
    manager = _manager()
    view = manager.page_table.view
    assert view.dtype == np.int32
    assert view.shape == (4, 8)
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1
    assert manager.admit(2, NO_MATCH, 9)
    assert view[2].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert manager.extend(2, 13)
    assert view[2].tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
    manager.release(2)
    assert not view.any()


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_row_holds_the_blocks_that_its_tokens_need(num_tokens: int, num_blocks: int) -> None:
    """Catches off-by-one at a block's edge, on admission and on extension."""
    manager = _manager()
    assert manager.admit(0, NO_MATCH, num_tokens)
    assert manager.admit(1, NO_MATCH, 1)
    assert manager.extend(1, num_tokens)
    assert len(manager.blocks_of(0)) == len(manager.blocks_of(1)) == num_blocks
    assert manager.usage().used == 2 * num_blocks


def test_a_full_cache_refuses_and_changes_nothing() -> None:
    """Catches a refusal that keeps half of what it took."""
    manager = _manager(4)
    _compute(manager, 0, list(range(8)))
    manager.release(0)
    assert manager.admit(1, NO_MATCH, 8)
    match = manager.match(_hashes(list(range(8))))
    assert not manager.admit(2, match, 12)
    assert not manager.extend(1, 17)
    assert manager.blocks_of(2) == []
    assert manager.match(_hashes(list(range(8)))) == match
    manager.check_invariants()


def test_a_hit_on_a_free_block_revives_it() -> None:
    """Catches a cached block that stays on the free queue while a request reads it."""
    manager = _manager(3)
    _compute(manager, 0, list(range(8)))
    manager.release(0)
    assert (manager.usage().used, manager.usage().cached, manager.usage().free) == (0, 2, 1)
    match = manager.match(_hashes(list(range(8))))
    assert match.num_revived == 2
    assert manager.admit(1, match, 9)
    assert manager.num_free_blocks == 0
    assert not manager.admit(2, NO_MATCH, 1)
    assert manager.match(_hashes(list(range(8)))).num_revived == 0
    manager.check_invariants()


def test_a_block_reused_for_other_tokens_is_not_found_by_its_old_hash() -> None:
    """Catches a stale entry in the prefix index: another request's keys and values would be read."""
    manager = _manager(2)
    _compute(manager, 0, list(range(8)))
    manager.release(0)
    _compute(manager, 0, list(range(50, 54)))
    assert manager.match(_hashes(list(range(8)))).block_ids == (1,)
    manager.release(0)
    _compute(manager, 0, list(range(60, 68)))
    assert manager.match(_hashes(list(range(8)))) == NO_MATCH
    assert manager.match(_hashes(list(range(50, 54)))) == NO_MATCH


def test_a_chain_is_evicted_from_its_end_and_the_oldest_chain_first() -> None:
    """Catches an eviction order that cuts off a prefix: what comes behind it could never be hit again."""
    manager = _manager(6)
    old, new = list(range(12)), list(range(100, 112))
    for row, tokens in enumerate((old, new)):
        _compute(manager, row, tokens)
    manager.release(0)
    manager.release(1)
    found = []
    for row, num_tokens in ((0, 4), (1, 8)):
        assert manager.admit(row, NO_MATCH, num_tokens)
        found.append([len(manager.match(_hashes(tokens)).block_ids) for tokens in (old, new)])
    assert found == [[2, 3], [0, 3]]


def test_nothing_cached_is_evicted_while_an_empty_block_is_free() -> None:
    """Catches a free queue where worthless blocks wait behind cached ones."""
    manager = _manager(6)
    _compute(manager, 0, list(range(8)))
    manager.release(0)
    assert manager.admit(1, NO_MATCH, 15)  # four blocks, none of them committed
    manager.release(1)
    assert manager.admit(2, NO_MATCH, 16)
    assert len(manager.match(_hashes(list(range(8)))).block_ids) == 2


def test_of_two_equal_blocks_the_first_is_indexed() -> None:
    """Catches a second computation that replaces, or corrupts the books of, the first."""
    manager = _manager()
    for row in (0, 1):
        _compute(manager, row, list(range(8)))
    first = tuple(manager.blocks_of(0))
    assert manager.match(_hashes(list(range(8)))).block_ids == first
    manager.release(1)
    assert manager.usage().cached == 0
    manager.release(0)
    assert manager.match(_hashes(list(range(8)))).block_ids == first
    manager.check_invariants()


def test_resetting_forgets_the_cached_and_spares_the_running() -> None:
    """Catches a reset that frees a running request's blocks, or after which old content is still hit."""
    manager = _manager()
    _compute(manager, 0, list(range(8)))
    _compute(manager, 1, list(range(50, 58)))
    manager.release(1)
    manager.reset_prefix_cache()
    assert manager.usage().used == 2
    assert manager.usage().cached == 0
    assert manager.match(_hashes(list(range(8)))) == NO_MATCH
    assert manager.match(_hashes(list(range(50, 58)))) == NO_MATCH
    manager.release(0)
    assert manager.usage().free == 10
    _compute(manager, 0, list(range(8)))
    assert len(manager.match(_hashes(list(range(8)))).block_ids) == 2
    manager.check_invariants()


def test_a_row_does_not_bring_back_what_a_reset_forgot() -> None:
    """Catches a commit that names a row's old blocks once more."""
    manager = _manager()
    tokens = list(range(12))
    _compute(manager, 0, tokens[:8])
    assert manager.admit(1, manager.match(_hashes(tokens[:8])), 12)
    manager.reset_prefix_cache()
    for row in (0, 1):
        manager.commit(row, _hashes(tokens)[: len(manager.blocks_of(row))])
    assert manager.match(_hashes(tokens)) == NO_MATCH
    manager.check_invariants()


def test_without_a_prefix_cache_nothing_is_found() -> None:
    """Catches a switch that only hides the hits and keeps paying for the index."""
    manager = _manager(enable_prefix_cache=False)
    _compute(manager, 0, list(range(8)))
    manager.release(0)
    assert manager.match(_hashes(list(range(8)))) == NO_MATCH
    assert manager.usage().cached == 0


@pytest.mark.parametrize("field", ["num_blocks", "block_size", "max_requests", "max_blocks_per_request"])
def test_sizes_must_be_positive(field: str) -> None:
    """Catches a cache of nothing, which would fail much later and less clearly."""
    sizes = {"num_blocks": 1, "block_size": 1, "max_requests": 1, "max_blocks_per_request": 1}
    KVCacheManager(**sizes)
    with pytest.raises(ValueError, match="at least one"):
        KVCacheManager(**{**sizes, field: 0})


def test_the_books_notice_tampering() -> None:
    """Catches a check_invariants() that can't fail: each line of the books is bent once."""
    bends = {
        "references": lambda m: m._pool.acquire([m.blocks_of(0)[0]]),
        "differs": lambda m: m.page_table._table.__setitem__((0, 0), 5),
        "capacity": lambda m: m._capacity.__setitem__(0, 4),
        "committed": lambda m: m._num_committed.__setitem__(0, 9),
        "free queue": lambda m: m._pool._free.__setattr__("_len", 3),
        "two ends": lambda m: m._pool._free._prev.__setitem__(5, 3),
        "are free and": lambda m: m._pool._free.append(m._pool._free.take(1) and [1]),
        "no block was given": lambda m: m.page_table._table.__setitem__((0, 7), 1),
        "carry it": lambda m: m._pool._index._block_of.clear(),
        "are named": lambda m: m._pool.__setattr__("num_cached", 2),
        "null block": lambda m: m._pool._references.__setitem__(0, 1),
    }
    for message, bend in bends.items():
        manager = _manager()
        _compute(manager, 0, list(range(8)))
        manager.check_invariants()
        bend(manager)
        with pytest.raises(InvariantViolation, match=message):
            manager.check_invariants()
