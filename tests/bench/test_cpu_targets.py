"""Targets C1 to C6: the arithmetic from seconds to verdicts, and the stopwatch in the engine's loop."""

import time

import gguf
import numpy as np
import pytest

from benchmarks.cpu_targets.engine import FORWARD, LOOP, Engine, Step, Stopwatch, decode_steps, typical, write_q8_0
from benchmarks.cpu_targets.measure import BF16, Q4_1, Q8_0, Timing
from benchmarks.cpu_targets.verdicts import Verdict, gain, prefill_flop, step_bytes
from server.config import ModelConfig


def test_bytes_and_flop_are_the_models():
    """A share of the bandwidth over weights that are counted twice or in another format: 135 M of them in all."""
    assert step_bytes(BF16) == pytest.approx(2 * 134.5e6 + 160 * 23040, rel=1e-3)
    assert step_bytes(Q8_0) / step_bytes(BF16) == pytest.approx(34 / 64, rel=0.02)  # KV is in 16 bits
    assert step_bytes(Q4_1) == pytest.approx(66.4e6 + 30.1e6 + 160 * 23040, rel=1e-3)
    assert prefill_flop(512) == pytest.approx(2 * 512 * 106.2e6, rel=0.1)


def test_gains_are_of_tokens_not_of_steps():
    """Batch 8 in twice the time counted as half the speed; or runs paired with those of another minute."""
    one, eight = Timing(1.0, [1.0, 3.0, 1.0], {}), Timing(2.0, [2.0, 6.0, 2.0], {})
    assert gain(eight, one, requests=8) == pytest.approx(4.0)
    assert gain(one, eight) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("verdict", "cells"),
    [
        (Verdict("C1", "a", 0.7, 0.7, "%"), ["C1", "a", ">= 70.0%", "70.0%", "holds"]),
        (Verdict("C2", "a", 1.69, 1.7, "x"), ["C2", "a", ">= 1.70 x", "1.69 x", "MISSED"]),
        (Verdict("C6", "a", 0.051, 0.05, "%", most=True), ["C6", "a", "<= 5.0%", "5.1%", "MISSED"]),
    ],
)
def test_verdicts_look_the_right_way(verdict, cells):
    """A target that is a least treated as a most: what is missed holds."""
    assert verdict.cells() == cells


def test_parts_exclude_the_parts_within_them():
    """The forward pass is counted in `launch`, too: the shares add up to more than the step."""
    watch = Stopwatch()
    inner = watch.timed("inner", lambda: time.sleep(0.02))
    watch.timed("outer", lambda: (time.sleep(0.01), inner()))()
    assert 0.01 <= watch.parts["outer"] < 0.02 <= watch.parts["inner"]
    assert Step(1, 1, 0.5, {FORWARD: 0.4, LOOP: 0.1}).overhead == pytest.approx(0.2)


def test_the_steps_of_the_real_engine():
    """The engine's insides were renamed, or a step's parts no longer add up: C6 measures nothing."""
    steps = Engine(ModelConfig()).run(3, prompt_len=20, output_len=6)
    decoding = decode_steps(steps, 3)
    assert [step.num_tokens for step in steps] == [60, 3, 3, 3, 3, 3]
    assert len(decoding) == 5
    one = typical(decoding)
    wanted = {FORWARD, LOOP, "schedule", "build inputs", "sample", "launch, the rest", "collect", "update", "send"}
    assert wanted <= {name for name, seconds in one.parts.items() if seconds > 0}
    for step in decoding:
        assert sum(step.parts.values()) == pytest.approx(step.seconds)
        assert 0 < step.overhead < 1


def test_q8_0_copies_are_the_same_model(tmp_path):
    """The 8-bit figure is of other weights, or of a file that lost its tokenizer or its norms."""
    source, target = tmp_path / "a.gguf", tmp_path / "b.gguf"
    dense = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_context_length(77)
    writer.add_token_list(["a", "b"])
    writer.add_tensor(
        "m", gguf.quants.quantize(dense, gguf.GGMLQuantizationType.Q4_1), raw_dtype=gguf.GGMLQuantizationType.Q4_1
    )
    writer.add_tensor("n", dense[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_q8_0(source, target)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(target)
    assert [tensor.tensor_type.name for tensor in after.tensors] == ["Q8_0", "F32"]
    assert {n: f.contents() for n, f in before.fields.items()} == {n: f.contents() for n, f in after.fields.items()}
    pairs = zip(before.tensors, after.tensors, strict=True)
    for old, new in pairs:
        a, b = (gguf.quants.dequantize(t.data, t.tensor_type) for t in (old, new))
        np.testing.assert_allclose(a, b, atol=0.02)
