"""The backend's own sampler, fed with rows instead of tensors."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.ops import Sampler
from server.sampling.row_state import SamplingRow
from server.transfer import upload


class FusedSampler:
    """All rows of a step in one launch. Written by: itself (what it remembers of the newest step's rows)."""

    def __init__(self, sampler: Sampler, device: torch.device) -> None:
        self._sampler = sampler
        self._device = device
        self._rows: Sequence[SamplingRow] = ()
        self._settings: dict[str, torch.Tensor] = {}

    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingRow], positions: Sequence[int]) -> torch.Tensor:
        """logits: float32[S, V]. One token a row, i64[S]; -1 where there is nothing to choose from."""
        if rows != self._rows:  # a decode step mostly has the rows of the one before
            self._settings, self._rows = self._upload(rows), rows
        [position] = upload([np.array(positions, dtype=np.int64)], self._device)
        return self._sampler(logits, **self._settings, positions=position)

    def _upload(self, rows: Sequence[SamplingRow]) -> dict[str, torch.Tensor]:
        params = [row.params for row in rows]
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "temperature": np.array([0.0 if p.is_greedy else p.temperature for p in params], dtype=np.float32),
            "top_p": np.array([p.top_p for p in params], dtype=np.float32),
            "min_p": np.array([p.min_p for p in params], dtype=np.float32),
            "top_k": np.array([p.top_k for p in params], dtype=np.int32),
            "seeds": np.array([p.seed & (2**64 - 1) for p in params], dtype=np.uint64).view(np.int64),
        }
        return dict(zip(arrays, upload(list(arrays.values()), self._device), strict=True))
