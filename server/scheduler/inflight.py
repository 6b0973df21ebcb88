"""Prefixes that are being computed right now.

The prefix cache only knows what is finished. When forty requests with the same long prompt arrive together, none of
them finds the others' blocks, and all forty would compute the same. So a waiting request looks here too: where the
first block that it misses is on some running request's way, it lets that one finish the block and takes it from the
cache then.
"""

from paging import BlockHash
from server.scheduler.request import Request


class InflightPrefixes:
    """Block hash -> the running request that will commit it. Written by: Scheduler only.

    An entry lives from the admission of its request to the block's commit, or to the request's end or preemption:
    nobody waits for a block that is not coming.
    """

    def __init__(self) -> None:
        self._owner: dict[BlockHash, Request] = {}

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._owner

    def begin(self, request: Request) -> None:
        """The request, just admitted, will compute its known full blocks behind the committed ones."""
        for block_hash in request.block_hashes[request.num_committed_blocks :]:
            self._owner.setdefault(block_hash, request)

    def end(self, request: Request, first: int, last: int | None = None) -> None:
        """Blocks first .. last - 1 of the request (None: all behind) are committed, or won't be."""
        for block_hash in request.block_hashes[first:last]:
            if self._owner.get(block_hash) is request:
                del self._owner[block_hash]

    def owners(self) -> set[Request]:
        return set(self._owner.values())
