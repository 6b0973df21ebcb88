"""Where each running request's tokens are: rows of block ids.

row 3:  [ 7 | 9 | 12 | 0 | 0 ... ]      position p lies in block row[p // block_size], at offset p % block_size
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paging.errors import InvariantViolation
from paging.free_queue import NULL_BLOCK


class PageTable:
    """int32 [max_requests, max_blocks_per_request], padded with the null block. Written by: KVCacheManager only.

    A row only grows until it is cleared, so a kernel that was given a row's first entries may go on reading them.
    """

    def __init__(self, *, max_requests: int, max_blocks_per_request: int) -> None:
        self._table = np.full((max_requests, max_blocks_per_request), NULL_BLOCK, dtype=np.int32)
        self._rows: list[list[int]] = [[] for _ in range(max_requests)]
        self.view: npt.NDArray[np.int32] = self._table.view()
        """Read-only, always current."""
        self.view.flags.writeable = False

    def row(self, row: int) -> list[int]:
        """The row's blocks, in sequence order. The caller must not change it."""
        return self._rows[row]

    def append(self, row: int, blocks: Sequence[int]) -> None:
        entries = self._rows[row]
        begin = len(entries)
        self._table[row, begin : begin + len(blocks)] = blocks
        entries.extend(blocks)

    def clear(self, row: int) -> list[int]:
        """Empties the row and returns what it held."""
        entries = self._rows[row]
        self._table[row, : len(entries)] = NULL_BLOCK
        self._rows[row] = []
        return entries

    def check_invariants(self) -> None:
        """Raises InvariantViolation where the table shows anything but the rows' blocks and padding."""
        for row, entries in enumerate(self._rows):
            if entries and self._table[row, : len(entries)].tolist() != entries:
                raise InvariantViolation(f"row {row} of the page table differs from the blocks it was given")
        if np.count_nonzero(self._table) != sum(map(len, self._rows)):
            raise InvariantViolation("the page table differs from its padding where no block was given")
