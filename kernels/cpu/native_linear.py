"""Linear layers and embeddings on weights that stay quantised as the file has them: kernels/cpu/native/quant.cpp."""

import ctypes
from collections.abc import Sequence
from itertools import groupby
from typing import Final, TypeGuard

import torch

from kernels.cpu.native_lib import DTYPES
from kernels.ops import QuantizedWeight, Weight

KINDS: Final = {"Q4_0": 0, "Q4_1": 1, "Q8_0": 2}
"""enum Kind of quant.cpp."""
GROUP: Final = 32


def keeps(weight: Weight) -> TypeGuard[QuantizedWeight]:
    """Whether the compiled kernels multiply by this weight without dequantising it."""
    return isinstance(weight, QuantizedWeight) and weight.kind in KINDS and weight.in_features % GROUP == 0


class PackedMatrix:
    """One matrix, or several of a kind stacked, repacked for the processor's lanes; as large as in the file."""

    def __init__(self, lib: ctypes.CDLL, weights: Sequence[QuantizedWeight]) -> None:
        self.kind = KINDS[weights[0].kind]
        self.in_features = weights[0].in_features
        self.out_features = sum(weight.out_features for weight in weights)
        blocks = torch.cat([weight.blocks.view(weight.out_features, -1) for weight in weights])
        size = lib.pt_quant_bytes(self.kind, self.out_features, self.in_features)
        self.data = torch.empty(size, dtype=torch.uint8)
        lib.pt_quant_pack(
            self.kind,
            blocks.data_ptr(),
            self.data.data_ptr(),
            self.out_features,
            self.in_features,
            torch.get_num_threads(),
        )


class QuantizedLinear:
    """[T, in] -> [T, out] on int8 activations, quantised per row and group of 32; sums in int32 and float32.

    A row's bits depend on nothing but that row. The error is that of llama.cpp for these formats: about 0.5 % of the
    output's norm, to the 0.3 % of bfloat16 activations and weights.
    """

    def __init__(self, lib: ctypes.CDLL, weights: Sequence[QuantizedWeight], bias: torch.Tensor | None) -> None:
        self._lib = lib
        self._parts = [PackedMatrix(lib, list(some)) for _, some in groupby(weights, key=lambda weight: weight.kind)]
        self._in_features = weights[0].in_features
        self._out_features = sum(part.out_features for part in self._parts)
        self._bias = None if bias is None else bias.float().contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        rows = x.shape[0]
        out = x.new_empty((rows, self._out_features))
        column = 0
        for part in self._parts:
            failed = self._lib.pt_quant_linear(
                part.kind,
                x.data_ptr(),
                part.data.data_ptr(),
                None if self._bias is None else self._bias.data_ptr() + 4 * column,
                out.data_ptr() + out.element_size() * column,
                rows,
                part.out_features,
                self._in_features,
                self._out_features,
                DTYPES[x.dtype],
                torch.get_num_threads(),
            )
            if failed:
                raise MemoryError(f"no memory for the activations of {rows} tokens")
            column += part.out_features
        return out


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
