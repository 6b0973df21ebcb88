"""Families whose whole forward pass is one call of the compiled library."""

from pathlib import Path

import pytest
import torch

from kernels.backend import resolve
from server.models.decoder import Decoder
from tests.models.checkpoints import CASES, make_model, save
from tests.runner.driver import Driver, greedy, load

PROMPTS = [list(range(3, 40)), [200, 5, 17] * 13, [9]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_family_is_served_in_one_call_with_the_same_results(
    case: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family that the fused form leaves out without a word, or computes in other bits: prompts in chunks, decode."""
    if resolve("cpu", "cpu").fuse_decoder is None:
        pytest.skip("no compiled kernels here")
    sizes = {"head_dim": 32} if case == "qwen3" else {}  # the compiled cache takes multiples of 16
    path = save(make_model(case, **sizes), tmp_path)
    params = [greedy(10, logprobs=3, prompt_logprobs=1) for _ in PROMPTS]
    single = load(path, backend="cpu", dtype=dtype)
    monkeypatch.setattr(single.ops, "fuse_decoder", None)
    expected = Driver(single).generate(PROMPTS, params, chunk=11)
    fused = load(path, backend="cpu", dtype=dtype)
    monkeypatch.setattr(Decoder, "layer_by_layer", None)
    assert Driver(fused).generate(PROMPTS, params, chunk=11) == expected
