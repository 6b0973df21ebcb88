"""Which implementation serves which device."""

import importlib.util
import logging
import sys

import pytest

from kernels.backend import BACKENDS, resolve
from kernels.cpu import CpuOps
from kernels.errors import BackendUnavailable


def test_reference_serves_any_device() -> None:
    """The oracle must be at hand wherever a kernel is checked."""
    assert resolve("reference", "cpu").name == resolve("reference", "cuda:1").name == "reference"


def test_auto_on_a_cpu_is_the_cpu_backend() -> None:
    """ "auto" that picks the slow oracle, or a GPU backend on a machine without one."""
    assert isinstance(resolve("auto", "cpu"), CpuOps)
    assert type(resolve("auto", "cpu")) is type(resolve("cpu", "cpu"))


def test_falls_back_when_compiled_kernels_are_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine without a compiler that can't start, or that is slow and doesn't say why."""
    monkeypatch.setitem(sys.modules, "kernels.cpu.native_ops", None)
    with caplog.at_level(logging.WARNING, logger="kernels.backend"):
        assert type(resolve("cpu", "cpu")) is CpuOps
    assert "torch-only" in caplog.text


@pytest.mark.parametrize(("name", "device"), [("cpu", "cuda"), ("fastest", "cpu"), ("", "cpu")])
def test_refuses_what_it_cannot_serve(name: str, device: str) -> None:
    """A wrong name or device that surfaces as an AttributeError in the first step."""
    with pytest.raises(BackendUnavailable) as raised:
        resolve(name, device)
    assert name in str(raised.value)
    assert any(backend in str(raised.value) for backend in BACKENDS)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_promise_about_bits_is_kept_or_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """--batch-invariant accepted where torch's own matrix products serve, whose bits depend on the batch."""
    monkeypatch.setitem(sys.modules, "kernels.cpu.native_ops", None)
    with pytest.raises(BackendUnavailable, match="depend on the batch"):
        resolve(name, "cpu", batch_invariant=True)


@pytest.mark.parametrize(("name", "device"), [("triton", "cuda"), ("auto", "cuda:0")])
def test_missing_triton_names_the_extra(monkeypatch: pytest.MonkeyPatch, name: str, device: str) -> None:
    """A bare ImportError from deep inside for a package that is optional."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BackendUnavailable, match=r"pageturner\[triton\]"):
        resolve(name, device)
