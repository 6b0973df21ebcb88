"""The sampler against plain definitions of what each parameter means, and its independence of the batch."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels.backend import resolve
from server.protocol import SamplingParams
from server.sampling.fused import FusedSampler
from server.sampling.random import uniforms
from server.sampling.row_state import Grammar, SamplingRow
from server.sampling.sampler import Sampled, apply_bitmask, choose

CPU = torch.device("cpu")


def row(
    vocab_size: int,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    grammar: Grammar | None = None,
    **settings: object,
) -> SamplingRow:
    params = SamplingParams(max_tokens=100, **{"seed": 11, **settings})
    return SamplingRow(params, prompt, output, vocab_size=vocab_size, device=CPU, grammar=grammar)


fused: FusedSampler | None = None
"""The sampler under test; None is the one of server.sampling."""


@pytest.fixture(params=["torch", "compiled"], autouse=True)
def sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs with both: they have the same definitions and the same random numbers."""
    if request.param == "compiled":
        found = resolve("cpu", "cpu").sampler
        if found is None:
            pytest.skip("no compiler here: the torch sampler serves")
        monkeypatch.setitem(globals(), "fused", FusedSampler(found, CPU))


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow], positions: Sequence[int]) -> Sampled:
    """Chosen and read."""
    chosen = choose(logits, rows, positions, fused=fused)
    return chosen.read(chosen.tensors)


def random_logits(num_rows: int, vocab_size: int, *, seed: int = 0, coarse: bool = False) -> torch.Tensor:
    """coarse: rounded to bfloat16, so that many are equal."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2.5
    return logits.bfloat16().float() if coarse else logits


def draws(logits: torch.Tensor, sampling_row: SamplingRow, num_draws: int) -> npt.NDArray[np.int64]:
    """Token counts of so many positions of one row, int64[V]."""
    rows = [sampling_row] * 64
    counts = np.zeros(logits.shape[0], np.int64)
    for begin in range(0, num_draws, 64):
        result = sample(logits.repeat(64, 1), rows, range(begin, begin + 64))
        counts += np.bincount(result.token_ids, minlength=len(counts))
    return counts


def test_greedy_takes_the_lowest_of_equals() -> None:
    """Equal logits, common in bfloat16, resolved by how the work was split."""
    logits = torch.zeros(3, 50000)
    logits[0, [70, 40000]] = 5.0
    logits[1, [49999, 31]] = 2.0
    assert sample(logits, [row(50000, temperature=0.0)] * 3, [1, 2, 3]).token_ids == [70, 31, 0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 1},
        {"top_k": 5},
        {"top_p": 0.4},
        {"top_p": 0.01},
        {"min_p": 0.2},
        {"temperature": 0.8, "top_k": 12, "top_p": 0.7},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
        {"repetition_penalty": 1.6},
        {"repetition_penalty": 0.7, "top_k": 9},
    ],
)
def test_distribution_is_that_of_transformers(settings: dict[str, float]) -> None:
    """A parameter applied in another order or to another set of tokens than users know it from."""
    vocab_size, prompt, output, num_draws = 300, [3, 4, 5, 290], [4, 77], 6400
    logits = random_logits(1, vocab_size)[0]
    processors = LogitsProcessorList()
    if "repetition_penalty" in settings:
        processors.append(RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    if "temperature" in settings:
        processors.append(TemperatureLogitsWarper(settings["temperature"]))
    if "top_k" in settings:
        processors.append(TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        processors.append(TopPLogitsWarper(settings["top_p"]))
    if "min_p" in settings:
        processors.append(MinPLogitsWarper(settings["min_p"]))
    expected = processors(torch.tensor([prompt + output]), logits[None].clone())[0].softmax(-1).numpy()
    counts = draws(logits, row(vocab_size, prompt=prompt, output=output, **settings), num_draws)
    assert counts[expected == 0].sum() == 0
    # Pearson's chi-squared over cells of at least 5 expected draws; 5 sigma of its normal approximation.
    cells = expected * num_draws >= 5
    statistic = (((counts - expected * num_draws) ** 2)[cells] / (expected * num_draws)[cells]).sum()
    assert statistic < cells.sum() + 5 * (2 * cells.sum()) ** 0.5 + 5


MIXED: list[dict[str, object]] = [
    {"temperature": 0.0},
    {},
    {"top_k": 3},
    {"top_k": 500, "temperature": 2.0},
    {"top_k": 128},
    {"top_p": 0.9},
    {"top_p": 0.98, "temperature": 3.0},
    {"min_p": 0.05},
    {"top_p": 0.5, "min_p": 0.3, "top_k": 40},
    {"presence_penalty": 1.5, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.3},
    {"logit_bias": {7: 100.0}},
    {"min_tokens": 5, "stop_token_ids": (3, 9)},
    {"logprobs": 5},
]


@pytest.fixture
def two_threads() -> Iterator[None]:
    """torch then splits some reductions between threads, depending on the number of rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("coarse", [False, True])
def test_a_row_does_not_see_its_company(coarse: bool) -> None:
    """A token that depends on how many rows there are, in which order, or on what they ask for."""
    vocab_size, n = 40001, len(MIXED)

    def rows() -> list[SamplingRow]:
        return [row(vocab_size, prompt=[1, 2], output=[5, 5, 6], seed=i, **MIXED[i]) for i in range(n)]

    for trial in range(3):
        logits = random_logits(n, vocab_size, seed=trial, coarse=coarse)
        together = sample(logits.clone(), rows(), [trial] * n)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(trial)).tolist()
        shuffled = sample(logits[order].clone(), [rows()[i] for i in order], [trial] * n)
        alone = [sample(logits[i : i + 1].clone(), [rows()[i]], [trial]) for i in range(n)]
        assert [result.token_ids[0] for result in alone] == together.token_ids
        assert [shuffled.token_ids[order.index(i)] for i in range(n)] == together.token_ids
        assert alone[-1].logprobs[0] == together.logprobs[-1]


@pytest.mark.parametrize(
    ("settings", "vocab_size"),
    [
        ({"top_k": 128}, 5000),
        ({"top_k": 127, "top_p": 0.97}, 5000),
        ({"top_k": 1024}, 5000),
        ({"top_k": 4000}, 5000),
        ({"top_k": 10**6}, 200),
        ({"top_p": 0.999, "temperature": 5.0}, 5000),
        ({"top_p": 0.2, "temperature": 0.5}, 5000),
    ],
)
def test_candidates_are_exact(settings: dict[str, float], vocab_size: int) -> None:
    """A shortcut over the likeliest candidates that gives another token than sorting the whole vocabulary."""
    params = SamplingParams(max_tokens=1, seed=5, **settings)
    for position in range(12):
        logits = random_logits(1, vocab_size, seed=position, coarse=True)
        scores = (logits / params.temperature)[0]
        order = sorted(range(vocab_size), key=lambda token: (-scores[token].item(), token))
        probs = scores.softmax(-1)[order].double().numpy()
        k = min(params.top_k or vocab_size, vocab_size)
        whole = probs[:k].sum() if params.top_k else 1.0
        before = np.concatenate([[0.0], probs.cumsum()[:-1]])
        kept = int(((before < params.top_p * whole) & (np.arange(vocab_size) < k)).sum())
        number = uniforms(np.array([5], np.uint64), np.array([position], np.uint64))[0]
        cumulative = probs[:kept].cumsum()
        target = number * cumulative[-1]
        place = int(np.searchsorted(cumulative, target, side="right"))
        if np.abs(cumulative - target).min() < 1e-6:
            continue  # float32 may fall on the other side
        [found] = sample(logits.clone(), [row(vocab_size, **{**settings, "seed": 5})], [position]).token_ids
        assert found == order[place]


def test_random_numbers_are_keyed_by_seed_and_position() -> None:
    """A stream with state, seeds or positions that run in parallel, or another stream than the previous release's."""
    positions = np.arange(4096, dtype=np.uint64)
    streams = [uniforms(np.full(4096, seed, np.uint64), positions) for seed in (0, 1, 2, 2**64 - 1)]
    assert np.array_equal(streams[1], uniforms(np.full(4096, 1, np.uint64), positions))
    for stream in streams:
        assert 0.0 <= stream.min() < 0.01
        assert 0.99 < stream.max() < 1.0
        assert abs(stream.mean() - 0.5) < 0.03
        assert abs(np.corrcoef(stream[:-1], stream[1:])[0, 1]) < 0.08
    assert np.abs(np.corrcoef(streams) - np.eye(4)).max() < 0.08
    one = uniforms(np.array([12345], np.uint64), np.array([678], np.uint64))[0]
    assert one == 0.015809936860808338
    assert one == uniforms(np.array([1, 12345], np.uint64), np.array([678, 678], np.uint64))[1]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"presence_penalty": 0.5}, {5: 0.5, 6: 0.5}),
        ({"frequency_penalty": 0.5}, {5: 1.0, 6: 0.5}),
        ({"presence_penalty": -1.0, "frequency_penalty": 0.25}, {5: -0.5, 6: -0.75}),
        ({"logit_bias": {2: -100.0, 9: 3.5}}, {2: 100.0, 9: -3.5}),
        ({"stop_token_ids": (1, 8), "min_tokens": 4}, {1: np.inf, 8: np.inf}),
        ({"stop_token_ids": (1, 8), "min_tokens": 3}, {}),
    ],
)
def test_adjustments(settings: dict[str, object], expected: dict[int, float]) -> None:
    """Penalties that count the prompt, bias on another token, stop tokens banned a token too long or too short."""
    logits = random_logits(1, 12)[0]
    changed = logits.clone()
    row(12, prompt=[1, 2, 2], output=[5, 6, 5], **settings).adjust(changed)
    wanted = logits.clone()
    for token_id, loss in expected.items():
        wanted[token_id] -= loss
    torch.testing.assert_close(changed, wanted)


def test_appended_tokens_are_penalised() -> None:
    """A row rebuilt from its tokens, as after a preemption, differs from the one that lived through them."""
    settings = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.4, "min_tokens": 3}
    grown = row(40, prompt=[1, 2], stop_token_ids=(4,), **settings)
    output: list[int] = []
    for token_id in [7, 7, 2, 39]:
        rebuilt = row(40, prompt=[1, 2], output=output, stop_token_ids=(4,), **settings)
        logits = random_logits(1, 40)[0]
        first, second = logits.clone(), logits.clone()
        grown.adjust(first)
        rebuilt.adjust(second)
        assert torch.equal(first, second)
        grown.append(torch.tensor([3, token_id]), 1)
        output.append(token_id)


class EveryThird:
    """A grammar that allows token ids divisible by three, and fails where it is told to."""

    def __init__(self, *, fails: bool = False, allows_none: bool = False) -> None:
        self.tokens: list[int] = []
        self._fails = fails
        self._step = 0 if allows_none else 3

    def fill_bitmask(self, row: npt.NDArray[np.int32]) -> None:
        if self._fails:
            raise RuntimeError("broken grammar")
        row[:] = 0
        words = row.view(np.uint32)
        for token_id in range(0, 32 * len(row), self._step) if self._step else ():
            words[token_id // 32] |= np.uint32(1 << (token_id % 32))

    def advance(self, token_ids: Sequence[int]) -> None:
        self.tokens += token_ids


def test_grammar_masks_its_row_only() -> None:
    """A mask on the wrong row, bits counted from the other end, or a vocabulary that is no multiple of 32."""
    vocab_size = 101
    logits = random_logits(3, vocab_size)
    greedy = row(vocab_size, temperature=0.0, grammar=EveryThird())
    drawn = row(vocab_size, grammar=EveryThird(), top_p=0.9)
    result = sample(logits.clone(), [greedy, row(vocab_size, temperature=0.0), drawn], [0, 0, 0])
    assert result.token_ids[0] == 3 * int(logits[0, ::3].argmax())
    assert result.token_ids[1] == int(logits[1].argmax())
    assert result.token_ids[2] % 3 == 0
    assert not result.failed


def test_min_tokens_gives_way_to_a_complete_grammar() -> None:
    """A request that fails because its grammar allows nothing but the stop token that min_tokens bans."""
    params = {"temperature": 0.0, "min_tokens": 5}
    both = [row(8, grammar=EveryThird(), stop_token_ids=stops, **params) for stops in [(0, 3, 6), (0, 6)]]
    result = sample(torch.zeros(2, 8), both, [0, 0])
    assert (result.token_ids, result.failed) == ([0, 3], {})


def test_one_failing_row_leaves_the_others() -> None:
    """A broken grammar, a mask that allows nothing or a NaN that ends the step, or changes another row's token."""
    vocab_size = 64
    logits = random_logits(5, vocab_size)
    logits[3, 17] = float("nan")
    rows = [
        row(vocab_size, temperature=0.0),
        row(vocab_size, grammar=EveryThird(fails=True)),
        row(vocab_size, grammar=EveryThird(allows_none=True), top_k=4),
        row(vocab_size),
        row(vocab_size, top_k=4),
    ]
    result = sample(logits.clone(), rows, [9] * 5)
    assert set(result.failed) == {1, 2, 3}
    assert "broken grammar" in result.failed[1]
    assert "no token" in result.failed[2]
    assert "finite" in result.failed[3]
    assert result.token_ids[0] == int(logits[0].argmax())
    assert result.token_ids[4] == sample(logits[4:].clone(), [row(vocab_size, top_k=4)], [9]).token_ids[0]


def test_apply_bitmask_rows() -> None:
    """The mask applied to [S, V] at once differs from bit t % 32 of word t // 32."""
    bitmask = np.random.default_rng(0).integers(-(2**31), 2**31, (4, 3), dtype=np.int64).astype(np.int32)
    logits = torch.zeros(4, 90)
    apply_bitmask(logits, bitmask)
    for i in range(4):
        for token_id in range(90):
            allowed = int(bitmask[i, token_id // 32]) >> (token_id % 32) & 1
            assert (logits[i, token_id] == 0) == bool(allowed)


def test_logprobs_are_of_the_raw_logits() -> None:
    """Log-probabilities after temperature, penalties or masks; a rank off by one; top lists of another length."""
    vocab_size = 200
    logits = random_logits(3, vocab_size)
    logits[0] = -torch.arange(vocab_size) / 10.0
    rows = [
        row(vocab_size, logprobs=3, temperature=0.0, logit_bias={20: 100.0}),
        row(vocab_size, logprobs=0, temperature=0.3, top_k=4),
        row(vocab_size),
    ]
    result: Sampled = sample(logits.clone(), rows, [4, 4, 4])
    first, second, third = result.logprobs
    expected = logits.log_softmax(-1)
    assert first is not None
    assert second is not None
    assert third is None
    assert (first.token_id, first.rank, first.top_ids) == (20, 21, [0, 1, 2])
    assert first.logprob == pytest.approx(expected[0, 20].item(), abs=1e-5)
    assert first.top_logprobs == pytest.approx(expected[0, :3].tolist(), abs=1e-5)
    assert (second.top_ids, second.top_logprobs) == ([], [])
    assert second.logprob == pytest.approx(expected[1, result.token_ids[1]].item(), abs=1e-5)
    assert second.rank == int((logits[1] > logits[1, result.token_ids[1]]).sum()) + 1


@pytest.mark.parametrize("token_id", [-1, 300])
def test_bias_outside_the_vocabulary_is_refused(token_id: int) -> None:
    """An index error in the middle of a step."""
    with pytest.raises(ValueError, match=f"token {token_id}"):
        row(300, logit_bias={token_id: 1.0})
