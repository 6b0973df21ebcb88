"""Linear layers and embeddings on repacked weights, dense or quantised as the file has them: native/{dense,quant}.cpp.

A row's bits depend on nothing but that row, in every format and at every batch size.
"""

import ctypes
from collections.abc import Sequence
from itertools import groupby
from typing import Final, TypeGuard

import torch

from kernels.cpu.linear import dense
from kernels.cpu.native_lib import DTYPES, Linear
from kernels.cpu.weight_memory import WeightMemory
from kernels.ops import QuantizedWeight, Weight

KINDS: Final = {"Q4_0": 0, "Q4_1": 1, "Q8_0": 2}
"""enum Kind of quant.cpp."""
DENSE: Final = -1
GROUP: Final = 32


def keeps(weight: Weight) -> TypeGuard[QuantizedWeight]:
    """Whether the compiled kernels know this weight's format."""
    return isinstance(weight, QuantizedWeight) and weight.kind in KINDS and weight.in_features % GROUP == 0


class PackedLinear:
    """[T, in] -> [T, out]. Stacked matrices may be of different kinds: each kind in a row is one part, one call.

    Dense parts multiply in the activations' dtype and add in float32. Quantised parts need bfloat16 activations and
    take them as integers, scaled per group of 32: 15 bits for the four neighbors that hold the largest, 8 bits for the
    rest. Products and sums within a group are exact, an output's error is about 5e-3 of the outputs' norm.
    """

    def __init__(
        self,
        lib: ctypes.CDLL,
        weights: Sequence[Weight],
        bias: torch.Tensor | None,
        *,
        memory: WeightMemory,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
    ) -> None:
        """dtype, out_dtype: of input and result, float32 or bfloat16. Each weight is dense, or `keeps` takes it."""
        self._lib = lib
        self._memory = memory
        self.dtype: Final = dtype
        self.out_dtype: Final = out_dtype
        self._bias = None if bias is None else bias.float().contiguous()
        self._data: list[torch.Tensor] = []
        packed = [self._pack(kind, list(some)) for kind, some in groupby(weights, key=_kind)]
        self.in_features: Final = packed[0].in_features
        self.out_features: Final = sum(part.out_features for part in packed)
        self._parts: list[tuple[Linear, int]] = []  # with the first output's offset in bytes
        column = 0
        for part in packed:
            part.out_stride = self.out_features
            part.dtype, part.out_dtype = DTYPES[dtype], DTYPES[out_dtype]
            part.bias = None if self._bias is None else self._bias.data_ptr() + 4 * column
            self._parts.append((part, out_dtype.itemsize * column))
            column += part.out_features

    @property
    def parts(self) -> tuple[Linear, ...]:
        """What the library takes, in the order of the outputs. Valid as long as this object lives."""
        return tuple(part for part, _ in self._parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not self.dtype or x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"expected {self.dtype}[T, {self.in_features}], got {x.dtype}{list(x.shape)}")
        x = x.contiguous()
        rows, threads = x.shape[0], torch.get_num_threads()
        out = x.new_empty((rows, self.out_features), dtype=self.out_dtype)
        source, target = x.data_ptr(), out.data_ptr()
        for part, offset in self._parts:
            if part.kind == DENSE:
                self._lib.pt_dense_linear(part, source, target + offset, rows, threads)
            elif self._lib.pt_quant_linear(part, source, target + offset, rows, threads):
                raise MemoryError(f"no memory for the integer activations of {rows} tokens")
        return out

    def _pack(self, kind: int, weights: Sequence[Weight]) -> Linear:
        threads = torch.get_num_threads()
        if kind == DENSE:
            parts = [dense(weight, self.dtype) for weight in weights]
            source = (torch.cat(parts) if len(parts) > 1 else parts[0]).contiguous()
            rows, columns = source.shape
            dtype = DTYPES[self.dtype]
            data = self._memory.take(self._lib.pt_dense_bytes(rows, columns, dtype))
            self._lib.pt_dense_pack(source.data_ptr(), data.data_ptr(), rows, columns, dtype, threads)
        else:
            kept = [weight for weight in weights if keeps(weight)]
            source = torch.cat([weight.blocks.reshape(weight.out_features, -1) for weight in kept])
            rows, columns = source.shape[0], kept[0].in_features
            data = self._memory.take(self._lib.pt_quant_bytes(kind, rows, columns))
            self._lib.pt_quant_pack(kind, source.data_ptr(), data.data_ptr(), rows, columns, threads)
        self._data.append(data)
        return Linear(weights=data.data_ptr(), out_features=rows, in_features=columns, kind=kind)


class QuantizedEmbedding:
    """ids i64[T] -> [T, C], each row dequantised when it is asked for."""

    def __init__(self, lib: ctypes.CDLL, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        self._lib = lib
        self._kind = KINDS[weight.kind]
        self._blocks = weight.blocks.contiguous().clone()
        self._shape = (weight.out_features, weight.in_features)
        self._dtype = dtype

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Raises IndexError for an id out of range."""
        ids = ids.contiguous()
        count, size = ids.numel(), self._shape[1]
        out = torch.empty((count, size), dtype=self._dtype)
        refused = self._lib.pt_quant_embed(
            self._kind,
            self._blocks.data_ptr(),
            ids.data_ptr(),
            out.data_ptr(),
            count,
            self._shape[0],
            size,
            DTYPES[self._dtype],
        )
        if refused:
            raise IndexError(f"a token id is outside of [0, {self._shape[0]})")
        return out


def _kind(weight: Weight) -> int:
    return KINDS[weight.kind] if keeps(weight) else DENSE
