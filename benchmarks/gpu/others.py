"""K8 and the kernels around attention: RoPE and write, norms, activations, sampling, quantised products."""

import torch

from benchmarks.gpu.bench import Bench
from kernels.ops import QkvLayout
from kernels.triton.quantized_matmul import PackedWeight, quantized_matmul
from kernels.triton.sampling import sample


def run(bench: Bench) -> None:
    for tokens in (64, 8192):
        _rope(bench, tokens)
        _pointwise(bench, tokens)
    _sampling(bench)
    _quantized(bench)


def _share(bench: Bench, num_bytes: int, milliseconds: float) -> float:
    return num_bytes / milliseconds / 1e6 / bench.ceilings.copy


def _rope(bench: Bench, tokens: int) -> None:
    problem = bench.problem(f"{tokens}q1s256" if tokens < 1000 else f"{tokens // 1024}q1k")
    shape, tokens = problem.shape, problem.meta.num_tokens
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv = torch.randn(tokens, width, device=bench.device, dtype=bench.dtype)
    cos_sin = torch.randn(problem.meta.max_seq_len, shape.head_dim, device=bench.device)
    layout = QkvLayout(shape.num_heads, shape.num_kv_heads, shape.head_dim)
    elapsed = bench.milliseconds(lambda: bench.ops.rope_and_write_kv(qkv, layout, cos_sin, problem.layer, problem.meta))
    share = _share(bench, 2 * qkv.nbytes, elapsed)
    least = 0.7 if tokens > 1000 else 0.0
    bench.note("K8", f"RoPE and write, {tokens} tokens, of the copy ceiling", share, "", least=least)


def _pointwise(bench: Bench, tokens: int) -> None:
    tokens, channels, inner = (4, 64, 96) if bench.dry else (tokens, 4096, 12288)
    x, residual = (torch.randn(tokens, channels, device=bench.device, dtype=bench.dtype) for _ in range(2))
    weight = torch.ones(channels, device=bench.device, dtype=bench.dtype)
    elapsed = bench.milliseconds(lambda: bench.ops.add_rms_norm(x, residual, weight, 1e-6))
    bench.note("", f"add and norm, {tokens} tokens, of the copy ceiling", _share(bench, 4 * x.nbytes, elapsed), "")
    gate_up = torch.randn(tokens, 2 * inner, device=bench.device, dtype=bench.dtype)
    elapsed = bench.milliseconds(lambda: bench.ops.gated_activation(gate_up, "silu"))
    bench.note(
        "", f"SiLU * up, {tokens} tokens, of the copy ceiling", _share(bench, gate_up.nbytes * 3 // 2, elapsed), ""
    )


def _sampling(bench: Bench) -> None:
    vocab_size = 2000 if bench.dry else 151936
    settings = {
        "greedy": (0.0, 0, 1.0),
        "temperature": (1.0, 0, 1.0),
        "top-k": (1.0, 50, 1.0),
        "top-p": (1.0, 0, 0.9),
        "top-k and top-p": (0.8, 50, 0.9),
    }
    for rows in (1, 64, 256):
        rows = min(rows, 2) if bench.dry else rows
        logits = 3 * torch.randn(rows, vocab_size, device=bench.device)
        for name, (temperature, top_k, top_p) in settings.items():
            ones = torch.ones(rows, device=bench.device)
            arguments = {
                "temperature": temperature * ones,
                "top_k": (top_k * ones).int(),
                "top_p": top_p * ones,
                "min_p": 0 * ones,
                "seeds": torch.arange(rows, device=bench.device),
                "positions": torch.arange(rows, device=bench.device),
            }
            elapsed = bench.milliseconds(lambda arguments=arguments, logits=logits: sample(logits, **arguments))
            bench.note("", f"sampling, {rows} rows of {vocab_size}, {name}", 1e3 * elapsed, "us")


def _quantized(bench: Bench) -> None:
    """As a share of the read ceiling at one row; against the dense product at many."""
    out_features, in_features = (64, 64) if bench.dry else (24576, 4096)
    groups = in_features // 32
    scales = torch.rand(groups, out_features, device=bench.device).half()
    packed = {
        "4-bit": PackedWeight(_codes(bench, groups, out_features, 16, torch.uint8), scales, scales, None),
        "8-bit": PackedWeight(_codes(bench, groups, out_features, 32, torch.int8), scales, None, None),
    }
    dense = torch.randn(out_features, in_features, device=bench.device, dtype=bench.dtype)
    for rows in (1, 16, 64, 512):
        x = torch.randn(min(rows, 4) if bench.dry else rows, in_features, device=bench.device, dtype=bench.dtype)
        plain = bench.milliseconds(lambda x=x: x @ dense.t())
        for name, weight in packed.items():
            elapsed = bench.milliseconds(lambda x=x, weight=weight: quantized_matmul(x, weight))
            num_bytes = weight.codes.nbytes + scales.nbytes * (1 + (weight.minima is not None))
            bench.note("", f"{name} product, {len(x)} rows, speed-up over bf16", plain / elapsed, "x")
            if rows == 1:
                share = num_bytes / elapsed / 1e6 / bench.ceilings.read
                bench.note("", f"{name} product, 1 row, of the read ceiling", share, "")


def _codes(bench: Bench, groups: int, out_features: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 127, (groups, out_features, size), device=bench.device).to(dtype)
