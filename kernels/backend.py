"""Which implementation of kernels.ops serves a device. Decided once, at start."""

import importlib.util
import logging

from kernels.errors import BackendUnavailable
from kernels.ops import Ops

BACKENDS = ("auto", "cpu", "triton", "reference")

_log = logging.getLogger(__name__)


def resolve(name: str, device: str, *, batch_invariant: bool = False) -> Ops:
    """The backend called name for device ("cpu", "cuda", "cuda:0", ...).

    "auto" is "cpu" on a CPU and "triton" elsewhere. "reference" runs anywhere, slowly. Imports only what it returns.
    batch_invariant: a token's bits must not depend on what else is in its step. The compiled CPU kernels are so by
    nature, Triton's in a form of their own, the others not. Raises BackendUnavailable.
    """
    device_type = device.partition(":")[0]
    if name == "auto":
        name = "cpu" if device_type == "cpu" else "triton"
    if name == "reference":
        if batch_invariant:
            raise BackendUnavailable("backend reference multiplies with torch, whose bits depend on the batch")
        from kernels.reference import ReferenceOps

        return ReferenceOps()
    if name == "cpu":
        if device_type != "cpu":
            raise BackendUnavailable(f"backend cpu can't serve device {device}: use backend triton or reference")
        return _cpu_ops(batch_invariant=batch_invariant)
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            raise BackendUnavailable("backend triton needs the triton package: pip install 'pageturner[triton]'")
        from kernels.triton.ops import TritonOps

        return TritonOps(device, batch_invariant=batch_invariant)
    raise BackendUnavailable(f"unknown backend {name!r}: choose one of {', '.join(BACKENDS)}")


def _cpu_ops(*, batch_invariant: bool) -> Ops:
    """The compiled kernels where they load on this machine, else the torch-only ones: slower, rounded otherwise."""
    try:
        from kernels.cpu.native_ops import NativeOps

        return NativeOps()
    except (ImportError, OSError) as error:
        if batch_invariant:
            raise BackendUnavailable(f"the torch-only CPU kernels' bits depend on the batch, and: {error}") from None
        _log.warning("compiled CPU kernels are not available, torch-only ones serve instead: %s", error)
    from kernels.cpu import CpuOps

    return CpuOps()
