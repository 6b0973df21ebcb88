"""RoPE frequencies and tables, by their published values and against transformers."""

import math

import pytest
import torch

from server.models.rope import attention_factor, dynamic_base, inverse_frequencies, rope_table
from server.models.spec import RopeSpec

LLAMA3 = RopeSpec(
    500000.0, 128, kind="llama3", factor=8.0, original_max_position=8192, low_freq_factor=1.0, high_freq_factor=4.0
)
DYNAMIC = RopeSpec(10000.0, 64, kind="dynamic", factor=2.0, original_max_position=2048)


@pytest.mark.parametrize(
    ("index", "frequency"),
    [(28, 0.00321144599), (29, 0.00216657076), (32, 0.000524846161), (35, 9.55621235e-05)],
)
def test_llama3_frequencies(index: int, frequency: float) -> None:
    """The bands of Llama 3.1's rule: kept, blended and stretched waves."""
    assert inverse_frequencies(LLAMA3)[index].item() == pytest.approx(frequency, rel=1e-6)


@pytest.mark.parametrize(("length", "base"), [(1, 10000.0), (2048, 10000.0), (4096, 31082.24)])
def test_dynamic_base(length: int, base: float) -> None:
    """The base grows only beyond the trained context."""
    assert dynamic_base(DYNAMIC, length) == pytest.approx(base, abs=0.01)


def test_dynamic_table_rotates_each_position_by_its_own_length() -> None:
    """A position's rotation that depends on what comes after it: chunked and whole prompts would differ."""
    table = rope_table(DYNAMIC, 2100)
    for position in (5, 2047, 2048, 2099):
        angles = position * inverse_frequencies(DYNAMIC, seq_len=position + 1)
        expected = torch.cat([angles.cos(), angles.sin()])
        torch.testing.assert_close(table[position], expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({"factor": 4.0}, 1.138629),
        ({"factor": 16.0}, 1.277259),
        ({"factor": 0.5}, 1.0),
        ({"factor": 4.0, "attention_factor": 0.7}, 0.7),
        (
            {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0},
            (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1),
        ),
    ],
)
def test_yarn_attention_factor(settings: dict[str, float], factor: float) -> None:
    """YaRN's scale of cos and sin: from the factor, given outright, or from DeepSeek's two keys."""
    spec = RopeSpec(10000.0, 64, kind="yarn", original_max_position=2048, **settings)
    assert attention_factor(spec) == pytest.approx(factor, abs=1e-6)
    assert rope_table(spec, 1)[0, 0].item() == pytest.approx(factor, abs=1e-6)


def test_freq_factors_divide() -> None:
    """A GGUF's rope_freqs.weight multiplied in, or ignored."""
    plain = RopeSpec(500000.0, 128)
    factors = inverse_frequencies(plain) / inverse_frequencies(LLAMA3)
    torch.testing.assert_close(rope_table(plain, 50, freq_factors=factors), rope_table(LLAMA3, 50), atol=1e-5, rtol=0)


def test_table_layout() -> None:
    """Cosines and sines swapped or interleaved."""
    table = rope_table(RopeSpec(10000.0, 8), 4)
    assert table.shape == (4, 8)
    assert table.dtype == torch.float32
    assert table[0].tolist() == [1.0] * 4 + [0.0] * 4
    assert table[1, 0].item() == pytest.approx(math.cos(1.0))
    assert table[1, 4].item() == pytest.approx(math.sin(1.0))
