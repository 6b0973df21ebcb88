"""What the sections share: the machine, its ceilings, a stopwatch and the list of results."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import triton.testing

from benchmarks.gpu.batches import Pairs, Problem, Shape, build, parse
from kernels.triton.launch import Target, describe
from kernels.triton.ops import TritonOps


@dataclass(frozen=True, slots=True)
class Result:
    """target: the id in the table of targets ("K1"), or empty. met: None where there is no figure to meet."""

    target: str
    name: str
    value: float
    unit: str
    goal: str = ""
    met: bool | None = None


@dataclass(slots=True)
class Ceilings:
    """Measured in the same run. copy and read: GB/s; gemm: TFLOP/s in bf16."""

    copy: float
    read: float
    gemm: float


@dataclass(slots=True)
class Bench:
    """One run. Written by: the sections, through note. dry: tiny shapes on the interpreter, figures mean nothing."""

    device: torch.device
    dtype: torch.dtype
    dry: bool
    ops: TritonOps
    ceilings: Ceilings = field(default_factory=lambda: Ceilings(0.0, 0.0, 0.0))
    results: list[Result] = field(default_factory=list)

    @property
    def target(self) -> Target:
        return describe(self.device)

    def milliseconds(self, function: Callable[[], Any]) -> float:
        """Median of the device's time, the L2 cache flushed before each call."""
        if self.dry:
            begin = time.perf_counter()
            function()
            return (time.perf_counter() - begin) * 1e3
        return float(triton.testing.do_bench(function, warmup=20, rep=80, return_mode="median"))

    def pairs(self, text: str) -> Pairs:
        return parse(text, shrink=self.dry)

    def problem(self, batch: str | Pairs, shape: Shape | None = None, **options: Any) -> Problem:
        pairs = self.pairs(batch) if isinstance(batch, str) else batch
        shape = shape or (Shape(4, 2, 16) if self.dry else Shape())
        return build(pairs, shape, device=self.device, dtype=self.dtype, **options)

    def attention_ms(self, problem: Problem) -> float:
        scale = problem.shape.head_dim**-0.5
        kv_heads = problem.shape.num_kv_heads
        return self.milliseconds(
            lambda: self.ops.attention(problem.q, problem.layer, problem.meta, scale=scale, num_kv_heads=kv_heads)
        )

    def note(self, target: str, name: str, value: float, unit: str, *, least: float = 0.0, most: float = 0.0) -> None:
        """least, most: the goal; 0 for none."""
        goal = f">= {least:g}" if least else f"<= {most:g}" if most else ""
        met = None if not goal or self.dry else (value >= least if least else value <= most)
        self.results.append(Result(target, name, value, unit, goal, met))
        verdict = {None: "", True: "ok", False: "MISSED"}[met]
        print(f"{target:4} {name:60} {value:10.3f} {unit:8} {goal:10} {verdict}")

    def raw(self) -> list[dict[str, Any]]:
        return [asdict(result) for result in self.results]


def measure_ceilings(bench: Bench) -> None:
    """A copy and a sum of a buffer that no cache holds, and a square matrix product."""
    elements, side = (2**12, 32) if bench.dry else (2**29, 8192)
    source = torch.ones(elements, device=bench.device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / bench.milliseconds(lambda: target.copy_(source)) / 1e6
    wide = source.view(torch.float32)
    read = source.nbytes / bench.milliseconds(lambda: wide.sum()) / 1e6
    a, b = (torch.randn(side, side, device=bench.device, dtype=bench.dtype) for _ in range(2))
    gemm = 2 * side**3 / bench.milliseconds(lambda: a @ b) / 1e9
    bench.ceilings = Ceilings(copy, max(read, copy), gemm)
    bench.note("", "ceiling: copy, read and write", copy, "GB/s")
    bench.note("", "ceiling: read", read, "GB/s")
    bench.note("", "ceiling: matrix product", gemm, "TFLOP/s")
