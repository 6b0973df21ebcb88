"""The systems that the papers compare with: memory reserved in advance, and batches that wait for their longest answer.

As in the PagedAttention paper, reservations lie in one arena under a buddy allocator (Knuth, volume 1, section 2.5).
"""

from collections.abc import Callable, Sequence

from benchmarks.paper.simulation import CostModel, Job, Trace

Reserve = Callable[[Job], int]


def reserve_max(longest: int) -> Reserve:
    """Orca (Max): as many slots as the model's context has."""
    return lambda job: longest


def reserve_pow2(longest: int) -> Reserve:
    """Orca (Pow2): the output over-reserved by up to two times."""
    return lambda job: min(longest, len(job.prompt) + (1 << (job.num_output - 1).bit_length()))


def reserve_exact(job: Job) -> int:
    """Orca (Oracle): knows the length in advance. Nobody can build it."""
    return job.num_tokens


class BuddyArena:
    """Power-of-two pieces of an arena of slots. Written by: itself."""

    def __init__(self, num_slots: int) -> None:
        self._free: dict[int, set[int]] = {order: set() for order in range(num_slots.bit_length() + 1)}
        self._top: dict[int, int] = {}  # offset -> order of the pieces that have no buddy
        offset = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._free[order].add(offset)
                self._top[offset] = order
                offset += 1 << order
        self.num_allocated = 0
        """Slots that were asked for; what rounding up to a power of two adds is in nobody's hands."""
        self._asked: dict[int, tuple[int, int]] = {}

    def allocate(self, num_slots: int) -> int | None:
        """The piece's offset; None where no piece is large enough."""
        order = (num_slots - 1).bit_length()
        found = next((o for o in range(order, max(self._free) + 1) if self._free[o]), None)
        if found is None:
            return None
        offset = self._free[found].pop()
        for smaller in reversed(range(order, found)):
            self._free[smaller].add(offset + (1 << smaller))
        self._asked[offset] = (order, num_slots)
        self.num_allocated += num_slots
        return offset

    def release(self, offset: int) -> None:
        order, num_slots = self._asked.pop(offset)
        self.num_allocated -= num_slots
        while self._top.get(offset) != order and (buddy := self._buddy(offset, order)) in self._free[order]:
            self._free[order].remove(buddy)
            offset = min(offset, buddy)
            order += 1
        self._free[order].add(offset)

    def _buddy(self, offset: int, order: int) -> int:
        base = max(top for top in self._top if top <= offset)
        return base + ((offset - base) ^ (1 << order))


def run(jobs: Sequence[Job], reserve: Reserve, *, num_slots: int, max_num_seqs: int, cost: CostModel) -> Trace:
    """First come, first served, iteration by iteration: a request starts when its reservation fits.

    Trace.slots_allocated counts the whole arena, as the papers do: what fragmentation makes useless is waste, too.
    """
    waiting = list(jobs)[::-1]
    arena, trace = BuddyArena(num_slots), Trace()
    running: dict[str, list[int]] = {}  # id -> [slots filled, slots at the end, offset]
    while waiting or running:
        num_prompt_tokens = 0
        while waiting and len(running) < max_num_seqs:
            offset = arena.allocate(reserve(waiting[-1]))
            if offset is None:
                break
            job = waiting.pop()
            running[job.request_id] = [len(job.prompt), job.num_tokens, offset]
            num_prompt_tokens += len(job.prompt) - 1
        duration = cost.step(num_prompt_tokens + len(running))
        if waiting:
            trace.saturated += duration
            trace.running += duration * len(running)
            trace.slots_allocated += duration * num_slots
            trace.slots_filled += duration * sum(filled for filled, _, _ in running.values())
        trace.num_steps += 1
        trace.duration += duration
        trace.output_tokens += len(running)
        for request_id, request in list(running.items()):
            request[0] += 1
            if request[0] == request[1]:
                arena.release(request[2])
                del running[request_id]
    return trace


def static_batches(jobs: Sequence[Job], *, width: int, cost: CostModel) -> Trace:
    """`width` requests start together and the next ones wait until the longest answer is complete.

    Rows that are done stay in the batch as padding, as they did in the systems that Orca was compared with.
    """
    trace = Trace()
    for begin in range(0, len(jobs), width):
        batch = jobs[begin : begin + width]
        num_steps = max(job.num_output for job in batch)
        trace.num_steps += num_steps
        trace.duration += cost.step(sum(len(job.prompt) for job in batch)) + (num_steps - 1) * cost.step(len(batch))
        trace.output_tokens += sum(job.num_output for job in batch)
    return trace
