"""Deliberate faults, each of which at least one of the suite's own tests must notice.

The package is copied, one line of the copy is changed, and the test named runs against it.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from triton.runtime.errors import InterpreterError

import kernels.triton
from kernels.triton.ops import TritonOps
from tests.kernels.triton.interpreted import (
    test_attention,
    test_batch_invariance,
    test_int64,
    test_quantized_matmul,
    test_rope_write,
    test_sampling,
    test_traffic,
)
from tests.kernels.triton.interpreted.audit import audited

SOURCE = Path(kernels.triton.__file__).parent
PACKAGE = "mutated_kernels"
TESTED = (test_attention, test_rope_write, test_quantized_matmul, test_int64, test_traffic)


@pytest.fixture
def mutate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str, str], ModuleType]]:
    """mutate(file, old, new) makes the suite's tests run on a copy of kernels.triton with that one change."""

    def apply(file: str, old: str, new: str) -> ModuleType:
        folder = tmp_path / PACKAGE
        folder.mkdir()
        for path in SOURCE.glob("*.py"):
            text = path.read_text()
            if path.name == file:
                assert text.count(old) == 1, f"{file} holds {text.count(old)} of {old!r}: name one that is there once"
                text = text.replace(old, new)
            (folder / path.name).write_text(text.replace("from kernels.triton.", f"from {PACKAGE}."))
        ops_module = importlib.import_module(f"{PACKAGE}.ops")
        for module in TESTED:
            monkeypatch.setattr(module, "OPS", ops_module.TritonOps("cpu"))
        for module, name in ((test_attention, "INVARIANT"), (test_batch_invariance, "OPS")):
            monkeypatch.setattr(module, name, ops_module.TritonOps("cpu", batch_invariant=True))
        monkeypatch.setattr(test_sampling, "sample", importlib.import_module(f"{PACKAGE}.sampling").sample)
        return ops_module

    monkeypatch.syspath_prepend(str(tmp_path))
    yield apply
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def attention(batch: str) -> Callable[..., None]:
    return lambda _: test_attention.test_every_batch_in_every_dtype(batch, "fp32")


def far_attention(folder: Path) -> None:
    """Under the audit: a wrapped offset must be caught before it is followed."""
    with audited():
        test_int64.test_attention_beyond_2_31_elements("decode_uneven", folder)


def window(batch: str) -> Callable[..., None]:
    return lambda _: test_attention.test_sliding_window(batch, 16)


def product(_: Path) -> None:
    """Under the audit: a load beyond the weights must be caught before it happens."""
    with audited():
        test_batch_invariance.test_a_product_is_the_product()


FAULTS: dict[str, tuple[str, str, str, Callable[[Path], None]]] = {
    "decode mask off by one": (
        "decode_attention.py",
        "(keys_at[None, :] <= positions[:, None])",
        "(keys_at[None, :] < positions[:, None])",
        attention("decode"),
    ),
    "prefill mask off by one": (
        "prefill_attention.py",
        "(keys_at[None, :] <= positions[:, None])",
        "(keys_at[None, :] <= positions[:, None] + 1)",
        attention("prefill"),
    ),
    "prefill interior one key too long": (
        "prefill_attention.py",
        "(first_position + 1) // TILE * TILE",
        "(first_position + TILE) // TILE * TILE",
        attention("long_chunk"),
    ),
    "wrong block stride": (
        "decode_attention.py",
        "*value.stride()[:3]",
        "*value.stride()[1:4]",
        attention("decode"),
    ),
    "missing other": (
        "attention_tile.py",
        "mask=mask, other=0.0",
        "mask=mask",
        attention("decode"),
    ),
    "int32 offset": (
        "decode_attention.py",
        "mask=live, other=0).to(tl.int64)",
        "mask=live, other=0)",
        far_attention,
    ),
    "wrong split merge": (
        "decode_attention.py",
        "weights = tl.exp2(lse - anchor)",
        "weights = tl.exp(lse - anchor)",
        attention("decode_uneven"),
    ),
    "a split's first work item": (
        "decode_attention.py",
        "first_work = tl.sum(tl.where(requests < request, splits, 0), axis=0)",
        "first_work = tl.sum(tl.where(requests <= request, splits, 0), axis=0)",
        attention("decode_uneven"),
    ),
    "decode window one key wide of the mark": (
        "decode_attention.py",
        "first_key = tl.maximum(seq_len - query_len - (WINDOW - 1), 0)",
        "first_key = tl.maximum(seq_len - query_len - (WINDOW - 2), 0)",
        window("decode_uneven"),
    ),
    "keys read and thrown away": (
        "decode_attention.py",
        "live = keys_at < high",
        "live = keys_at < high + TILE",
        lambda _: test_traffic.test_decode_reads_each_key_and_value_once("decode", 0, batch_invariant=False),
    ),
    "q's norm on k": (
        "kv_write.py",
        "tl.where(is_q, first * inverse",
        "tl.where(is_q | is_k, first * inverse",
        lambda _: test_rope_write.test_qk_norm((True, False), torch.float32),
    ),
    "nibbles swapped": (
        "quantized_matmul.py",
        "high = low >> 4\n            low = low & 15",
        "high = low & 15\n            low = low >> 4",
        lambda _: test_quantized_matmul.test_kinds_and_shapes("Q4_1", torch.float32, 1, 33, 64),
    ),
    "the product's last step unmasked": (
        "matmul.py",
        "live = (start + steps < K)[None, :]",
        "live = (start + steps < K + TILE_K)[None, :]",
        product,
    ),
    "every split is the first": (
        "invariant_attention.py",
        "first_split += own_split",
        "first_split += own_split * 0",
        lambda _: test_attention.test_batch_invariant_form("decode_uneven", 0),
    ),
    "top-p of the whole": (
        "sampling.py",
        "mass += tl.sum(tl.where(keys <= cut, tl.exp(scores), 0.0), axis=0)",
        "mass += tl.sum(tl.exp(scores), axis=0)",
        lambda _: test_sampling.test_draws_are_the_definition({"top_k": 20, "top_p": 0.5}, 1.5),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, mutate: Callable[[str, str, str], ModuleType], tmp_path: Path) -> None:
    """A suite that would pass broken kernels."""
    file, old, new, check = FAULTS[fault]
    check(tmp_path)
    mutate(file, old, new)
    assert not isinstance(test_attention.OPS, TritonOps)
    with pytest.raises((AssertionError, InterpreterError)) as noticed:
        check(tmp_path)
    assert isinstance(noticed.value, AssertionError) or "AuditError" in str(noticed.value)
