"""What this machine can do at best: the denominators of every figure we publish.

A figure in tokens a second says little; the same figure as a share of the memory bandwidth or of the matrix rate of the
machine, measured in the same run, can be compared with next year's.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from server.bench.report import Report, environment

READ_BYTES = 256 << 20
"""Larger than any last-level cache we know."""
GEMM_SIZE = 1024
LOOP_ITERATIONS = 1_000_000


class Ceilings(msgspec.Struct, frozen=True):
    """read_gb_s: 1e9 bytes a second. gemm_*: 1e9 multiply-adds x 2 a second, square matrices. Medians of repeats."""

    read_gb_s: float
    gemm_f32_gflop_s: float
    gemm_bf16_gflop_s: float
    python_loop_ns: float
    """One turn of a fixed pure-Python loop: the unit of the host-side targets."""
    num_threads: int


def median_seconds(function: Callable[[], object], *, repeats: int = 7) -> float:
    """Median duration of a call, the first one left out."""
    function()
    durations = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations)


def python_loop_ns() -> float:
    def loop() -> int:
        total = 0
        for i in range(LOOP_ITERATIONS):
            total += i & 7
        return total

    return median_seconds(loop, repeats=5) / LOOP_ITERATIONS * 1e9


def measure() -> Ceilings:
    """Takes about three seconds and all cores."""
    import torch

    def gemm_gflop_s(dtype: torch.dtype) -> float:
        a = torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype)
        b = torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype)
        return 2 * GEMM_SIZE**3 / median_seconds(lambda: a @ b) / 1e9

    # float32: of torch's reductions only this one keeps up with the memory (an int32 sum reaches 2 GB/s).
    buffer = torch.ones(READ_BYTES // 4)
    with torch.inference_mode():
        return Ceilings(
            read_gb_s=READ_BYTES / median_seconds(lambda: buffer.sum()) / 1e9,
            gemm_f32_gflop_s=gemm_gflop_s(torch.float32),
            gemm_bf16_gflop_s=gemm_gflop_s(torch.bfloat16),
            python_loop_ns=python_loop_ns(),
            num_threads=torch.get_num_threads(),
        )


def measure_in_child() -> Ceilings:
    """The same from a process of its own, so that the caller stays free of torch and of its threads."""
    command = [sys.executable, "-m", "server.bench.ceilings", "--json"]
    run = subprocess.run(command, capture_output=True, timeout=120, check=True)
    return msgspec.json.decode(run.stdout, type=Ceilings)


def main(argv: list[str] | None = None) -> int:
    """Prints the ceilings as a table, or as JSON for another process to read."""
    parser = argparse.ArgumentParser(prog="ceilings", description="Measure what this machine can do at best.")
    parser.add_argument("--json", action="store_true", help="JSON on standard output, nothing else")
    args = parser.parse_args(argv)
    ceilings = measure()
    if args.json:
        sys.stdout.write(msgspec.json.encode(ceilings).decode() + "\n")
        return 0
    report = Report(title="Ceilings", environment=environment(), ceilings=msgspec.to_builtins(ceilings))
    report.show_table(["ceiling", "value", "unit"], ceiling_rows(ceilings))
    report.show_environment()
    return 0


def ceiling_rows(ceilings: Ceilings) -> list[list[str]]:
    return [
        ["memory read", f"{ceilings.read_gb_s:.1f}", "GB/s"],
        ["matrix product float32", f"{ceilings.gemm_f32_gflop_s:.0f}", "GFLOP/s"],
        ["matrix product bfloat16", f"{ceilings.gemm_bf16_gflop_s:.0f}", "GFLOP/s"],
        ["Python loop turn", f"{ceilings.python_loop_ns:.1f}", "ns"],
        ["threads", str(ceilings.num_threads), ""],
    ]


if __name__ == "__main__":
    sys.exit(main())
