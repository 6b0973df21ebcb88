"""The backends in plain torch, one test each. The compiled and the Triton ones have folders of their own."""

import pytest

from kernels.cpu import CpuOps
from kernels.ops import Ops
from kernels.reference import ReferenceOps


@pytest.fixture(params=[ReferenceOps, CpuOps], ids=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    backend: Ops = request.param()
    return backend
