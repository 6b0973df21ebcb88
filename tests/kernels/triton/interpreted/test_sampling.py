"""The sampling kernel against the definition of each limit, and against the distribution that it must draw from."""

import numpy as np
import pytest
import torch

from kernels.triton.sampling import sample

VOCAB = 300


def random_logits(rows: int, vocab_size: int = VOCAB, *, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def draw(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    first_position: int = 0,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token a row; rows differ in their positions only, unless those are given."""
    rows = len(logits)
    return sample(
        logits,
        temperature=torch.full((rows,), temperature),
        top_k=torch.full((rows,), top_k, dtype=torch.int32),
        top_p=torch.full((rows,), top_p),
        min_p=torch.full((rows,), min_p),
        seeds=torch.full((rows,), seed),
        positions=torch.arange(first_position, first_position + rows) if positions is None else positions,
    )


def kept(logits: torch.Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """float64 probabilities of one row after its limits, from a sort."""
    scores = logits.double() / temperature
    order = scores.argsort(descending=True)
    probs = scores.softmax(-1)[order]
    keep = torch.ones_like(probs, dtype=torch.bool)
    if top_k > 0:
        keep[top_k:] = False
    mass = (probs * keep).cumsum(0)
    keep &= (mass - probs) < top_p * mass[-1]
    keep &= probs >= min_p * probs[0]
    result = torch.zeros_like(probs)
    result[order] = probs * keep / (probs * keep).sum()
    return result


LIMITS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": VOCAB},
    {},
    {"top_p": 0.1},
    {"top_p": 0.8},
    {"top_p": 0.999},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.5},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
]


def philox(seed: int, counter: np.ndarray) -> np.ndarray:
    """First word of Philox4x32-10. counter: uint64[4, N], each < 2**32. Returns uint64[N]."""
    mask = np.uint64(0xFFFFFFFF)
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32 & 0xFFFFFFFF)]
    c = list(counter)
    for _ in range(10):
        high, low = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(low >> np.uint64(32)) ^ c[1] ^ key[0], low & mask, (high >> np.uint64(32)) ^ c[3] ^ key[1], high & mask]
        key = [key[0] + np.uint64(0x9E3779B9) & mask, key[1] + np.uint64(0xBB67AE85) & mask]
    return c[0]


def gumbel(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    """float64[V]: the noise that the kernel's docstring promises to (seed, position)."""
    ids = np.arange(vocab_size, dtype=np.uint64)
    zeros = np.zeros_like(ids)
    bits = philox(seed, np.stack([ids, zeros + np.uint64(position), zeros, zeros]))
    return torch.from_numpy(-np.log(-np.log1p(-(bits + 0.5) / 2.0**32)))


@pytest.mark.parametrize("temperature", [0.6, 1.5])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_draws_are_the_definition(limits: dict[str, float], temperature: float) -> None:
    """A cut one token too far, a top-p of the whole instead of what top-k left, a limit before the temperature, noise
    that isn't Gumbel's: argmax of log-probability and noise over what a sort keeps must be the very token drawn."""
    settings = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | limits
    logits = random_logits(4, seed=len(str(limits)))
    tokens = draw(logits, seed=2**40 + 7, first_position=1000, **settings)  # type: ignore[arg-type]
    noise = [gumbel(2**40 + 7, 1000 + i, VOCAB) for i in range(4)]
    want = [(kept(row, **settings).log() + g).argmax() for row, g in zip(logits, noise, strict=True)]  # type: ignore[arg-type]
    assert tokens.tolist() == torch.stack(want).tolist()


def test_the_noise_is_gumbel() -> None:
    """The oracle's own generator: Random123's published vector for a zero key and counter, then the distribution."""
    assert philox(0, np.zeros((4, 1), dtype=np.uint64))[0] == 0x6627E8D5
    noise = gumbel(3, 5, 100_000).sort().values
    exact = torch.exp(-torch.exp(-noise))
    distance = (exact - (torch.arange(100_000) + 0.5) / 100_000).abs().max()
    assert distance < 1.63 / 100_000**0.5, "Kolmogorov-Smirnov at 1 %"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_greedy_takes_the_lowest_of_equals(dtype: torch.dtype) -> None:
    """Ties across tiles: the token must not depend on the tile width."""
    logits = torch.zeros(3, 2500, dtype=dtype)
    logits[0, [1300, 77, 2400]] = 3
    logits[1, [2499]] = 1
    assert draw(logits, temperature=0.0).tolist() == [77, 2499, 0]


def test_a_draw_depends_on_seed_and_position_only() -> None:
    """Noise keyed by the row of the batch: a request would change with its company, or after a preemption."""
    logits = random_logits(1).expand(8, -1).contiguous()
    positions = torch.tensor([5, 9, 5, 1, 9, 5, 2**31 + 5, 2**20])
    tokens = draw(logits, positions=positions, temperature=2.0, seed=-3)
    alone = draw(logits[:1], positions=positions[1:2], temperature=2.0, seed=-3)
    assert tokens[0] == tokens[2] == tokens[5]
    assert tokens[1] == tokens[4] == alone[0]
    many = random_logits(1).expand(12, -1).contiguous()
    assert not torch.equal(draw(many, seed=1), draw(many, seed=2))
    assert not torch.equal(draw(many, seed=1), draw(many, seed=1 + 2**32)), "the high half of the seed counts"


def test_rows_are_independent() -> None:
    """Greedy, limited and unlimited rows share a launch."""
    logits = random_logits(4, seed=2)
    together = sample(
        logits,
        temperature=torch.tensor([0.0, 1.0, 0.7, 1.3]),
        top_k=torch.tensor([0, 3, 0, 0], dtype=torch.int32),
        top_p=torch.tensor([1.0, 1.0, 0.5, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.3]),
        seeds=torch.tensor([1, 2, 3, 4]),
        positions=torch.tensor([10, 20, 30, 40]),
    )
    alone = [
        draw(logits[0:1], temperature=0.0, seed=1, first_position=10),
        draw(logits[1:2], temperature=1.0, top_k=3, seed=2, first_position=20),
        draw(logits[2:3], temperature=0.7, top_p=0.5, seed=3, first_position=30),
        draw(logits[3:4], temperature=1.3, min_p=0.3, seed=4, first_position=40),
    ]
    assert together.tolist() == torch.cat(alone).tolist()


@pytest.mark.parametrize("top_k", [0, 3])
def test_masked_tokens_are_never_drawn(top_k: int) -> None:
    """A grammar leaves two tokens; a top-k of three must not take a third."""
    logits = torch.full((12, VOCAB), -torch.inf)
    logits[:, [17, 250]] = 0.5
    assert set(draw(logits, top_k=top_k).tolist()) == {17, 250}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite(value: float) -> None:
    """The step must be able to tell a broken row from token 0."""
    logits = random_logits(2)
    logits[1, 250] = value
    assert draw(logits).tolist()[1] == -1
    assert draw(torch.full((1, VOCAB), -torch.inf)).tolist() == [-1]
    assert draw(logits, temperature=0.0).tolist() == [int(logits[0].argmax()), -1]
