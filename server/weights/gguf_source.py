"""Tensors of a GGUF file: mapped, not read; quantised matrices stay quantised until somebody asks otherwise."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kernels.ops import QuantizedWeight, Weight
from server.errors import ModelLoadError
from server.models.spec import ModelSpec
from server.weights.dequantize import can_dequantize, dequantize
from server.weights.gguf_metadata import GgufHeader, GgufTensorInfo
from server.weights.names import hf_name

_PERMUTED_ARCHITECTURES = ("llama",)
_DENSE = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
}


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    begin: int
    num_bytes: int
    permuted_heads: int
    """Heads of a projection whose rows llama.cpp's converter permuted; 0 for all other tensors."""


class GgufSource:
    """A WeightSource over one GGUF file."""

    def __init__(self, path: Path, header: GgufHeader, spec: ModelSpec) -> None:
        """Raises ModelLoadError for tensors of unknown types, beyond the file's end, or not one behind the other."""
        permuted = header.metadata.get("general.architecture") in _PERMUTED_ARCHITECTURES
        heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads} if permuted else {}
        self._path = path
        self._entries: dict[str, _Entry] = {}
        for info in header.tensors:
            name = hf_name(info.name, sandwich_norms=spec.sandwich_norms)
            part = name.split(".")[-2] if "." in name else ""
            self._entries[name] = _entry(info, header, path, heads.get(part, 0))
        _check_layout(self._entries, header, path)
        try:
            # Copy-on-write: torch wants writable memory, and nobody writes.
            self._data = np.memmap(path, np.uint8, mode="c")
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"can't map {path}: {error}") from error

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    def get(self, name: str) -> Weight:
        entry = self._entries[name]
        raw = torch.from_numpy(self._data[entry.begin : entry.begin + entry.num_bytes])
        dtype = _DENSE.get(entry.kind)
        if dtype is not None:
            tensor = raw.view(dtype).view(entry.shape) if raw.data_ptr() % dtype.itemsize == 0 else None
            tensor = raw.clone().view(dtype).view(entry.shape) if tensor is None else tensor
            return _unpermute(tensor, entry.permuted_heads)
        if len(entry.shape) != 2:
            return dequantize(raw.view(1, -1), entry.kind).view(entry.shape)
        blocks = _unpermute(raw.view(entry.shape[0], -1), entry.permuted_heads)
        restore: Callable[[], torch.Tensor] = partial(dequantize, blocks, entry.kind)
        return QuantizedWeight(blocks, entry.kind.name, entry.shape[0], entry.shape[1], restore)

    def close(self) -> None:
        del self._data


def _entry(info: GgufTensorInfo, header: GgufHeader, path: Path, permuted_heads: int) -> _Entry:
    try:
        kind = GGMLQuantizationType(info.type)
    except ValueError as error:
        raise ModelLoadError(f"{path}: tensor {info.name!r} has the unknown type {info.type}") from error
    if kind not in _DENSE and not can_dequantize(kind):
        raise ModelLoadError(f"{path}: tensor {info.name!r} is of type {kind.name}, which is not supported")
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not info.shape or info.shape[0] % block:
        raise ModelLoadError(f"{path}: tensor {info.name!r} of type {kind.name} claims the shape {info.shape}")
    num_bytes = math.prod(info.shape) // block * block_bytes
    begin = header.data_offset + info.offset
    if begin + num_bytes > header.file_size:
        raise ModelLoadError(f"{path}: tensor {info.name!r} reaches beyond the end of the file: it is truncated")
    return _Entry(kind, tuple(reversed(info.shape)), begin, num_bytes, permuted_heads)


def _check_layout(entries: Mapping[str, _Entry], header: GgufHeader, path: Path) -> None:
    """Tensors follow each other, padded to the alignment: a gap or an overlap betrays a wrong type, shape or offset."""
    alignment = header.metadata.get("general.alignment", 32)
    end = header.data_offset
    for name, entry in sorted(entries.items(), key=lambda item: item[1].begin):
        if entry.begin != -(-end // alignment) * alignment:
            raise ModelLoadError(
                f"{path}: tensor {name!r} begins at byte {entry.begin}, the one before it ends at {end}: the tensor "
                "table is corrupt"
            )
        end = entry.begin + entry.num_bytes


def _unpermute(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undoes the converter's row order, which interleaves the two halves of a head: (d/2, 2) back to (2, d/2).

    rows: [num_heads * d, anything], quantised blocks included, since whole rows move. A shape that doesn't divide is
    left alone: the loader's shape check refuses it by name.
    """
    if num_heads == 0 or rows.shape[0] % (2 * num_heads):
        return rows
    half = rows.shape[0] // (2 * num_heads)
    split = rows.view(num_heads, half, 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)
