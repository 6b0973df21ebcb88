"""A KV cache manager beside a naive account of what every block holds."""

from dataclasses import dataclass, field

from paging import KVCacheManager, extend_hashes


@dataclass
class Sequence:
    """A request as a scheduler would keep it."""

    tokens: list[int]
    salt: str
    num_computed: int = 0
    hashes: list[bytes] = field(default_factory=list)


class CheckedCache:
    """Every operation is checked against the account, and the books are checked after it."""

    def __init__(
        self, *, num_blocks: int, block_size: int, max_requests: int, enable_prefix_cache: bool = True
    ) -> None:
        self.manager = KVCacheManager(
            num_blocks=num_blocks,
            block_size=block_size,
            max_requests=max_requests,
            max_blocks_per_request=num_blocks,
            enable_prefix_cache=enable_prefix_cache,
        )
        self.block_size = block_size
        self.rows: dict[int, Sequence] = {}
        self.written: dict[int, tuple] = {}
        """Block -> (salt, all tokens up to its end) as last computed."""
        self.num_operations = 0
        self.num_hits = 0

    @property
    def free_rows(self) -> list[int]:
        return [row for row in range(self.manager.max_requests) if row not in self.rows]

    def admit(self, row: int, tokens: list[int], salt: str, num_new: int) -> bool:
        """Admits with whatever prefix is cached, and room for num_new tokens behind it."""
        sequence = Sequence(tokens=tokens, salt=salt)
        extend_hashes(sequence.hashes, tokens, block_size=self.block_size, salt=salt)
        match = self.manager.match(sequence.hashes[: (len(tokens) - 1) // self.block_size])
        for position, block in enumerate(match.block_ids):
            read = (salt, tuple(tokens[: (position + 1) * self.block_size]))
            assert self.written[block] == read, "the prefix cache returned another content"
        cached = len(match.block_ids) * self.block_size
        usage = self.manager.usage()
        admitted = self.manager.admit(row, match, min(cached + num_new, len(tokens)))
        if admitted:
            self.rows[row] = sequence
            sequence.num_computed = cached
            self.num_hits += len(match.block_ids)
        else:
            assert self.manager.usage() == usage, "a refused admission changed something"
        self._check()
        return admitted

    def extend(self, row: int, num_new: int) -> bool:
        """Room for num_new more tokens, which are then computed; they are made up where the sequence ends before."""
        sequence = self.rows[row]
        end = sequence.num_computed + num_new
        usage = self.manager.usage()
        if not self.manager.extend(row, end):
            assert self.manager.usage() == usage, "a refused extension changed something"
            self._check()
            return False
        sequence.tokens += [(end + i) % 3 for i in range(end - len(sequence.tokens))]
        blocks = self.manager.blocks_of(row)
        shared = {block for other in self.rows if other != row for block in self.manager.blocks_of(other)}
        for position in range(sequence.num_computed // self.block_size, -(-end // self.block_size)):
            assert blocks[position] not in shared, "a block is written while another request reads it"
            content = tuple(sequence.tokens[: min((position + 1) * self.block_size, end)])
            self.written[blocks[position]] = (sequence.salt, content)
        sequence.num_computed = end
        self._check()
        return True

    def commit(self, row: int) -> None:
        sequence = self.rows[row]
        extend_hashes(sequence.hashes, sequence.tokens, block_size=self.block_size, salt=sequence.salt)
        self.manager.commit(row, sequence.hashes[: sequence.num_computed // self.block_size])
        self._check()

    def release(self, row: int) -> None:
        """Also what a preemption does."""
        del self.rows[row]
        self.manager.release(row)
        self._check()

    def reset(self) -> None:
        self.manager.reset_prefix_cache()
        assert self.manager.usage().cached == 0
        self._check()

    def _check(self) -> None:
        self.num_operations += 1
        self.manager.check_invariants()
        usage = self.manager.usage()
        held = {block for row in self.rows for block in self.manager.blocks_of(row)}
        assert usage.used == len(held)
        assert usage.used + usage.cached + usage.free == self.manager.num_blocks
