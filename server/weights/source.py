"""Where tensors come from, whatever the file format. Names are Hugging Face's."""

from collections.abc import Mapping
from typing import Protocol

import torch

from kernels.ops import QuantizedWeight, Weight


class WeightSource(Protocol):
    """An opened checkpoint. Its headers are already checked against the files' sizes."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's name and shape, in torch's order. Reads no tensor data."""

    def get(self, name: str) -> Weight:
        """The tensor as it lies in the file: in its own dtype, or quantised. May be a view of the mapped file."""

    def close(self) -> None:
        """Views handed out before stay valid."""


def dense(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The weight as a plain tensor of that dtype."""
    return weight.dequantize().to(dtype) if isinstance(weight, QuantizedWeight) else weight.to(dtype)


def same(a: Weight, b: Weight) -> bool:
    """Whether two weights are bit-equal in their stored form."""
    if isinstance(a, QuantizedWeight) and isinstance(b, QuantizedWeight):
        return a.kind == b.kind and torch.equal(a.blocks, b.blocks)
    if isinstance(a, QuantizedWeight) or isinstance(b, QuantizedWeight):
        return False
    return a.dtype == b.dtype and torch.equal(a, b)
