"""Figures about memory that can be counted exactly, with the bars that the project sets itself (M1, M2, M4, M6, M7)."""

import random
from bisect import insort
from collections.abc import Iterable

import pytest

from paging import KVCacheManager, blocks_needed
from server.config import SchedulerConfig
from server.protocol import GenerateRequest
from server.scheduler.batch import SampledRow, SampledTokens
from server.scheduler.scheduler import Scheduler
from tests.scheduler.simulation import Simulation, expected_tokens, request

CAPACITY = 16_384
"""Tokens of KV memory: about what a 13B model leaves on a 40 GB GPU, as in the PagedAttention paper."""
MAX_MODEL_LEN = 2048


def _chat_lengths(count: int) -> list[tuple[int, int]]:
    """(prompt, output) tokens, log-normal with ShareGPT's means, 161 and 338."""
    rng = random.Random(0)
    lengths = []
    for _ in range(count):
        prompt, output = (int(rng.lognormvariate(mu, 0.9)) for mu in (4.68, 5.42))
        lengths.append((min(max(prompt, 4), 1000), min(max(output, 1), 1000)))
    return lengths


class _Saturated:
    """The scheduler on a chat-like load that never lets it rest; nobody computes, tokens are only counted."""

    def __init__(self, lengths: list[tuple[int, int]], *, block_size: int = 16) -> None:
        self.manager = KVCacheManager(
            num_blocks=CAPACITY // block_size,
            block_size=block_size,
            max_requests=256,
            max_blocks_per_request=blocks_needed(MAX_MODEL_LEN, block_size),
        )
        self.scheduler = Scheduler(
            config=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2048),
            manager=self.manager,
            max_model_len=MAX_MODEL_LEN,
        )
        for number, (prompt, output) in enumerate(lengths):
            self.scheduler.add(request(f"r{number}", [number] * prompt, max_tokens=output), 0.0)
        self._num_requests = len(lengths)
        self.num_running: list[int] = []
        self.waste: list[float] = []
        self.largest_waste_of_one = 0

    def run(self) -> None:
        """Until the queue is empty: what comes after says nothing about a server under load."""
        num_waiting = num_open = self._num_requests
        while num_waiting:
            batch = self.scheduler.schedule(0.0)
            self._measure({item.row: item.end for item in batch.items})
            rows = [SampledRow(item.request_id, [1]) for item in batch.items if item.samples]
            output = self.scheduler.update(batch, SampledTokens(batch.step_id, rows, {}), 0.0)
            num_open -= sum(delta.finish_reason is not None for delta in output.deltas)
            num_waiting = num_open - output.stats.num_running

    def _measure(self, filled: dict[int, int]) -> None:
        block_size = self.manager.block_size
        slots = {row: len(self.manager.blocks_of(row)) * block_size for row in filled}
        self.num_running.append(len(filled))
        self.waste.append(1 - sum(filled.values()) / sum(slots.values()))
        self.largest_waste_of_one = max(self.largest_waste_of_one, *(slots[row] - filled[row] for row in filled))


@pytest.fixture(scope="module")
def saturated() -> _Saturated:
    load = _Saturated(_chat_lengths(600))
    load.run()
    return load


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def _mean_running_with_reservation(lengths: list[tuple[int, int]], reserve) -> float:
    """What was done before paging: each request gets one contiguous range for all it may need, first fit."""
    queue = list(lengths)[::-1]
    running: list[tuple[int, int, int]] = []  # (start, end, steps left), by start
    counts = []
    while queue:
        while queue:
            size = reserve(*queue[-1])
            start = 0
            for taken, end, _ in running:
                if taken - start >= size:
                    break
                start = end
            if start + size > CAPACITY:
                break
            insort(running, (start, start + size, queue.pop()[1]))
        counts.append(len(running))
        running = [(start, end, left - 1) for start, end, left in running if left > 1]
    return _mean(counts)


def test_m1_waste_is_below_four_percent(saturated: _Saturated) -> None:
    """Catches blocks that are taken before they are needed. Only a request's last block may be partly empty."""
    assert _mean(saturated.waste) < 0.04
    assert saturated.largest_waste_of_one <= 15


@pytest.mark.parametrize(
    ("reserve", "factor"),
    [(lambda prompt, output: prompt + output, 1.8), (lambda prompt, output: MAX_MODEL_LEN, 3.5)],
    ids=["exact", "max"],
)
def test_m2_paging_runs_more_requests_in_the_same_memory(saturated: _Saturated, reserve, factor: float) -> None:
    """Catches an admission that is too careful to profit from paging: against reserving each request's exact need, as
    only an oracle could, and against reserving the longest possible answer."""
    ratio = _mean(saturated.num_running) / _mean_running_with_reservation(_chat_lengths(600), reserve)
    assert ratio >= factor


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("prompt_len", [3, 15, 16, 17, 33, 100])
def test_m4_samples_of_one_prompt_share_its_blocks(n: int, prompt_len: int) -> None:
    """Catches parallel sampling that stores, or computes, the prompt n times."""
    simulation = Simulation(num_blocks=200, block_size=16, max_num_seqs=8, max_num_batched_tokens=512)
    simulation.add(*(request(f"s{i}", range(prompt_len), max_tokens=30, seed=i) for i in range(n)))
    shared = (prompt_len - 1) // 16
    for _ in range(12):
        batch = simulation.step()
    own = [blocks_needed(item.end, 16) - shared for item in batch.items]
    assert len(own) == n
    assert simulation.manager.usage().used == shared + sum(own)
    assert simulation.hit_tokens == (n - 1) * shared * 16


@pytest.mark.parametrize("suffix_len", [1, 16, 40])
@pytest.mark.parametrize("prefix_len", [16, 50, 128])
def test_m4_a_shared_prefix_is_stored_once(prefix_len: int, suffix_len: int) -> None:
    """Catches a system prompt that is stored once a request, though they arrive in one burst."""
    simulation = Simulation(num_blocks=200, block_size=16, max_num_seqs=8, max_num_batched_tokens=512)
    prompts = [[*range(prefix_len), *([100 + i] * suffix_len)] for i in range(6)]
    simulation.add(*(request(f"s{i}", prompt, max_tokens=30) for i, prompt in enumerate(prompts)))
    for _ in range(4):
        batch = simulation.step()
    shared = prefix_len // 16
    assert simulation.manager.usage().used == shared + sum(blocks_needed(item.end, 16) - shared for item in batch.items)


def _best_possible_hits(requests: list[GenerateRequest], block_size: int, outputs: dict[str, list[int]]) -> int:
    """Tokens that a cache of unlimited size and perfect memory would find, had the requests come one after another."""
    known: set[tuple] = set()
    hits = 0
    for new in requests:
        prompt = tuple(new.prompt_token_ids)
        for end in range(block_size, len(prompt), block_size):
            if (new.cache_salt, prompt[:end]) not in known:
                break
            hits += block_size
        computed = (prompt + tuple(outputs[new.request_id]))[:-1]
        known |= {(new.cache_salt, computed[:end]) for end in range(block_size, len(computed) + 1, block_size)}
    return hits


@pytest.mark.parametrize("burst", [False, True], ids=["one after another", "all at once"])
@pytest.mark.parametrize("seed", range(15))
def test_m6_without_eviction_the_hit_rate_is_optimal(seed: int, burst: bool) -> None:
    """Catches blocks that are computed though somebody has them, or is just computing them."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 16])
    simulation = Simulation(
        num_blocks=4000,
        block_size=block_size,
        max_num_seqs=rng.choice([4, 16]),
        max_num_batched_tokens=rng.choice([24, 200]),
    )
    stems = [[rng.randrange(50) for _ in range(rng.randrange(1, 70))] for _ in range(3)]
    requests = []
    for number in range(25):
        stem = rng.choice(stems)
        prompt = stem[: rng.randrange(1, len(stem) + 1)] + [rng.randrange(50) for _ in range(rng.randrange(20))]
        # In a burst, answers are not finished in the order of arrival, so one token each: nothing of them is stored.
        max_tokens = 1 if burst else rng.randrange(1, 20)
        requests.append(request(f"r{number}", prompt, max_tokens=max_tokens, cache_salt=rng.choice(["", "", "x"])))
    outputs = {new.request_id: expected_tokens(new) for new in requests}
    for new in requests:
        simulation.add(new)
        if not burst:
            simulation.run(check=False)
    simulation.run(check=False)
    best = _best_possible_hits(requests, block_size, outputs)
    assert best > 0
    assert simulation.hit_tokens == best
    assert simulation.queried_tokens == sum(len(new.prompt_token_ids) for new in requests)
    assert (
        simulation.runner.num_computed_tokens
        == sum(len(new.prompt_token_ids) + len(outputs[new.request_id]) - 1 for new in requests) - simulation.hit_tokens
    )


def test_m7_preemption_loses_no_token() -> None:
    """Catches an answer that depends on how often its request lost its memory."""
    requests = [request(f"r{i}", [i] * 20, max_tokens=40, seed=i) for i in range(8)]
    simulation = Simulation(num_blocks=32, block_size=4, max_num_batched_tokens=32)
    simulation.add(*requests)
    simulation.run()
    assert simulation.num_preemptions >= 8
    assert all(simulation.answers[new.request_id].token_ids == expected_tokens(new) for new in requests)


@pytest.mark.parametrize("seed", range(10))
def test_m7_a_crash_loses_no_token(seed: int) -> None:
    """Catches a resumption that repeats, drops or changes a token: the scheduler, the cache and the model are new."""
    rng = random.Random(seed)
    requests = [
        request(f"r{i}", [rng.randrange(50) for _ in range(rng.randrange(1, 40))], max_tokens=30, stop_token_ids=(3,))
        for i in range(10)
    ]
    received: dict[str, list[int]] = {new.request_id: [] for new in requests}
    still_open = {new.request_id: new for new in requests}
    num_lives = 0
    while still_open:
        num_lives += 1
        simulation = Simulation(num_blocks=48, block_size=4, max_num_batched_tokens=32)
        for name, new in still_open.items():
            simulation.add(
                GenerateRequest(name, new.prompt_token_ids, new.sampling, 0.0, resumed_token_ids=received[name])
            )
            received[name] = list(received[name])
        for _ in range(rng.randrange(1, 20)):
            simulation.step()
        for name, answer in simulation.answers.items():
            received[name] += answer.token_ids
            if answer.finish_reason is not None:
                del still_open[name]
    assert num_lives > 2
    assert received == {new.request_id: expected_tokens(new) for new in requests}
