"""Names of blocks."""

import pytest

from paging import extend_hashes


def _hashes(tokens: list[int], *, block_size: int = 4, salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, block_size=block_size, salt=salt)
    return hashes


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (1, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2), (9, 2)])
def test_only_full_blocks_have_a_hash(length: int, blocks: int) -> None:
    """Catches a partial block that is shared before it is full."""
    assert len(_hashes(list(range(length)))) == blocks


@pytest.mark.parametrize("steps", [[13], [4, 8, 13], [1, 2, 3, 4, 5, 6, 7, 8, 13], [6, 6, 13]])
def test_hashing_as_tokens_arrive_equals_hashing_at_once(steps: list[int]) -> None:
    """Catches an incremental hash that starts from the wrong parent."""
    tokens = list(range(13))
    hashes: list[bytes] = []
    for length in steps:
        extend_hashes(hashes, tokens[:length], block_size=4, salt="s")
    assert hashes == _hashes(tokens, salt="s")


def test_a_hash_depends_on_all_tokens_before_it() -> None:
    """Catches a hash of the block's own tokens only: equal blocks in other places hold other keys and values."""
    one, other = _hashes([1, 2, 3, 4, 9, 9, 9, 9]), _hashes([1, 2, 3, 5, 9, 9, 9, 9])
    assert one[1] != other[1]
    repeated = _hashes([7] * 16)
    assert len(set(repeated)) == 4


def test_a_salt_keeps_tenants_apart() -> None:
    """Catches a salt that reaches the first block only, or that can be imitated by tokens."""
    plain, salted, other = (_hashes(list(range(12)), salt=salt) for salt in ("", "a", "b"))
    assert len({*plain, *salted, *other}) == 9


def test_hashes_are_256_bits_and_the_same_in_every_process() -> None:
    """Catches Python's own hash(): 64 bits, forgeable, and different in each process."""
    assert _hashes([1, 2, 3, 4])[0].hex() == "2ed3e6f127eb4546461c95cf3e02aaf6005a2f2d84dc8c81e6a87c8fe226112e"
    assert _hashes([2**31 - 1] * 4)[0] != _hashes([2**31 - 2] * 4)[0]
