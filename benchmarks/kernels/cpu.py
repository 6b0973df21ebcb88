"""The compiled CPU kernels beside the torch-only ones, as shares of this machine's ceilings.

python benchmarks/kernels/cpu.py [--quick] [--json FILE]

Every linear row is all layers of the default model (SmolLM2-135M) once, each with weights of its own: nothing stays in
a cache between two of them that would not stay there while serving. Decode attention runs over 30 caches for the same
reason. Medians; what waits for memory is compared with the read rate, what computes with the bf16 matrix rate.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import gguf
import msgspec
import torch
from rich.console import Console
from rich.progress import Progress

from kernels.cpu import CpuOps
from kernels.cpu.native_ops import NativeOps
from kernels.layout import KVCacheSpec, LayerKV
from kernels.metadata import AttentionMetadata
from kernels.ops import Linear, QkvLayout, QuantizedWeight, Weight
from server.bench.arguments import Parser, output_file
from server.bench.ceilings import Ceilings, measure, median_seconds
from server.bench.report import Report, environment

LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 30, 9, 3, 64, 16
HIDDEN, INNER, VOCABULARY = 576, 1536, 49152
SHAPES = ((960, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
"""(out, in) of a layer: merged QKV, output, merged gate and up, down."""
BYTES_PER_WEIGHT = {"bf16": 2.0, "Q8_0": 34 / 32, "Q4_1": 20 / 32}
CPU = torch.device("cpu")


class Row(msgspec.Struct, frozen=True):
    """milliseconds: ours, and torch's for the same result (None: not measured). rate: ours, in unit."""

    operation: str
    size: str
    ours: float
    torch: float | None
    rate: float
    unit: str
    share: float


def quantized(kind: str, out_features: int, in_features: int) -> QuantizedWeight:
    file_type = gguf.GGMLQuantizationType[kind]
    dense = (torch.randn(out_features, in_features) / in_features**0.5).numpy()
    blocks = torch.from_numpy(gguf.quants.quantize(dense, file_type))
    return QuantizedWeight(
        blocks,
        kind,
        out_features,
        in_features,
        lambda: torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), file_type)),
    )


def weight(kind: str, out_features: int, in_features: int) -> Weight:
    if kind == "bf16":
        return (torch.randn(out_features, in_features) / in_features**0.5).bfloat16()
    return quantized(kind, out_features, in_features)


class Bench:
    """Collects rows. Written by: itself."""

    def __init__(self, ceilings: Ceilings, repeats: int) -> None:
        self.native, self.plain = NativeOps(), CpuOps()
        self.rows: list[Row] = []
        self._ceilings = ceilings
        self._repeats = repeats

    def layers(self, kind: str, batches: tuple[int, ...]) -> None:
        """All linear layers of the model but the head."""
        one = [[weight(kind, *shape)] for shape in SHAPES]

        def pack(ops: CpuOps) -> list[list[Linear]]:
            return [[ops.pack_linear(part, None, dtype=torch.bfloat16) for part in one] for _ in range(LAYERS)]

        self._linears(f"30 layers, {kind}", pack(self.native), pack(self.plain), kind, SHAPES * LAYERS, batches)

    def head(self, kind: str, batches: tuple[int, ...]) -> None:
        shape = (VOCABULARY, HIDDEN)
        part = [weight(kind, *shape)]
        ours, theirs = (
            [[ops.pack_linear(part, None, dtype=torch.bfloat16, out_dtype=torch.float32)]]
            for ops in (self.native, self.plain)
        )
        self._linears(f"LM head, {kind}", ours, theirs, kind, (shape,), batches)

    def _linears(
        self,
        name: str,
        ours: list[list[Linear]],
        theirs: list[list[Linear]],
        kind: str,
        shapes: tuple[tuple[int, int], ...],
        batches: tuple[int, ...],
    ) -> None:
        num_weights = sum(out_features * in_features for out_features, in_features in shapes)
        inputs = [in_features for _, in_features in SHAPES] if len(ours) > 1 else [HIDDEN]
        for batch in batches:
            x = {size: torch.randn(batch, size).bfloat16() for size in inputs}

            def run(packed: list[list[Linear]], x: dict[int, torch.Tensor] = x) -> None:
                for layer in packed:
                    for linear, size in zip(layer, inputs, strict=True):
                        linear(x[size])

            flop = 2 * num_weights * batch
            self._add(
                name,
                f"batch {batch}",
                lambda: run(ours),
                lambda: run(theirs),
                num_weights * BYTES_PER_WEIGHT[kind],
                flop,
            )

    def attention(self, requests: int, query_len: int, context: int) -> None:
        blocks = -(-context // BLOCK)
        spec = KVCacheSpec(1, KV_HEADS, DIM, BLOCK, torch.bfloat16)
        count = LAYERS if query_len == 1 else 1
        meta = step(requests, query_len, context)
        q = torch.randn(requests * query_len, HEADS, DIM).bfloat16()

        def run(ops: CpuOps, caches: list[LayerKV]) -> None:
            for cache in caches:
                ops.attention(q, cache, meta, scale=DIM**-0.5, num_kv_heads=KV_HEADS)

        ours, theirs = (
            [ops.allocate_kv_cache(spec, num_blocks=requests * blocks + 1, device=CPU)[0] for _ in range(count)]
            for ops in (self.native, self.plain)
        )
        for cache in (*ours, *theirs):  # memory that nobody wrote is one page of zeros, in a core's cache
            cache.key.normal_()
            cache.value.normal_()
        name = f"{'decode' if query_len == 1 else 'prefill'} attention x {count}"
        pairs = query_len * (2 * context - query_len + 1) // 2
        self._add(
            name,
            f"{requests} x {query_len} of {context}",
            lambda: run(self.native, ours),
            lambda: run(self.plain, theirs),
            count * requests * context * 2 * KV_HEADS * DIM * 2,
            count * requests * pairs * HEADS * DIM * 4,
        )

    def small(self, tokens: int) -> None:
        """What lies between the matrix products of a layer, 30 times."""
        x, residual = (torch.randn(tokens, HIDDEN).bfloat16() for _ in range(2))
        norm, qkv = torch.ones(HIDDEN).bfloat16(), torch.randn(tokens, (HEADS + 2 * KV_HEADS) * DIM).bfloat16()
        gate_up, cos_sin, layout = (
            torch.randn(tokens, 2 * INNER).bfloat16(),
            torch.ones(512, DIM),
            QkvLayout(HEADS, KV_HEADS, DIM),
        )
        meta = step(tokens, 1, 200)
        spec = KVCacheSpec(1, KV_HEADS, DIM, BLOCK, torch.bfloat16)

        def run(ops: CpuOps, cache: LayerKV) -> None:
            for _ in range(LAYERS):
                ops.add_rms_norm(x, residual, norm, 1e-5)
                ops.rope_and_write_kv(qkv, layout, cos_sin, cache, meta)
                ops.add_rms_norm(x, residual, norm, 1e-5)
                ops.gated_activation(gate_up, "silu")

        caches = [
            ops.allocate_kv_cache(spec, num_blocks=tokens * 13 + 1, device=CPU)[0] for ops in (self.native, self.plain)
        ]
        moved = LAYERS * tokens * 2 * (2 * 4 * HIDDEN + 2 * qkv.shape[1] + 3 * INNER)
        self._add(
            "norms, RoPE and write, SiLU x 30",
            f"{tokens} tokens",
            lambda: run(self.native, caches[0]),
            lambda: run(self.plain, caches[1]),
            moved,
            0,
        )

    def _add(
        self, name: str, size: str, ours: Callable[[], None], theirs: Callable[[], None], num_bytes: float, flop: float
    ) -> None:
        seconds = median_seconds(ours, repeats=self._repeats)
        other = median_seconds(theirs, repeats=max(3, self._repeats // 2))
        read, compute = num_bytes / 1e9 / self._ceilings.read_gb_s, flop / 1e9 / self._ceilings.gemm_bf16_gflop_s
        if read >= compute:
            rate, unit, share = num_bytes / seconds / 1e9, "GB/s", read / seconds
        else:
            rate, unit, share = flop / seconds / 1e9, "GFLOP/s", compute / seconds
        self.rows.append(Row(name, size, seconds * 1e3, other * 1e3, rate, unit, share))


def step(requests: int, query_len: int, context: int) -> AttentionMetadata:
    """Equal requests with query_len new tokens each, their blocks in random order."""
    blocks = -(-context // BLOCK)
    table = (torch.randperm(requests * blocks) + 1).int().view(requests, blocks)
    positions = torch.arange(context - query_len, context)
    slots = table[:, positions // BLOCK].long() * BLOCK + positions % BLOCK
    return AttentionMetadata(
        query_start_loc=torch.arange(requests + 1, dtype=torch.int32) * query_len,
        seq_lens=torch.full((requests,), context, dtype=torch.int32),
        page_table=table,
        slot_mapping=slots.flatten(),
        positions=positions.repeat(requests),
        num_requests=requests,
        num_tokens=requests * query_len,
        max_query_len=query_len,
        max_seq_len=context,
    )


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, fewer repeats")
    parser.add_argument("--json", type=output_file)
    args = parser.parse_args()
    ceilings = measure()
    bench = Bench(ceilings, 3 if args.quick else 9)
    batches = (1, 8, 32) if args.quick else (1, 2, 4, 8, 16, 32, 64, 256, 512)
    contexts = [(1, 1, 200), (8, 1, 200), (32, 1, 200), (32, 1, 1000)]
    contexts += [] if args.quick else [(1, 1, 16384), (4, 1, 8192), (1, 170, 170), (1, 512, 512), (1, 2048, 2048)]
    jobs: list[Callable[[], None]] = [lambda kind=kind: bench.layers(kind, batches) for kind in BYTES_PER_WEIGHT]
    jobs += [lambda kind=kind: bench.head(kind, batches[:6]) for kind in ("bf16", "Q8_0")]
    jobs += [lambda sizes=sizes: bench.attention(*sizes) for sizes in contexts]
    jobs += [lambda tokens=tokens: bench.small(tokens) for tokens in (1, 8, 32, 256)]
    with torch.inference_mode(), Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        for job in progress.track(jobs, description="kernels"):
            job()
    report = Report(
        title="CPU kernels: compiled against torch",
        environment=environment(),
        ceilings=msgspec.to_builtins(ceilings),
        config={"layers": LAYERS, "dtype": "bfloat16", "block_size": BLOCK, "threads": torch.get_num_threads()},
        metrics={f"{row.operation}, {row.size}": msgspec.to_builtins(row) for row in bench.rows},
    )
    report.show_table(
        ["operation", "size", "ours ms", "torch ms", "torch / ours", "rate", "", "of the ceiling"],
        [cells(row) for row in bench.rows],
    )
    report.show_environment()
    if args.json:
        report.write_json(args.json)
    return 0


def cells(row: Row) -> list[Any]:
    torch_ms = "-" if row.torch is None else f"{row.torch:.2f}"
    ratio = "-" if row.torch is None else f"{row.torch / row.ours:.1f}"
    return [
        row.operation,
        row.size,
        f"{row.ours:.2f}",
        torch_ms,
        ratio,
        f"{row.rate:.1f}",
        row.unit,
        f"{row.share:.0%}",
    ]


if __name__ == "__main__":
    sys.exit(main())
