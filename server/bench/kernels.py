"""`pageturner bench kernels`: this device's backend through its public operations, as shares of the machine's ceilings.

Shapes are SmolLM2-135M's unless told otherwise. For GPUs there is a deeper tool in benchmarks/gpu.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.progress import Progress

from kernels.backend import BACKENDS, resolve
from kernels.errors import BackendUnavailable
from kernels.layout import KVCacheSpec
from kernels.metadata import AttentionMetadata
from kernels.ops import Ops
from server.bench.arguments import Parser, output_file
from server.bench.ceilings import Ceilings, measure
from server.bench.report import Report, environment

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BLOCK_SIZE = 16
LEAST_SECONDS = 0.3


class Shape(msgspec.Struct, frozen=True):
    """The sizes of one layer."""

    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    hidden_size: int = 576
    intermediate_size: int = 1536


class Result(msgspec.Struct, frozen=True):
    """share: of the CPU's memory or matrix rate, whichever bounds the operation; None on other devices."""

    operation: str
    size: str
    microseconds: float
    rate: float
    unit: str
    share: float | None


def microseconds(function: Callable[[], object], device: torch.device) -> float:
    """Median duration of a call, the device's work included."""

    def timed() -> float:
        begin = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    timed()
    durations: list[float] = []
    while len(durations) < 5 or sum(durations) < LEAST_SECONDS:
        durations.append(timed())
    return statistics.median(durations) * 1e6


class Bench:
    """One backend under measurement. Written by: nobody."""

    def __init__(self, ops: Ops, device: torch.device, dtype: torch.dtype, shape: Shape, ceilings: Ceilings) -> None:
        self._ops = ops
        self._device = device
        self._dtype = dtype
        self._shape = shape
        self._ceilings = ceilings

    def attention(self, num_requests: int, query_len: int, seq_len: int) -> Result:
        """A step of equal requests, each with query_len new tokens at the end of seq_len; blocks in random order."""
        shape, device = self._shape, self._device
        blocks_per_request = -(-seq_len // BLOCK_SIZE)
        num_blocks = num_requests * blocks_per_request
        spec = KVCacheSpec(1, shape.num_kv_heads, shape.head_dim, BLOCK_SIZE, self._dtype)
        layer = self._ops.allocate_kv_cache(spec, num_blocks=num_blocks + 1, device=device)[0]
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)) + 1
        page_table = order.to(torch.int32).view(num_requests, blocks_per_request)
        positions = torch.arange(seq_len - query_len, seq_len)
        slots = page_table[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        meta = AttentionMetadata(
            query_start_loc=torch.arange(num_requests + 1, dtype=torch.int32, device=device) * query_len,
            seq_lens=torch.full((num_requests,), seq_len, dtype=torch.int32, device=device),
            page_table=page_table.to(device),
            slot_mapping=slots.flatten().to(device),
            positions=positions.repeat(num_requests).to(device),
            num_requests=num_requests,
            num_tokens=num_requests * query_len,
            max_query_len=query_len,
            max_seq_len=seq_len,
        )
        q = torch.randn(num_requests * query_len, shape.num_heads, shape.head_dim, device=device).to(self._dtype)
        duration = microseconds(
            lambda: self._ops.attention(
                q, layer, meta, scale=shape.head_dim**-0.5, num_kv_heads=shape.num_kv_heads, window=0, soft_cap=0.0
            ),
            device,
        )
        size = f"{num_requests} x {query_len} of {seq_len}"
        if query_len == 1:
            num_bytes = num_requests * seq_len * 2 * shape.num_kv_heads * shape.head_dim * self._dtype.itemsize
            return self._read("decode attention", size, duration, num_bytes)
        pairs = query_len * (2 * seq_len - query_len + 1) // 2
        return self._compute(
            "prefill attention", size, duration, 4 * num_requests * pairs * shape.num_heads * shape.head_dim
        )

    def linear(self, num_tokens: int) -> Result:
        """The gate and up projections, merged: bound by reading the weights for few tokens, by arithmetic for many."""
        shape = self._shape
        weights: list[Any] = [torch.randn(shape.intermediate_size, shape.hidden_size).to(self._device, self._dtype)] * 2
        layer = self._ops.pack_linear(weights, None, dtype=self._dtype)
        x = torch.randn(num_tokens, shape.hidden_size).to(self._device, self._dtype)
        duration = microseconds(lambda: layer(x), self._device)
        size = f"{num_tokens} x {shape.hidden_size} x {2 * shape.intermediate_size}"
        num_weights = 2 * shape.intermediate_size * shape.hidden_size
        return self._compute("gate and up projection", size, duration, 2 * num_tokens * num_weights)

    def _read(self, operation: str, size: str, duration: float, num_bytes: int) -> Result:
        rate = num_bytes / duration / 1e3
        return Result(operation, size, duration, rate, "GB/s", self._share(rate, self._ceilings.read_gb_s))

    def _compute(self, operation: str, size: str, duration: float, num_flop: int) -> Result:
        ceilings = self._ceilings
        best = ceilings.gemm_f32_gflop_s if self._dtype == torch.float32 else ceilings.gemm_bf16_gflop_s
        rate = num_flop / duration / 1e3
        return Result(operation, size, duration, rate, "GFLOP/s", self._share(rate, best))

    def _share(self, rate: float, ceiling: float) -> float | None:
        return rate / ceiling if self._device.type == "cpu" else None


ATTENTION = ((1, 1, 1024), (1, 1, 8192), (8, 1, 256), (32, 1, 256), (32, 1, 1024), (1, 512, 512), (4, 128, 1024))
LINEAR = (1, 8, 32, 128, 512)


def device(text: str) -> str:
    """A device that this torch can use."""
    try:
        known = torch.device(text).type in {"cpu", "cuda"}
    except RuntimeError:
        known = False
    if not known:
        raise argparse.ArgumentTypeError(f"{text!r} is no device; give cpu, cuda or cuda:0")
    if text.startswith("cuda") and (torch.device(text).index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(
            f"this PyTorch sees {torch.cuda.device_count()} GPUs; give one of them, or cpu"
        )
    return text


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="pageturner bench kernels", description=__doc__)
    add = parser.add_argument
    add("--device", type=device, default="cpu", help="cpu or cuda [%(default)s]")
    add("--backend", choices=BACKENDS, default="auto", help="[%(default)s]")
    add("--dtype", choices=sorted(DTYPES), default="bfloat16", help="of activations, weights and KV [%(default)s]")
    add("--json", type=output_file, metavar="FILE", help="write the whole result")
    args = parser.parse_args(argv)
    try:
        ops = resolve(args.backend, args.device)
    except BackendUnavailable as error:
        parser.error(str(error))
    ceilings = measure()
    bench = Bench(ops, torch.device(args.device), DTYPES[args.dtype], Shape(), ceilings)
    jobs = [partial(bench.attention, *sizes) for sizes in ATTENTION] + [partial(bench.linear, n) for n in LINEAR]
    # auto_refresh would draw from a thread of its own, on a core that the kernels want
    with torch.inference_mode(), Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        results = [job() for job in progress.track(jobs, description="kernels")]
    report = Report(
        title=f"Kernels: {ops.name} on {args.device}, {args.dtype}",
        environment=environment(),
        ceilings=msgspec.to_builtins(ceilings),
        config={"backend": ops.name, "device": args.device, "dtype": args.dtype, "block_size": BLOCK_SIZE},
        metrics={f"{one.operation} {one.size}": msgspec.to_builtins(one) for one in results},
    )
    rows = [
        [
            r.operation,
            r.size,
            f"{r.microseconds:.0f}",
            f"{r.rate:.1f}",
            r.unit,
            "-" if r.share is None else f"{r.share:.0%}",
        ]
        for r in results
    ]
    report.show_table(["operation", "size", "us", "rate", "", "of the ceiling"], rows)
    report.show_environment()
    if args.json:
        report.write_json(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
