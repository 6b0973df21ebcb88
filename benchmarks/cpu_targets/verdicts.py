"""Targets C1 to C6: from what was measured to a verdict each."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.cpu_targets.measure import ATTENTION, BF16, PREFILL_LEN, PROMPT_LEN, Q4_1, Q8_0, Measured, Timing
from benchmarks.kernels.cpu import BYTES_PER_WEIGHT, DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, SHAPES, VOCABULARY, Row

LAYER_WEIGHTS = LAYERS * sum(rows * columns for rows, columns in SHAPES)
HEAD_WEIGHTS = VOCABULARY * HIDDEN
HEAD_KIND = {BF16: BF16, Q8_0: Q8_0, Q4_1: Q8_0}
"""The format of the LM head in each format of the model."""
KV_BYTES = 2 * LAYERS * KV_HEADS * DIM * 2
"""Of one token."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """value: the figure that `limit` speaks of; shown as unit says: a percentage, or a multiple."""

    target_id: str
    what: str
    value: float
    limit: float
    unit: str
    most: bool = False
    """Whether the limit is the most that is allowed, not the least."""

    @property
    def holds(self) -> bool:
        return self.value <= self.limit if self.most else self.value >= self.limit

    def cells(self) -> list[str]:
        sign = "<=" if self.most else ">="
        verdict = "holds" if self.holds else "MISSED"
        return [self.target_id, self.what, f"{sign} {self._shown(self.limit)}", self._shown(self.value), verdict]

    def _shown(self, value: float) -> str:
        return f"{value:.1%}" if self.unit == "%" else f"{value:.2f} x"


def step_bytes(kind: str) -> float:
    """What a decode step of one request must read: every weight once, and the keys and values of its context."""
    weights = LAYER_WEIGHTS * BYTES_PER_WEIGHT[kind] + HEAD_WEIGHTS * BYTES_PER_WEIGHT[HEAD_KIND[kind]]
    return weights + KV_BYTES * (PROMPT_LEN + 32)


def prefill_flop(num_tokens: int) -> int:
    """Of one prompt: the layers, causal attention, and the logits of its last token."""
    pairs = num_tokens * (num_tokens + 1) // 2
    return 2 * num_tokens * LAYER_WEIGHTS + 4 * LAYERS * pairs * HEADS * DIM + 2 * HEAD_WEIGHTS


def gain(faster: Timing, slower: Timing, *, requests: int = 1) -> float:
    """Tokens a second of `faster`, a batch of so many requests, over those of `slower`, one request; run by run."""
    return statistics.median(b / a * requests for a, b in zip(faster.runs, slower.runs, strict=True))


def row_of(measured: Measured, operation: str, size: str) -> Row:
    """Raises StopIteration where benchmarks/kernels/cpu.py calls it something else."""
    return next(row for row in measured.rows if row.operation == operation and row.size == size)


def verdicts(measured: Measured) -> Iterator[Verdict]:
    yield from bandwidth(measured)
    yield from batches_and_formats(measured)
    yield from attention(measured)
    yield from prefill(measured)
    for size, timing in measured.decode[Q4_1].items():
        what = f"everything but the forward pass, of a step of {size} requests, Q4_1"
        yield Verdict("C6", what, timing.overhead, 0.05, "%", most=True)


def bandwidth(measured: Measured) -> Iterator[Verdict]:
    read = measured.ceilings.read_gb_s * 1e9
    for kind, sizes in measured.decode.items():
        share = step_bytes(kind) / sizes[1].seconds / read
        yield Verdict("C1", f"a whole step of one request, {kind}, of the read bandwidth", share, 0.7, "%")
    for kind in measured.decode:
        share = row_of(measured, f"{LAYERS} layers, {kind}", "batch 1").share
        yield Verdict("C1", f"its linear layers, {kind}, each called alone", share, 0.7, "%")


def batches_and_formats(measured: Measured) -> Iterator[Verdict]:
    one = measured.decode[BF16][1]
    for kind, least in ((Q8_0, 1.7), (Q4_1, 2.5)):
        yield Verdict(
            "C2", f"{kind} against bf16, tok/s of one request", gain(measured.decode[kind][1], one), least, "x"
        )
    for size, least in ((8, 4.0), (16, 6.0)):
        ratio = gain(measured.decode[BF16][size], one, requests=size)
        yield Verdict("C3", f"{size} requests against one, bf16, tok/s", ratio, least, "x")


def attention(measured: Measured) -> Iterator[Verdict]:
    for requests, query_len, context in ATTENTION:
        row = row_of(measured, f"decode attention x {LAYERS}", f"{requests} x {query_len} of {context}")
        what = f"decode attention, {requests} x {context:,} tokens"
        yield Verdict("C4", f"{what}, of the read bandwidth", row.share, 0.5, "%")
        if row.torch is not None:
            yield Verdict("C4", f"{what}, against gather + SDPA", row.torch / row.ours, 2.5, "x")


def prefill(measured: Measured) -> Iterator[Verdict]:
    gemm = measured.ceilings.gemm_bf16_gflop_s * 1e9
    for kind in (BF16, Q4_1):
        share = prefill_flop(PREFILL_LEN) / measured.prefill[kind].seconds / gemm
        yield Verdict(
            "C5", f"a whole prefill of {PREFILL_LEN} tokens, {kind}, of the bf16 matrix rate", share, 0.6, "%"
        )
    for kind in (BF16, Q4_1):
        row = row_of(measured, f"{LAYERS} layers, {kind}", f"batch {PREFILL_LEN}")
        share = 2 * PREFILL_LEN * LAYER_WEIGHTS / (row.ours / 1e3) / gemm
        yield Verdict("C5", f"its linear layers, {kind}", share, 0.6, "%")
