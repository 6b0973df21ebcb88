"""K9: whole decode steps of a model with random weights, launched one by one and as a captured graph; and what the
batch-invariant form of one costs."""

from collections.abc import Callable

import torch

from benchmarks.gpu.batches import Problem, Shape
from benchmarks.gpu.bench import Bench
from kernels.layout import KVCache, KVCacheSpec
from kernels.ops import DecoderLayer, Linear, QkvLayout
from kernels.triton.ops import TritonOps
from server.models.decoder import Decoder
from server.models.spec import ModelSpec, RopeSpec

SIZES = {
    # layers, hidden, heads, KV heads, head dim, MLP size, vocabulary; and the goal at batch 1
    "0.6B": ((28, 1024, 16, 8, 128, 3072, 151936), ("ms", 2.5)),
    "8B": ((36, 4096, 32, 8, 128, 12288, 151936), ("share", 0.75)),
}
DRY = (2, 64, 4, 2, 16, 96, 200)


def run(bench: Bench) -> None:
    for name, (sizes, goal) in SIZES.items():
        for form, ops in (("", bench.ops), (", batch-invariant", TritonOps(bench.device, batch_invariant=True))):
            model = build(bench, DRY if bench.dry else sizes, ops)
            for batch in ("1q1s1k", "8q1s1k", "64q1s1k"):
                _decode(bench, name + form, model, batch, goal if batch.startswith("1q") and not form else None)
            del model


def build(bench: Bench, sizes: tuple[int, ...], ops: TritonOps) -> Decoder:
    """Random weights in the shapes of Qwen3."""
    layers, hidden, heads, kv_heads, head_dim, inner, vocab_size = sizes
    spec = ModelSpec(
        "qwen3", vocab_size, hidden, layers, heads, kv_heads, head_dim, inner, 32768, 1e-6,
        RopeSpec(1e6, head_dim), (0,) * layers, head_dim**-0.5, qk_norm=True,
    )  # fmt: skip

    def linear(out_features: int, in_features: int, out_dtype: torch.dtype | None = None) -> Linear:
        weight = torch.randn(out_features, in_features, device=bench.device, dtype=bench.dtype) * in_features**-0.5
        return ops.pack_linear([weight], None, dtype=bench.dtype, out_dtype=out_dtype)

    def norm(size: int) -> torch.Tensor:
        return torch.ones(size, device=bench.device, dtype=bench.dtype)

    embedding = torch.randn(vocab_size, hidden, device=bench.device, dtype=bench.dtype)
    decoder = Decoder(
        spec=spec,
        ops=ops,
        dtype=bench.dtype,
        embed=ops.pack_embedding(embedding, dtype=bench.dtype),
        layers=[
            DecoderLayer(
                input_norm=norm(hidden),
                qkv=linear((heads + 2 * kv_heads) * head_dim, hidden),
                qkv_layout=QkvLayout(heads, kv_heads, head_dim, norm(head_dim), norm(head_dim)),
                output=linear(hidden, heads * head_dim),
                mlp_norm=norm(hidden),
                gate_up=linear(2 * inner, hidden),
                down=linear(hidden, inner),
                local_rope=False,
                window=0,
            )
            for _ in range(layers)
        ],
        final_norm=norm(hidden),
        lm_head=linear(vocab_size, hidden, torch.float32),
        freq_factors=None,
        device=bench.device,
        weight_bytes=0,
    )
    decoder.prepare_positions(4096)
    return decoder


def weight_bytes(spec: ModelSpec, itemsize: int) -> int:
    """What a decode step must read of the weights: all but the embedding."""
    attention = spec.hidden_size * (2 * spec.q_size + 2 * spec.kv_size)
    layer = attention + 3 * spec.hidden_size * spec.intermediate_size
    return itemsize * (spec.num_layers * layer + spec.vocab_size * spec.hidden_size)


def _decode(bench: Bench, name: str, model: Decoder, batch: str, goal: tuple[str, float] | None) -> None:
    spec = model.spec
    shape = Shape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    problem = bench.problem(batch, shape, pad_to=0 if bench.dry else 4096)
    kv_spec = KVCacheSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, 16, bench.dtype)
    cache = model.ops.allocate_kv_cache(kv_spec, num_blocks=len(problem.layer.key), device=bench.device)
    step = _step(model, problem, cache)
    target = "K9" if model.ops is bench.ops else ""
    with torch.inference_mode():
        step()
        eager = bench.milliseconds(step)
        bench.note(target, f"{name} step {batch}, launched one by one", eager, "ms")
        replay = step if bench.dry else _capture(step)
        graph = bench.milliseconds(replay)
        share = weight_bytes(spec, bench.dtype.itemsize) / graph / 1e6 / bench.ceilings.read
        most = goal[1] if goal and goal[0] == "ms" else 0.0
        least = goal[1] if goal and goal[0] == "share" else 0.0
        bench.note(target, f"{name} step {batch}, as a graph", graph, "ms", most=most)
        bench.note(target, f"{name} step {batch}, as a graph, of the weights' read", share, "", least=least)


def _step(model: Decoder, problem: Problem, cache: KVCache) -> Callable[[], torch.Tensor]:
    token_ids = torch.zeros(problem.meta.num_tokens, dtype=torch.int64, device=problem.q.device)
    return lambda: model.logits(model.forward(token_ids, problem.meta, cache)).argmax(-1)


def _capture(step: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """The step as one CUDA graph, after a warm-up on the capturing stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
