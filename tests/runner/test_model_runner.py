"""The runner: what a request gets must not depend on chunks, company, preemption or on another one's faults."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from server.models.decoder import Decoder
from server.protocol import GrammarSpec, SamplingParams, TokenLogprobs
from server.scheduler.batch import AdmittedRow, SampledRow, ScheduledItem
from tests.models.checkpoints import make_model, save
from tests.runner.driver import Driver, greedy, load, token_ids
from tests.sampling.test_sampler import EveryThird

PROMPTS = [list(range(3, 40)), [200, 5, 17] * 9, [9], list(range(100, 160))]
SETTINGS: list[dict[str, object]] = [
    {"temperature": 0.0, "presence_penalty": 0.8},
    {"seed": 1, "top_p": 0.9, "frequency_penalty": 0.4},
    {"seed": 2, "temperature": 1.4, "logprobs": 2},
    {"seed": 3, "top_k": 30, "repetition_penalty": 1.2, "prompt_logprobs": 1},
]
PARAMS = [SamplingParams(max_tokens=14, **{"seed": 0, **settings}) for settings in SETTINGS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load(save(make_model("llama"), tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def expected(model: Decoder) -> list[list[SampledRow]]:
    """Each request alone, its prompt in one piece."""
    return [Driver(model).generate([prompt], [p])[0] for prompt, p in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize("chunk", [1, 7, 8, 9, 1000])
def test_company_and_chunks_change_nothing(model: Decoder, expected: list[list[SampledRow]], chunk: int) -> None:
    """Slots, positions or sampled rows mixed up in a ragged batch; random numbers drawn by step instead of position."""
    results = Driver(model).generate(PROMPTS, PARAMS, chunk=chunk)
    assert [token_ids(result) for result in results] == [token_ids(result) for result in expected]


@pytest.mark.parametrize("kept", [1, 5, 13])
def test_resumed_requests_go_on_as_they_would_have(model: Decoder, expected: list[list[SampledRow]], kept: int) -> None:
    """Penalties, seeds or positions that start over after a preemption or a crash."""
    outputs = [token_ids(result)[:kept] for result in expected]
    results = Driver(model).generate(PROMPTS, PARAMS, chunk=10, outputs=outputs)
    assert [token_ids(result) for result in results] == [token_ids(result)[kept:] for result in expected]
    assert all(row.prompt_logprobs is None for result in results for row in result), "delivered twice"


def test_rows_are_reused(model: Decoder, expected: list[list[SampledRow]]) -> None:
    """A new request that inherits its row's previous state, or a release applied after the admission."""
    driver = Driver(model)
    driver.generate(PROMPTS[:1], PARAMS[:1])
    prompt = PROMPTS[1]
    admitted = AdmittedRow("new", 0, PARAMS[1], prompt, [])
    sampled = driver.step([ScheduledItem("new", 0, 0, prompt, True)], [admitted], released=[0])
    assert sampled.rows[0].token_ids == token_ids(expected[1])[:1]


def logprobs_of(result: Sequence[SampledRow]) -> list[TokenLogprobs | None]:
    [delivered] = [row.prompt_logprobs for row in result if row.prompt_logprobs is not None]
    assert result[0].prompt_logprobs is delivered
    return delivered


@pytest.mark.parametrize("length", [1, 2, 300])
def test_prompt_logprobs_over_chunks(model: Decoder, length: int) -> None:
    """A position lost or counted twice where chunks meet; the logits of a whole prompt held at once."""
    prompt = torch.randint(257, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    params = greedy(1, prompt_logprobs=2)
    whole = logprobs_of(Driver(model, length=320).generate([prompt], [params])[0])
    assert len(whole) == length
    assert whole[0] is None
    assert [entry.token_id for entry in whole[1:]] == prompt[1:]
    assert all(len(entry.top_ids) == 2 for entry in whole[1:])
    chunked = logprobs_of(Driver(model, length=320).generate([prompt], [params], chunk=37)[0])
    for first, second in zip(whole[1:], chunked[1:], strict=True):
        assert first.logprob == pytest.approx(second.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "prompt", "named"),
    [
        ({"logit_bias": {257: 1.0}}, [1, 2], "logit_bias"),
        ({"grammar": GrammarSpec("regex", "a")}, [1, 2], "structured outputs"),
        ({}, [1, 257], "vocabulary"),
        ({}, [1, -1], "vocabulary"),
        ({}, [1, 2**40], "vocabulary"),
        ({"prompt_logprobs": 0}, [1, 999], "vocabulary"),
    ],
)
def test_a_bad_request_fails_alone(
    model: Decoder, expected: list[list[SampledRow]], settings: dict[str, object], prompt: list[int], named: str
) -> None:
    """One request's parameters that raise in the step of all, or read beyond the embedding."""
    driver = Driver(model)
    bad = SamplingParams(max_tokens=4, seed=0, **settings)
    admitted = [AdmittedRow("bad", 0, bad, prompt, []), AdmittedRow("good", 1, PARAMS[1], PROMPTS[1], [])]
    items = [ScheduledItem("bad", 0, 0, prompt, True), ScheduledItem("good", 1, 0, PROMPTS[1], True)]
    sampled = driver.step(items, admitted)
    assert list(sampled.failed) == ["bad"]
    assert named in sampled.failed["bad"]
    assert [row.request_id for row in sampled.rows] == ["good"]
    assert sampled.rows[0].token_ids == token_ids(expected[1])[:1]


class Refusing(EveryThird):
    """Refuses to advance past its second token."""

    def advance(self, token_ids: Sequence[int]) -> None:
        super().advance(token_ids)
        if len(self.tokens) > 1:
            raise RuntimeError("second thoughts")


def test_grammars_follow_the_output(model: Decoder) -> None:
    """A grammar that is not told of resumed or sampled tokens, or one that ends the step when it fails."""
    started: list[EveryThird] = []

    def start(spec: GrammarSpec, max_tokens: int) -> EveryThird:
        assert max_tokens == 5
        started.append(Refusing() if spec.source == "refuse" else EveryThird())
        return started[-1]

    driver = Driver(model, start_grammar=start)
    params = [SamplingParams(max_tokens=5, seed=4, grammar=GrammarSpec("regex", source)) for source in ("a", "refuse")]
    admitted = [AdmittedRow("a", 0, params[0], [1, 2], [3, 9]), AdmittedRow("b", 1, params[1], [1, 2], [])]
    items = [ScheduledItem("a", 0, 0, [1, 2, 3, 9], True), ScheduledItem("b", 1, 0, [1, 2], True)]
    first = driver.step(items, admitted)
    tokens = [row.token_ids[0] for row in first.rows]
    assert all(token % 3 == 0 for token in tokens)
    items = [ScheduledItem("a", 0, 4, tokens[:1], True), ScheduledItem("b", 1, 2, tokens[1:], True)]
    second = driver.step(items)
    assert [row.request_id for row in second.rows] == ["a"]
    assert "second thoughts" in second.failed["b"]
    assert started[0].tokens == [3, 9, tokens[0], second.rows[0].token_ids[0]]


def test_steps_without_a_sampled_row(model: Decoder) -> None:
    """A step of prefill chunks alone, or one that only releases rows."""
    driver = Driver(model)
    sampled = driver.step(
        [ScheduledItem("a", 0, 0, [1, 2, 3], False)], [AdmittedRow("a", 0, greedy(1), [1, 2, 3, 4], [])]
    )
    assert (sampled.rows, sampled.failed) == ([], {})
    assert driver.step([], released=[0]).rows == []


def test_warm_up_leaves_no_trace(model: Decoder, expected: list[list[SampledRow]]) -> None:
    """A warm-up that writes to blocks, or a context shorter than its tokens."""
    driver = Driver(model, length=64)
    before = [layer.key.clone() for layer in driver.runner._cache.layers]
    driver.runner.warm_up(1000)
    assert all(torch.equal(layer.key, key) for layer, key in zip(driver.runner._cache.layers, before, strict=True))
    [result] = driver.generate(PROMPTS[1:2], PARAMS[1:2])
    assert token_ids(result) == token_ids(expected[1])


def test_only_live_blocks_are_written(model: Decoder) -> None:
    """A token's key in the null block or in a block of another row."""
    driver = Driver(model, length=64)
    driver.generate(PROMPTS[:2], [greedy(3), greedy(3)])
    lengths = {row: len(PROMPTS[row]) + 2 for row in range(2)}  # the last token sampled is not computed
    for layer in driver.runner._cache.layers:
        written = {int(block) for block in torch.nonzero(layer.key.abs().sum(dim=(1, 2, 3)))[:, 0]}
        live = {int(block) for row in range(2) for block in driver.page_table[row, : -(-lengths[row] // 8)]}
        assert written == live
        assert 0 not in written


def test_batch_of_decodes_equals_general_path() -> None:
    """The short cut for steps of one token each differs from the general one."""
    from server.runner.input_batch import build_inputs

    page_table = np.arange(1, 41, dtype=np.int32).reshape(4, 10)
    items = [ScheduledItem("a", 2, 17, [5], True), ScheduledItem("b", 0, 0, [6], True)]
    settings = {"block_size": 8, "vocab_size": 100, "device": torch.device("cpu")}
    decode = build_inputs(items, page_table, **settings)
    mixed = build_inputs([*items, ScheduledItem("c", 1, 14, [7, 8, 9], True)], page_table, **settings)
    for name in ("slot_mapping", "positions", "seq_lens"):
        assert getattr(decode.meta, name).tolist() == getattr(mixed.meta, name).tolist()[:2]
    assert mixed.meta.slot_mapping.tolist()[2:] == [12 * 8 + 6, 12 * 8 + 7, 13 * 8]
    assert mixed.meta.query_start_loc.tolist() == [0, 1, 2, 5]
    assert mixed.last_tokens.tolist() == [0, 1, 4]
    assert mixed.meta.page_table.tolist() == [[21, 22, 23], [1, 2, 3], [11, 12, 13]]
    assert (mixed.meta.max_query_len, mixed.meta.max_seq_len, mixed.meta.num_tokens) == (3, 18, 5)
    assert (decode.meta.is_decode, mixed.meta.is_decode) == (True, False)


def test_generation_on_the_cpu_backend(expected: list[list[SampledRow]], tmp_path: Path) -> None:
    """The CPU backend's chunks or batches give other tokens than the oracle."""
    driver = Driver(load(save(make_model("llama"), tmp_path), backend="cpu"))
    results = driver.generate(PROMPTS, PARAMS, chunk=13)
    assert [token_ids(result) for result in results] == [token_ids(result) for result in expected]
