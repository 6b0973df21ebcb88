"""Which block holds which content."""

from collections.abc import Sequence

from paging.errors import InvariantViolation
from paging.hashing import BlockHash


class PrefixIndex:
    """Block hash <-> block id, one to one. Written by: BlockPool only.

    Where two requests computed the same content side by side, the first one's block is indexed and the second one's
    stays anonymous: moving a request to another block would rewrite a row that a kernel may be reading.
    """

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: list[BlockHash | None] = [None] * (num_blocks + 1)

    def hash_of(self, block: int) -> BlockHash | None:
        return self._hash_of[block]

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Blocks of the first hashes, up to the first one that is unknown."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def add(self, block: int, block_hash: BlockHash) -> None:
        """Names a block that has no name. Where the content is known already, nothing changes."""
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def forget(self, blocks: Sequence[int]) -> int:
        """Drops the names of those blocks that have one; returns how many had."""
        hash_of, block_of = self._hash_of, self._block_of
        count = 0
        for block in blocks:
            block_hash = hash_of[block]
            if block_hash is not None:
                hash_of[block] = None
                del block_of[block_hash]
                count += 1
        return count

    def clear(self) -> None:
        for block in self._block_of.values():
            self._hash_of[block] = None
        self._block_of.clear()

    def check_invariants(self) -> None:
        """Raises InvariantViolation where the two directions disagree."""
        if self._block_of != {name: block for block, name in enumerate(self._hash_of) if name is not None}:
            raise InvariantViolation(
                "a hash leads to a block that does not carry it, or a block's hash leads elsewhere"
            )
