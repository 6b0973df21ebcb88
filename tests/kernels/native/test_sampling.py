"""The compiled sampler's own corners. What it draws is tested where the sampler of server.sampling is, with both."""

import pytest
import torch

from kernels.cpu.native_ops import NativeOps
from server.sampling.fused import FusedSampler
from server.sampling.sampler import choose
from tests.sampling.test_sampler import MIXED, random_logits, row

SIZES = [1, 15, 16, 17, 255, 257, 5000]


def sample(ops: NativeOps, logits: torch.Tensor, **settings: float) -> list[int]:
    """Row i at position i."""
    n = len(logits)
    values = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0} | settings
    reals = {name: torch.full((n,), values[name]) for name in ("temperature", "top_p", "min_p")}
    top_k = torch.full((n,), values["top_k"], dtype=torch.int32)
    assert ops.sampler is not None
    seeds, positions = torch.full((n,), 3), torch.arange(n)
    return ops.sampler(logits, **reals, top_k=top_k, seeds=seeds, positions=positions).tolist()


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_a_choice(native: NativeOps, bad: float, settings: dict[str, float]) -> None:
    """A token out of NaN, of +inf, or of a row in which everything is banned; or a neighbor that pays for it."""
    logits = torch.zeros(3, 40)
    logits[:, 7] = 90.0
    logits[1] = -torch.inf
    logits[1, 39] = bad
    assert sample(native, logits, **settings) == [7, -1, 7]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.01}, {"top_k": 1}, {"top_p": 1e-6}])
def test_the_last_token_of_any_vocabulary(native: NativeOps, size: int, settings: dict[str, float]) -> None:
    """A vocabulary that is no multiple of the vectors: its last tokens never drawn, or ones beyond it."""
    rows = torch.zeros(2, 3 * size).as_strided((2, size), (3 * size, 1))
    rows[:, -1] = 50.0
    assert sample(native, rows, **settings) == [size - 1] * 2


@pytest.mark.parametrize("settings", [{}, {"top_k": 40}, {"top_p": 0.999}, {"top_p": 0.7, "temperature": 3.0}])
def test_masked_tokens_are_never_drawn(native: NativeOps, settings: dict[str, float]) -> None:
    """A grammar's -inf that gets a weight where rounding meets the end of a row or of a chunk."""
    logits = torch.randn(400, 3000, generator=torch.Generator().manual_seed(0))
    logits[:, ::7] = -torch.inf
    logits[:, 2000:] = -torch.inf
    drawn = torch.tensor(sample(native, logits, **settings))
    assert logits[torch.arange(400), drawn].isfinite().all()
    assert len(drawn.unique()) > 30


def test_zeros_of_both_signs_are_equal(native: NativeOps) -> None:
    """Equal logits that don't rank by their ids, because their bits differ."""
    logits = torch.tensor([[-3.0, -0.0, 0.0], [-0.0, -3.0, 0.0]])
    assert sample(native, logits, top_k=1) == sample(native, logits, temperature=0.0) == [1, 0]


def test_refuses_rows_with_gaps(native: NativeOps) -> None:
    """Another tensor's numbers taken for logits."""
    with pytest.raises(ValueError, match="float32 rows"):
        sample(native, torch.zeros(4, 6).t())


def test_a_seed_means_the_same_with_and_without_a_compiler(native: NativeOps) -> None:
    """Definitions that differ between this sampler and the one of server.sampling, beyond the last bits of a sum."""
    assert native.sampler is not None
    fused = FusedSampler(native.sampler, torch.device("cpu"))
    same = total = 0
    for trial in range(40):
        rows = [row(5000, seed=trial * 10 + i, **MIXED[i]) for i in range(len(MIXED))]
        logits = random_logits(len(MIXED), 5000, seed=trial, coarse=trial % 2 == 0)
        positions = [trial] * len(rows)
        compiled = choose(logits.clone(), rows, positions, fused=fused).token_ids
        plain = choose(logits.clone(), rows, positions).token_ids
        same += int((compiled == plain).sum())
        total += len(rows)
    assert same >= total - 2, f"{same} of {total}"
