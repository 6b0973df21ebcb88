"""A masked load without `other` leaves its inactive lanes undefined on a GPU; the interpreter makes them 0.

Here they are garbage, so that a kernel which relies on them fails.
"""

from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def undefined_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = interpreter.InterpreterBuilder
    load = builder.create_masked_load

    def poisoned(self: Any, pointers: Any, mask: Any, other: Any, *args: Any) -> Any:
        result = load(self, pointers, mask, other, *args)
        if other is None:
            inactive = ~np.broadcast_to(mask.data, result.data.shape).astype(bool)
            if inactive.any():
                result.data = result.data.copy()
                result.data[inactive] = np.nan if result.data.dtype.kind == "f" else np.iinfo(result.data.dtype).max
        return result

    monkeypatch.setattr(builder, "create_masked_load", poisoned)
