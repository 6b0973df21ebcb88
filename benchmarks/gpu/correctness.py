"""The kernels against the reference operations on the device, in the dtype that is served: figures of wrong kernels
are worth nothing."""

import torch

from benchmarks.gpu.batches import Problem, Shape
from benchmarks.gpu.bench import Bench
from kernels.metadata import AttentionMetadata
from kernels.ops import QkvLayout
from kernels.reference import ReferenceOps
from kernels.triton.ops import TritonOps
from kernels.triton.sampling import sample

TOLERANCE = 2e-2
"""Absolute, for unit-variance inputs in bfloat16."""

BATCHES = ("1q1s1", "3q1s1k", "1q1s16k", "8q1s300_1q1s5k", "2q100", "1q16s1k_4q1s77", "4q8s512", "1q300s1k_1q1s129")
SHAPES = (Shape(32, 8, 128), Shape(16, 8, 128), Shape(9, 3, 64), Shape(8, 8, 80), Shape(8, 1, 256), Shape(16, 1, 96))


def check(bench: Bench) -> bool:
    """Whether all is right. Notes the largest error of each operation."""
    worst = {
        "attention": max(_attention(bench, batch, shape) for batch in BATCHES for shape in _shapes(bench)),
        "attention, window and cap": max(
            _attention(bench, batch, shape, window=100, soft_cap=20.0) for batch in BATCHES for shape in _shapes(bench)
        ),
        "RoPE and cache write": max(_rope(bench, shape) for shape in _shapes(bench)),
        "norm and activation": _pointwise(bench),
        "greedy sampling": _sampling(bench),
        "batch invariance": max(_invariance(bench, shape) for shape in _shapes(bench)),
    }
    for name, error in worst.items():
        bench.note("", f"largest error: {name}", error, "", most=TOLERANCE)
    return all(error <= TOLERANCE for error in worst.values())


def _shapes(bench: Bench) -> tuple[Shape, ...]:
    return (Shape(4, 2, 16),) if bench.dry else SHAPES


def _attention(bench: Bench, batch: str, shape: Shape, *, window: int = 0, soft_cap: float = 0.0) -> float:
    problem = bench.problem(batch, shape)
    errors = []
    for ops in (bench.ops, TritonOps(bench.device, batch_invariant=True)):
        got, want = (
            each.attention(
                problem.q,
                problem.layer,
                problem.meta,
                scale=shape.head_dim**-0.5,
                num_kv_heads=shape.num_kv_heads,
                window=window,
                soft_cap=soft_cap,
            )
            for each in (ops, ReferenceOps())
        )
        errors.append(_error(got, want))
    return max(errors)


def _rope(bench: Bench, shape: Shape) -> float:
    problem = bench.problem("1q100s200_3q1s50", shape)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv = torch.randn(problem.meta.num_tokens, width, device=bench.device, dtype=bench.dtype)
    norm = torch.rand(shape.head_dim, device=bench.device, dtype=bench.dtype) + 0.5
    layout = QkvLayout(shape.num_heads, shape.num_kv_heads, shape.head_dim, norm, norm)
    angles = torch.rand(problem.meta.max_seq_len, shape.head_dim // 2, device=bench.device)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    outputs = []
    for ops in (bench.ops, ReferenceOps()):
        q = ops.rope_and_write_kv(qkv, layout, cos_sin, problem.layer, problem.meta)
        slots = problem.meta.slot_mapping
        outputs.append([q, *(kv.flatten(0, 1)[slots] for kv in (problem.layer.key, problem.layer.value))])
    return max(_error(got, want) for got, want in zip(*outputs, strict=True))


def _pointwise(bench: Bench) -> float:
    tokens, channels = (3, 64) if bench.dry else (300, 4096)
    x, residual = (torch.randn(tokens, channels, device=bench.device, dtype=bench.dtype) for _ in range(2))
    weight = torch.rand(channels, device=bench.device, dtype=bench.dtype)
    reference = ReferenceOps()
    wanted = reference.add_rms_norm(x, residual.clone(), weight, 1e-6)
    got = bench.ops.add_rms_norm(x, residual, weight, 1e-6)
    gated = [ops.gated_activation(x, kind) for kind in ("silu", "gelu_tanh") for ops in (bench.ops, reference)]
    pairs = [*zip(got, wanted, strict=True), (gated[0], gated[1]), (gated[2], gated[3])]
    return max(_error(a, b) for a, b in pairs)


def _invariance(bench: Bench, shape: Shape) -> float:
    """0 if a request's bits are the same alone, in company and in any cut, else 1. In a dry run the largest difference:
    the interpreter multiplies with numpy, whose sums depend on where a row lies."""
    ops = TritonOps(bench.device, batch_invariant=True)
    problem = bench.problem("1q1s5k_1q100s3k_4q1s77_1q3s2k", shape)

    def attend(q: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        scale = shape.head_dim**-0.5
        return ops.attention(q, problem.layer, meta, scale=scale, num_kv_heads=shape.num_kv_heads)

    together, pairs, start = attend(problem.q, problem.meta), [], 0
    for request, (query_len, _) in enumerate(problem.pairs):
        middle = query_len // 2
        for first, last in {(0, query_len), (0, max(middle, 1)), (middle, query_len), (query_len - 1, query_len)}:
            rows = slice(start + first, start + last)
            pairs.append((attend(problem.q[rows], alone(problem, request, first, last)), together[rows]))
        start += query_len
    depth, width = (64, 40) if bench.dry else (4096, 6144)
    x, weight = (torch.randn(rows, depth, device=bench.device, dtype=bench.dtype) for rows in (70, width))
    product = ops.pack_linear([weight], None, dtype=bench.dtype)
    pairs += [(product(x[row:]), product(x)[row:]) for row in (1, 6, 37, 69)]
    if bench.dry:
        return max(_error(one, many) for one, many in pairs)
    return float(not all(torch.equal(one, many) for one, many in pairs))


def alone(problem: Problem, request: int, first: int, last: int) -> AttentionMetadata:
    """The step that has nothing but the request's new tokens first .. last - 1."""
    query_len, kv_len = problem.pairs[request]
    start, device = sum(count for count, _ in problem.pairs[:request]) + first, problem.q.device
    rows, seq_len = slice(start, start + last - first), kv_len - query_len + last
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, last - first], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32, device=device),
        page_table=problem.meta.page_table[request : request + 1],
        slot_mapping=problem.meta.slot_mapping[rows],
        positions=problem.meta.positions[rows],
        num_requests=1,
        num_tokens=last - first,
        max_query_len=last - first,
        max_seq_len=seq_len,
    )


def _sampling(bench: Bench) -> float:
    """0 if every token is the argmax, else 1."""
    rows, vocab_size = (2, 2000) if bench.dry else (64, 151936)
    logits = torch.randn(rows, vocab_size, device=bench.device)
    zeros, integers = (torch.zeros(rows, device=bench.device, dtype=dtype) for dtype in (torch.float32, torch.int64))
    tokens = sample(
        logits,
        temperature=zeros,
        top_k=integers.int(),
        top_p=zeros + 1,
        min_p=zeros,
        seeds=integers,
        positions=integers,
    )
    return float(not torch.equal(tokens, logits.argmax(-1)))


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference, of what exceeds 1 relative to its size; infinity for a NaN."""
    error = float(((got.float() - want.float()).abs() / want.float().abs().clamp(min=1)).max())
    return error if error == error else float("inf")
