"""Between host and device without waiting, through pinned memory; arrays that are needed together go in one copy.

A plain `.to(device)` or `.tolist()` stops the host until the device has done all it was ever asked. The pinned buffers
come from torch's caching allocator, which gives one out again only when the copies that used it are done.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT: Final = 16
"""Bytes: what the widest load of a kernel wants."""


def upload(arrays: Sequence[npt.NDArray[np.generic]], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors of the same shapes and dtypes on the device. On a CPU they share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    offsets = _offsets(arrays)
    packed = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    pack(arrays, packed.numpy())
    return unpack(packed.to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[npt.NDArray[np.generic]], into: npt.NDArray[np.uint8]) -> None:
    """One behind the other, each at a multiple of 16 bytes."""
    for array, begin in zip(arrays, _offsets(arrays), strict=False):
        into[begin : begin + array.nbytes].view(array.dtype)[:] = array.ravel()


def unpack(packed: torch.Tensor, like: Sequence[npt.NDArray[np.generic]]) -> list[torch.Tensor]:
    """Views of packed, uint8[N], with the arrays' shapes and dtypes. Nothing is copied."""
    tensors = []
    for array, begin in zip(like, _offsets(like), strict=False):
        dtype = torch.from_numpy(array[:0]).dtype
        tensors.append(packed[begin : begin + array.nbytes].view(dtype).view(array.shape))
    return tensors


def _offsets(arrays: Sequence[npt.NDArray[np.generic]]) -> list[int]:
    """Where each begins, and where the last one ends."""
    offsets = [0]
    for array in arrays:
        offsets.append(offsets[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return offsets


class Download:
    """Tensors on their way to the host. The device goes on meanwhile."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._done: torch.Event | None = None
        self._tensors = list(tensors)
        if any(tensor.is_cuda for tensor in tensors):
            self._tensors = [_start_copy(tensor) for tensor in tensors]
            self._done = torch.Event("cuda")
            self._done.record()

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host, in order."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensors


def _start_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
