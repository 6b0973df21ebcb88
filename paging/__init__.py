"""Paged KV cache bookkeeping: which block holds which tokens of which request. Standard library and numpy only."""

from paging.errors import InvariantViolation, OutOfBlocks, PagingError
from paging.free_queue import NULL_BLOCK
from paging.hashing import BlockHash, extend_hashes
from paging.manager import NO_MATCH, BlockUsage, KVCacheManager, PrefixMatch, blocks_needed
from paging.page_table import PageTable

__all__ = [
    "NO_MATCH",
    "NULL_BLOCK",
    "BlockHash",
    "BlockUsage",
    "InvariantViolation",
    "KVCacheManager",
    "OutOfBlocks",
    "PageTable",
    "PagingError",
    "PrefixMatch",
    "blocks_needed",
    "extend_hashes",
]
