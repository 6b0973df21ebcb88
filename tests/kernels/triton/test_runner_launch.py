"""What the model runner does between two tokens of a GPU: a whole launch on tensors that know only their shapes."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from server.protocol import SamplingParams
from server.runner.kv_cache import kv_cache_spec
from server.runner.model_runner import ModelRunner
from server.scheduler.batch import AWAITED, AdmittedRow, ScheduledBatch, ScheduledItem
from tests.kernels.triton.recording import recording
from tests.kernels.triton.test_launches import WAITS, decoder

META = torch.device("meta")
SETTINGS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"top_p": 0.9, "logprobs": 3},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"logit_bias": {5: 1.0}, "min_tokens": 3, "stop_token_ids": (7,)},
    {"prompt_logprobs": 2, "logprobs": 0},
]


class NeverWaits(TorchDispatchMode):
    """Refuses what stops the host until the device has caught up."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        assert name not in WAITS, f"{name} waits for the device"
        result = func(*args, **kwargs)
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            does_not_wait = kwargs.get("non_blocking") or args[2:] == (True,)
            assert source.device == result.device or does_not_wait, f"{name} from {source.device} waits for the device"
        return result


def runner(num_rows: int = 8, *, batch_invariant: bool = False) -> ModelRunner:
    model = decoder(2, batch_invariant=batch_invariant)
    spec = kv_cache_spec(model.spec, block_size=16, dtype=torch.bfloat16)
    cache = model.ops.allocate_kv_cache(spec, num_blocks=100, device=META)
    table = np.ones((num_rows, 16), np.int32)
    return ModelRunner(
        model=model, kv_cache=cache, page_table=table, max_num_seqs=num_rows, device=META, lookahead=True
    )


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings))
def test_a_launch_never_waits_for_the_device(settings: dict[str, object]) -> None:
    """An .item(), .tolist() or blocking copy slipped into the step: the GPU idles while the host reads a number.

    Admission, a chunk, the prompt's end beside a decode, and a decode step whose tokens nobody on the host knows.
    """
    params = SamplingParams(max_tokens=9, **{"seed": 1, **settings})
    prompt = list(range(40))
    admitted = [AdmittedRow(f"r{i}", i, params, prompt, []) for i in range(3)]
    steps = [
        ScheduledBatch(
            1, [ScheduledItem("r0", 0, 0, prompt, True), ScheduledItem("r1", 1, 0, prompt[:30], False)], admitted, []
        ),
        ScheduledBatch(
            2, [ScheduledItem("r0", 0, 40, [AWAITED], True), ScheduledItem("r1", 1, 30, prompt[30:], True)], [], []
        ),
        ScheduledBatch(3, [ScheduledItem(f"r{i}", i, 41 - i, [AWAITED], True) for i in range(2)], [], [2]),
    ]
    subject = runner()
    for batch in steps:
        with torch.inference_mode(), recording() as launches, NeverWaits():
            handle = subject.launch(batch)
        assert not handle.failed
        assert [launch.name for launch in launches].count("sample_kernel") == 1


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_no_step_compiles_what_warm_up_did_not(batch_invariant: bool) -> None:
    """A kernel compiled while somebody waits for a token: the sampler's, or a larger batch's."""
    num_rows, prompt = 150, list(range(200))
    subject = runner(num_rows, batch_invariant=batch_invariant)
    with recording() as launches:
        subject.warm_up(64)
    known = {launch.key() for launch in launches}
    params = SamplingParams(max_tokens=20, seed=1)
    admitted = [AdmittedRow(f"r{i}", i, params, prompt, []) for i in range(num_rows)]
    generator = random.Random(0)
    for step_id in range(40):
        rows = generator.sample(range(num_rows), generator.choice([1, 2, 30, 33, 64, 65, 128, 150]))
        chunks = generator.choice([0, 0, 1, 3])  # requests that don't decode
        items = [ScheduledItem(f"r{row}", row, 200, [AWAITED], True) for row in rows[chunks:]]
        items += [ScheduledItem(f"r{row}", row, 0, prompt[: generator.randint(2, 200)], True) for row in rows[:chunks]]
        with recording() as launches:
            handle = subject.launch(ScheduledBatch(step_id, items, admitted, []))
        assert not handle.failed
        admitted = []
        new = {launch.name for launch in launches if launch.key() not in known}
        assert not new, f"{len(items)} requests, {chunks} of them chunks: compiles {new}"
