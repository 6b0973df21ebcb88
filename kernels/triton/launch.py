"""Launch parameters: tables keyed by architecture and head dim, and the little arithmetic that launchers share.

Configurations are looked up, never autotuned at run time: a tuner would compile and time inside a serving step.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """tile: keys a program reads at once; any power of two >= 16, independent of the cache's block size."""

    tile: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """rows: (query, head) pairs a program holds; tile: keys it reads at once. Powers of two >= 16."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class InvariantConfig:
    """As PrefillConfig; split: keys that get a softmax of their own, a multiple of tile. A token's bits depend on all
    of these, so nothing of the batch may choose them."""

    rows: int
    tile: int
    split: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class MatmulConfig:
    """A program's tile: rows of x, columns of the result, and the depth of one step. Powers of two >= 16."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Target:
    """What the tables are keyed by. arch: "sm_80", "sm_90", "sm_100", "gfx942", or "interpreter"."""

    arch: str
    num_sms: int

    @property
    def has_fp8(self) -> bool:
        """Whether e4m3 converts in hardware (the OCP encoding: gfx942 has another one)."""
        return self.arch not in ("sm_80", "sm_86", "gfx942")


def interpreted() -> bool:
    """Whether Triton was imported under TRITON_INTERPRET=1: kernels then run on the CPU, slowly."""
    return bool(triton.knobs.runtime.interpret)


def describe(device: torch.device) -> Target:
    """The target behind a torch device. A CPU means Triton's interpreter."""
    if device.type != "cuda":
        return Target("interpreter", 4)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Target(properties.gcnArchName.split(":")[0], properties.multi_processor_count)
    return Target(f"sm_{properties.major}{properties.minor}", properties.multi_processor_count)


def decode_config(target: Target, head_dim: int) -> DecodeConfig:
    """Two tiles in flight must fit 64 KiB of shared memory, so that several programs share an SM."""
    if target.arch == "interpreter":
        return DecodeConfig(tile=32, num_warps=4, num_stages=2)
    if head_dim > 128:
        return DecodeConfig(tile=32, num_warps=4, num_stages=2)
    if target.arch.startswith("gfx"):
        return DecodeConfig(tile=32, num_warps=4, num_stages=2)
    return DecodeConfig(tile=64, num_warps=4, num_stages=3 if head_dim <= 64 else 2)


def prefill_config(target: Target, head_dim: int) -> PrefillConfig:
    """A taller tile reads each key for more queries; registers bound it: nothing may spill."""
    if target.arch == "interpreter":
        return PrefillConfig(rows=32, tile=32, num_warps=4, num_stages=2)
    if target.arch.startswith("gfx"):
        return PrefillConfig(rows=64, tile=32, num_warps=4, num_stages=1)
    if head_dim > 128:
        return PrefillConfig(rows=64, tile=32, num_warps=8, num_stages=2)
    if target.arch in ("sm_80", "sm_86") and head_dim > 64:
        return PrefillConfig(rows=64, tile=32, num_warps=4, num_stages=2)
    return PrefillConfig(rows=128, tile=64, num_warps=8, num_stages=3 if head_dim <= 64 else 2)


def invariant_config(target: Target, head_dim: int) -> InvariantConfig:
    """Few rows, because a request that decodes fills but its group's; two accumulators must fit the registers."""
    if target.arch == "interpreter":
        return InvariantConfig(rows=32, tile=32, split=64, num_warps=4, num_stages=2)
    if target.arch.startswith("gfx"):
        return InvariantConfig(rows=64, tile=32, split=1024, num_warps=4, num_stages=1)
    if head_dim <= 64:
        return InvariantConfig(rows=64, tile=32, split=1024, num_warps=4, num_stages=2)
    if head_dim <= 128:
        return InvariantConfig(rows=64, tile=64, split=1024, num_warps=8, num_stages=2)
    if target.arch == "sm_100":
        return InvariantConfig(rows=64, tile=32, split=1024, num_warps=8, num_stages=1)
    return InvariantConfig(rows=64, tile=16, split=1024, num_warps=8, num_stages=2)


def matmul_config(target: Target, num_columns: int, dtype: torch.dtype) -> MatmulConfig:
    """One for all numbers of rows: 64, which is what a tensor core takes at once. Narrow weights get narrow tiles, so
    that one row still keeps most processors reading."""
    if target.arch == "interpreter" or dtype == torch.float32:
        return MatmulConfig(rows=32, columns=32, depth=32, num_warps=4, num_stages=2)
    stages = 2 if target.arch.startswith("gfx") else 3
    if num_columns <= 8192:
        return MatmulConfig(rows=64, columns=32, depth=128, num_warps=4, num_stages=stages)
    return MatmulConfig(rows=64, columns=128, depth=64, num_warps=4, num_stages=stages)


def padded(count: int, *, least: int = 1) -> int:
    """The power of two that covers count. tl.dot wants at least 16 on every axis."""
    return max(least, 1 << (count - 1).bit_length())


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """What tl.dot multiplies: the activations' dtype. The interpreter has no bfloat16 arithmetic: float32 there."""
    if dtype == torch.bfloat16:
        return tl.float32 if interpreted() else tl.bfloat16
    return {torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


def scale_or_unit(scale: torch.Tensor | None, unused: torch.Tensor) -> torch.Tensor:
    """A kernel's pointer argument must be a tensor; without scales it is never read."""
    return unused if scale is None else scale
