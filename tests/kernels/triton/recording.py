"""Records what the launchers launch instead of launching it: no GPU, no driver, and tensors may be meta tensors.

A recorded launch knows its specialisation key (what Triton would compile anew for) and the source that the compiler
takes, so both are what ships, not a copy of it kept by hand.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. arguments: by parameter name, constexprs included. options: num_warps and the like."""

    kernel: JITFunction[Any]
    arguments: dict[str, Any]
    options: dict[str, int]
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def signature(self) -> dict[str, str]:
        types = {}
        for parameter in self.kernel.params:
            value = self.arguments[parameter.name]
            if parameter.is_constexpr:
                types[parameter.name] = "constexpr"
            elif isinstance(value, torch.Tensor):
                types[parameter.name] = "*" + _DTYPES[value.dtype]
            else:
                types[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        return types

    def constants(self) -> dict[str, Any]:
        return {p.name: self.arguments[p.name] for p in self.kernel.params if p.is_constexpr}

    def divisible(self) -> tuple[int, ...]:
        """Indices of the arguments that Triton takes for multiples of 16. A fresh tensor's address is one."""
        found = []
        for parameter in self.kernel.params:
            value = self.arguments[parameter.name]
            if parameter.is_constexpr or parameter.do_not_specialize or isinstance(value, float):
                continue
            if isinstance(value, torch.Tensor):
                value = value.storage_offset() * value.itemsize
            if value % 16 == 0:
                found.append(parameter.num)
        return tuple(found)

    def key(self) -> tuple[Any, ...]:
        """Two launches with one key share one compiled kernel."""
        constants = tuple((name, str(value)) for name, value in self.constants().items())
        return self.name, tuple(self.signature().items()), constants, self.divisible(), tuple(self.options.items())

    def source(self) -> ASTSource:
        attributes = {(index,): [["tt.divisibility", 16]] for index in self.divisible()}
        return ASTSource(self.kernel, self.signature(), self.constants(), attributes)


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Launches within go to the list instead of the device."""
    launches: list[Launch] = []

    def run(self: JITFunction[Any], *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        assert not warmup
        assert all(0 < n < 2**31 for n in grid[:1]), f"{self.__name__}: grid {grid}"
        assert all(0 < n < 2**16 for n in grid[1:]), f"{self.__name__}: grid {grid}"
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        arguments = self.signature.bind(*args, **kwargs).arguments
        launches.append(Launch(self, dict(arguments), options, grid))

    with mock.patch.object(triton.runtime.jit.JITFunction, "run", run):
        yield launches
