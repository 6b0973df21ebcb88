"""The compiled kernels are tested where they can be built; without a compiler the fallback's own tests remain."""

import pytest

from kernels.cpu.build import NativeBuildError
from kernels.cpu.native_ops import NativeOps


@pytest.fixture(scope="session")
def native() -> NativeOps:
    try:
        return NativeOps()
    except NativeBuildError as error:
        pytest.skip(f"no compiled kernels here: {error}")
