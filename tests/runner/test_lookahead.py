"""Steps that are launched before the tokens of the step before are known on the host."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from server.models.decoder import Decoder
from server.protocol import SamplingParams
from server.scheduler.batch import AWAITED, AdmittedRow, SampledRow, ScheduledItem
from server.transfer import Download, pack, unpack, upload
from tests.models.checkpoints import make_model, save
from tests.runner.driver import Driver, load
from tests.runner.test_model_runner import PARAMS, PROMPTS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Decoder:
    return load(checkpoint)


def generate_ahead(
    driver: Driver, prompts: Sequence[list[int]], params: Sequence[SamplingParams], *, chunk: int = 1000
) -> list[list[SampledRow]]:
    """As Driver.generate, but each step is launched before the one before it is collected."""
    admitted = [
        AdmittedRow(f"r{i}", i, p, prompt, []) for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
    ]
    results: list[list[SampledRow]] = [[] for _ in prompts]
    computed, under_way = [0] * len(prompts), deque[object]()
    while under_way or not any(results):
        items = []
        for row, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            start = computed[row]
            if start < len(prompt) + p.max_tokens - 1:
                tokens = prompt[start : start + chunk] or [AWAITED]
                computed[row] += len(tokens)
                items.append(ScheduledItem(f"r{row}", row, start, tokens, computed[row] >= len(prompt)))
        if items:
            under_way.append(driver.launch(items, admitted))
            admitted = []
        if len(under_way) > 1 or not items:
            sampled = driver.runner.collect(under_way.popleft())
            assert not sampled.failed
            for entry in sampled.rows:
                results[int(entry.request_id[1:])].append(entry)
    return results


@pytest.mark.parametrize("chunk", [7, 1000])
def test_an_awaited_token_is_the_token(model: Decoder, chunk: int) -> None:
    """Another row's token, an old one, or penalties, log-probabilities and the prompt's scores that miss it: rows reach
    their first token in different steps, so prefills and awaited tokens share steps."""
    expected = Driver(model).generate(PROMPTS, PARAMS, chunk=chunk)
    assert generate_ahead(Driver(model, lookahead=True), PROMPTS, PARAMS, chunk=chunk) == expected


def test_an_awaited_token_is_the_token_in_static_buffers(model: Decoder) -> None:
    """A captured pass that reads the placeholder: the token has to be in place before the copy to its buffer."""
    driver = Driver(model, capture=lambda run: run, lookahead=True)
    driver.runner.warm_up(16)
    assert generate_ahead(driver, PROMPTS, PARAMS) == Driver(model).generate(PROMPTS, PARAMS)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_row_that_fails_while_its_next_step_is_under_way(checkpoint: Path, backend: str) -> None:
    """An index of -1, which the backend's own sampler gives, in the next step, or a neighbor that pays for it."""
    model = load(checkpoint, backend=backend)
    expected = Driver(model).generate(PROMPTS[:1], PARAMS[:1])[0]
    driver = Driver(model, lookahead=True)
    logits = driver.runner._model.logits
    params = [PARAMS[0], SamplingParams(max_tokens=3, seed=0, presence_penalty=1.0)]
    admitted = [AdmittedRow(f"r{i}", i, p, PROMPTS[i], []) for i, p in enumerate(params)]
    prefill = [ScheduledItem(f"r{i}", i, 0, PROMPTS[i], True) for i in range(2)]
    decode = [ScheduledItem(f"r{i}", i, len(PROMPTS[i]), [AWAITED], True) for i in range(2)]
    broken = torch.tensor([[0.0], [torch.nan]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver.runner._model, "logits", lambda hidden: logits(hidden) + broken)
        first = driver.launch(prefill, admitted)
    second = driver.launch(decode)
    assert list(driver.runner.collect(first).failed) == ["r1"]
    assert driver.runner.collect(second).rows[0].token_ids == expected[1].token_ids


def test_what_is_packed_comes_out() -> None:
    """One copy for a step's arrays: an offset, dtype or shape mixed up, an empty array, an unaligned address."""
    arrays = [
        np.arange(5, dtype=np.int64),
        np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int32),
        np.array([], dtype=np.int64),
        np.array([0.5, 2.0], dtype=np.float32),
        np.array([True, False, True]),
        np.array([2**63 + 1], dtype=np.uint64).view(np.int64),
    ]
    packed = torch.zeros(sum(-(-array.nbytes // 16) * 16 for array in arrays), dtype=torch.uint8)
    pack(arrays, packed.numpy())
    tensors = unpack(packed, arrays)
    for array, tensor, direct in zip(arrays, tensors, upload(arrays, torch.device("cpu")), strict=True):
        assert torch.equal(tensor, direct)
        assert (tensor.dtype, tensor.shape) == (direct.dtype, array.shape)
        assert (tensor.data_ptr() - packed.data_ptr()) % 16 == 0 or not len(array)
    assert [tensor.tolist() for tensor in Download(tensors).wait()] == [array.tolist() for array in arrays]


def test_transfers_without_a_gpu_need_no_pinned_memory() -> None:
    """A machine without a driver can't pin memory, and the device that only knows shapes needs none."""
    [shape] = upload([np.zeros((3, 2), np.int32)], torch.device("meta"))
    assert (shape.shape, shape.dtype, shape.device.type) == ((3, 2), torch.int32, "meta")
