"""K1 to K7: decode and prefill attention; and what the batch-invariant form of it costs."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F

from benchmarks.gpu.batches import Problem
from benchmarks.gpu.bench import Bench
from kernels.triton.decode_attention import decode_attention
from kernels.triton.launch import decode_config
from kernels.triton.ops import TritonOps


def run(bench: Bench) -> None:
    _bandwidth(bench)
    _no_cliff(bench)
    _splits(bench)
    _pages(bench)
    _few_queries(bench)
    _prefill(bench)
    _batch_invariant(bench)


def _share_of_read(bench: Bench, target: str, batch: str, least: float) -> None:
    problem = bench.problem(batch)
    share = problem.kv_bytes / bench.attention_ms(problem) / 1e6 / bench.ceilings.read
    bench.note(target, f"decode {batch}, of the read ceiling", share, "", least=least)


def _bandwidth(bench: Bench) -> None:
    for batch in ("128q1s1k", "64q1s2k", "32q1s4k", "16q1s8k", "256q1s1k", "8q1s16k", "64q1s512_1q1s96k"):
        _share_of_read(bench, "K1", batch, 0.85)
    _share_of_read(bench, "K2", "1q1s16k", 0.5)
    _share_of_read(bench, "K2", "1q1s32k", 0.65)


def _no_cliff(bench: Bench) -> None:
    most = 3 if bench.dry else 256
    times = [bench.attention_ms(bench.problem(f"{count}q1s1k")) for count in range(1, most + 1)]
    steps = [later / earlier for earlier, later in pairwise(times)]
    bench.note("K3", f"decode at 1k keys, worst step from batch b to b + 1, b < {most}", max(steps), "x", most=1.10)


def _splits(bench: Bench) -> None:
    """One split is what a machine with next to no processors would take."""

    def milliseconds(problem: Problem, num_sms: int) -> float:
        config = decode_config(bench.target, problem.shape.head_dim)
        out = torch.empty_like(problem.q).flatten(1)
        run = partial(decode_attention, problem.q, problem.layer, problem.meta, out, scale=problem.shape.head_dim**-0.5)
        return bench.milliseconds(partial(run, config=config, num_sms=num_sms))

    num_sms = bench.target.num_sms
    for batch, least in (("1q1s32k", 3.0), ("4q1s8k", 0.95), ("32q1s2k", 0.95), ("128q1s1k", 0.95), ("8q1s200", 0.95)):
        problem = bench.problem(batch)
        gain = milliseconds(problem, 1) / milliseconds(problem, num_sms)
        bench.note("K4", f"decode {batch}, unsplit / split", gain, "x", least=least)


def _pages(bench: Bench) -> None:
    for batch in ("1q1s32k", "64q1s2k"):
        pairs = bench.pairs(batch)
        paged, contiguous, large = (
            bench.attention_ms(bench.problem(pairs, block_size=size, shuffle=shuffle))
            for size, shuffle in ((16, True), (max(kv for _, kv in pairs), False), (128, True))
        )
        bench.note("K5", f"decode {batch}, paged / contiguous", paged / contiguous, "x", most=1.05)
        bench.note("K5", f"decode {batch}, blocks of 16 / blocks of 128", paged / large, "x", most=1.05)


def _few_queries(bench: Bench) -> None:
    one = bench.attention_ms(bench.problem("32q1s4k"))
    for query_len in (2, 4, 8):
        ratio = bench.attention_ms(bench.problem(f"32q{query_len}s4k")) / one
        bench.note("K6", f"32 requests at 4k keys, {query_len} query tokens / one", ratio, "x", most=1.3)


def _prefill(bench: Bench) -> None:
    problem = bench.problem("1q8k")
    ours = bench.attention_ms(problem)
    tflops = problem.flops / ours / 1e9
    bench.note("K7", "prefill 1q8k, head dim 128", tflops, "TFLOP/s", least=400)
    length, shape = problem.pairs[0][0], problem.shape
    q, k, v = (
        torch.randn(1, heads, length, shape.head_dim, device=bench.device, dtype=bench.dtype)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    sdpa = bench.milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    bench.note("K7", "prefill 1q8k, rate / rate of torch's SDPA", sdpa / ours, "x", least=0.6)
    bench.note("K7", "prefill 1q8k, of the matrix ceiling", tflops / bench.ceilings.gemm, "")
    for batch in ("1q2k_32q1s1k", "4q512s4k", "16q128s1k", "1q2k"):
        problem = bench.problem(batch)
        bench.note("", f"{batch}", problem.flops / bench.attention_ms(problem) / 1e9, "TFLOP/s")


def _batch_invariant(bench: Bench) -> None:
    other = replace(bench, ops=TritonOps(bench.device, batch_invariant=True))
    for batch in ("1q1s1k", "1q1s32k", "64q1s2k", "1q8k", "1q2k_32q1s1k"):
        problem = bench.problem(batch)
        ratio = other.attention_ms(problem) / bench.attention_ms(problem)
        bench.note("", f"{batch}, batch-invariant / ordinary", ratio, "x")
