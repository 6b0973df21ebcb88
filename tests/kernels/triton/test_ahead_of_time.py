"""Every shipped kernel variant compiles for every target, and needs no more of the machine than it did.

To accept new figures: `python -m tests.kernels.triton.aot`, and look at the difference.
"""

import json
from functools import cache
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget

from kernels.triton.decode_attention import decode_attention
from kernels.triton.launch import Target
from tests.kernels.triton.aot import GOLDEN, compile_for
from tests.kernels.triton.recording import Launch, recording
from tests.kernels.triton.variants import FP8, TARGETS, decode_config, empty, kv_layer, shipped, step

WIDE = ("decode", "prefill", "invariant-", "rope", "rms", "gated", "matmul", "quantized")
"""Kernels that read 16 bytes a thread at once."""
GOLDEN_REPORT: dict[str, Any] = json.loads(GOLDEN.read_text())


@cache
def launches(arch: str) -> dict[str, Launch]:
    return dict(shipped(TARGETS[arch]))


@pytest.mark.parametrize(
    ("arch", "name"), [(arch, name) for arch, variants in GOLDEN_REPORT["targets"].items() for name in variants]
)
def test_variant_compiles_and_fits(arch: str, name: str) -> None:
    """A kernel that only the interpreter accepts, that spills, or that has lost its wide loads or matrix unit."""
    golden = GOLDEN_REPORT["targets"][arch][name]
    now = compile_for(launches(arch)[name], arch)
    assert now["matrix_unit"] == golden["matrix_unit"]
    if name.startswith(("decode", "merge", "invariant", "rope", "rms", "gated")):
        assert now["spill_bytes"] == 0
    if name.startswith("decode"):
        assert now["shared_bytes"] <= 64 * 1024
    if arch.startswith("sm_") and name.startswith(WIDE):
        assert now["wide_loads"]
    if triton.__version__ == GOLDEN_REPORT["triton"]:  # another compiler allocates other registers
        assert now["spill_bytes"] == 0
        assert now["registers"] <= 1.1 * golden["registers"]
        assert now["shared_bytes"] <= 1.1 * golden["shared_bytes"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_batch_invariant_form_is_compiled_as_written(arch: str) -> None:
    """Products and sums that the compiler fuses here and not there: splits merged in registers and in scratch differ.

    The ordinary prefill kernel shows that it would: some of its copies of the same lines are fused.
    """
    target = GPUTarget("cuda", int(arch[3:]), 32)
    for name, fuses in (
        ("invariant-d128", False), ("invariant_merge-d128", False), ("invariant-d256-window-cap", False),
        ("prefill-d128", True),
    ):  # fmt: skip
        launch = launches(arch)[name]
        options = {"enable_fp_fusion": True} | launch.options
        text = triton.compile(launch.source(), target=target, options=options).asm["ptx"]
        assert ("fma.rn.f32" in text) == fuses, name


@pytest.mark.parametrize("arch", TARGETS)
def test_the_golden_report_is_complete(arch: str) -> None:
    """A new variant that nobody compiles, or the report of one that is gone."""
    assert set(launches(arch)) == set(GOLDEN_REPORT["targets"][arch])


def test_fp8_on_sm_80_is_not_a_thing_to_try() -> None:
    """Why the dispatch refuses it (test_fp8_cache): the compiler would, in the middle of the first step."""
    q = empty(8, 32, 128)
    with recording() as recorded:
        decode_attention(
            q, kv_layer(128, dtype=FP8), step([1] * 8), q.flatten(1),
            scale=0.1, config=decode_config(TARGETS["sm_80"], 128), num_sms=108,
        )  # fmt: skip
    assert not Target("sm_80", 108).has_fp8
    with pytest.raises(Exception, match="fp8e4nv not supported"):
        triton.compile(recorded[0].source(), target=GPUTarget("cuda", 80, 32), options=dict(recorded[0].options))
