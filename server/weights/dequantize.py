"""GGUF block formats to float32. The three that small models ship in are written out here, because the gguf package's
numpy takes several times as long; for every other type it is asked."""

from collections.abc import Callable

import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType

_CHUNK_BLOCKS = 1 << 17
"""Blocks a pass: bounds the scratch memory to some 32 MB and stays near the cache."""


def can_dequantize(kind: GGMLQuantizationType) -> bool:
    return kind in _FAST or kind in quants._type_traits


def dequantize(blocks: torch.Tensor, kind: GGMLQuantizationType) -> torch.Tensor:
    """uint8[rows, bytes_per_row] -> float32[rows, elements_per_row]. Bit-equal to the gguf package."""
    if kind not in _FAST:
        return torch.from_numpy(quants.dequantize(blocks.numpy(), kind))
    block_bytes, block_to_floats = _FAST[kind]
    flat = blocks.reshape(-1, block_bytes)
    out = torch.empty(flat.shape[0], 32, dtype=torch.float32)
    for begin in range(0, flat.shape[0], _CHUNK_BLOCKS):
        block_to_floats(flat[begin : begin + _CHUNK_BLOCKS], out[begin : begin + _CHUNK_BLOCKS])
    return out.view(blocks.shape[0], -1)


def _half(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """The float16 at that byte of every block, as float32[n, 1]."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def _nibbles(blocks: torch.Tensor, offset: int, out: torch.Tensor) -> None:
    """16 bytes to 32 numbers: the low halves first, then the high ones."""
    packed = blocks[:, offset : offset + 16]
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """d f16 | 32 x 4 bits: d * (q - 8)."""
    _nibbles(blocks, 2, out)
    out.sub_(8.0).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """d f16 | m f16 | 32 x 4 bits: d * q + m."""
    _nibbles(blocks, 4, out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """d f16 | 32 x int8: d * q."""
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_half(blocks, 0))


_FAST: dict[GGMLQuantizationType, tuple[int, Callable[[torch.Tensor, torch.Tensor], None]]] = {
    GGMLQuantizationType.Q4_0: (18, _q4_0),
    GGMLQuantizationType.Q4_1: (20, _q4_1),
    GGMLQuantizationType.Q8_0: (34, _q8_0),
}
