"""What a step launches, from a recording: how many kernels, how often they would be compiled, and that nothing waits.

Tensors are meta tensors: a launcher that looks at their contents fails by itself.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.layout import KVCacheSpec
from kernels.ops import DecoderLayer, QkvLayout
from kernels.triton.ops import TritonOps
from server.models.decoder import Decoder
from server.models.spec import ModelSpec, RopeSpec
from tests.kernels.triton.recording import Launch, recording
from tests.kernels.triton.variants import TARGETS, empty, step

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "item")
"""Operations that wait for the device."""

NO_KERNEL = {
    "_unsafe_view",
    "alias",
    "detach",
    "expand",
    "flatten",
    "reshape",
    "select",
    "slice",
    "t",
    "transpose",
    "view",
}
NO_KERNEL |= {"empty", "empty_like", "new_empty"}
"""Operations that launch nothing: views and allocations."""


class Watch(TorchDispatchMode):
    """Counts the kernels that torch launches, and refuses what waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        to = (kwargs or {}).get("device")
        assert name not in WAITS, f"{name} waits for the device"
        assert to is None or torch.device(to).type == "meta", f"{name} copies to {to}"
        result = func(*args, **(kwargs or {}))
        if name not in NO_KERNEL and result is not args[0]:  # `to` may have nothing to do
            self.kernels.append(name)
        return result


@contextmanager
def watched() -> Iterator[tuple[list[Launch], list[str]]]:
    with recording() as launches, Watch() as watch:
        yield launches, watch.kernels


def decoder(num_layers: int, *, qk_norm: bool = True, batch_invariant: bool = False) -> Decoder:
    """Qwen3-8B's shapes, with as many layers as wanted and no memory."""
    heads, kv_heads, head_dim, hidden, inner = 32, 8, 128, 4096, 12288
    ops = TritonOps("meta", batch_invariant=batch_invariant, target=TARGETS["sm_90"])
    spec = ModelSpec(
        "qwen3", 151936, hidden, num_layers, heads, kv_heads, head_dim, inner, 4096, 1e-6,
        RopeSpec(1e6, head_dim), (0,) * num_layers, head_dim**-0.5, qk_norm=qk_norm,
    )  # fmt: skip

    def linear(out_features: int, in_features: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return ops.pack_linear([empty(out_features, in_features)], None, dtype=torch.bfloat16)

    norm = empty(head_dim) if qk_norm else None
    layers = [
        DecoderLayer(
            input_norm=empty(hidden),
            qkv=linear((heads + 2 * kv_heads) * head_dim, hidden),
            qkv_layout=QkvLayout(heads, kv_heads, head_dim, norm, norm),
            output=linear(hidden, heads * head_dim),
            mlp_norm=empty(hidden),
            gate_up=linear(2 * inner, hidden),
            down=linear(hidden, inner),
            local_rope=False,
            window=0,
        )
        for _ in range(num_layers)
    ]
    return Decoder(
        spec=spec, ops=ops, dtype=torch.bfloat16, embed=ops.pack_embedding(empty(151936, hidden), dtype=torch.bfloat16),
        layers=layers, final_norm=empty(hidden), lm_head=linear(151936, hidden), freq_factors=None,
        device=torch.device("meta"), weight_bytes=0,
    )  # fmt: skip


def run(model: Decoder, query_lens: list[int], *, width: int = 256) -> tuple[list[Launch], list[str]]:
    """One step with a row to sample for each request: (Triton's launches, the names of torch's kernels)."""
    spec = KVCacheSpec(model.spec.num_layers, 8, 128, 16, torch.bfloat16)
    cache = model.ops.allocate_kv_cache(spec, num_blocks=100, device=torch.device("meta"))
    meta = step(query_lens, width=width)
    token_ids, rows = (empty(n, dtype=torch.int64) for n in (meta.num_tokens, meta.num_requests))
    with torch.inference_mode(), watched() as (launches, kernels):
        model.logits(model.forward(token_ids, meta, cache, rows))
    return launches, kernels


@pytest.mark.parametrize("query_lens", [[1] * 8, [100], [1, 1, 60, 1]], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_ten_kernels_a_layer(query_lens: list[int], qk_norm: bool, batch_invariant: bool) -> None:
    """A fusion undone, a cast or a copy slipped in: at batch 1 the launches are the step."""
    models = [decoder(layers, qk_norm=qk_norm, batch_invariant=batch_invariant) for layers in (3, 4)]
    counts = [sum(map(len, run(model, query_lens))) for model in models]
    both_attention_kernels = len(set(query_lens)) > 1 and not batch_invariant
    assert counts[1] - counts[0] <= 10 + both_attention_kernels


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_trace_compiles_nothing_after_warm_up(batch_invariant: bool) -> None:
    """An argument that Triton specialises on and that varies: a compilation in the middle of serving. The warm-up is
    the model runner's."""
    model = decoder(2, batch_invariant=batch_invariant)
    warm_up = [[1], [2], [4], [8], [1, 50], [50]]
    known = {launch.key() for query_lens in warm_up for launch in run(model, query_lens)[0]}
    generator = random.Random(0)
    for _ in range(60):
        kind = generator.choice([(1, 1), (1, 3), (1, 8), (1, 300), (16, 16), (40, 200)])
        query_lens = [generator.randint(*kind) for _ in range(generator.randint(1, 32))]
        launches, _ = run(model, query_lens, width=generator.randint(1, 300))
        new = [launch.name for launch in launches if launch.key() not in known]
        assert not new, f"{query_lens}: compiles {new}"


def test_the_batch_invariant_form_is_one_set_of_kernels() -> None:
    """A variant chosen by the batch: other instructions for the same row."""
    model = decoder(1, batch_invariant=True)
    keys = [{launch.key() for launch in run(model, lens)[0]} for lens in ([1], [1] * 200, [2], [700, 1], [40] * 70)]
    assert all(key == keys[0] for key in keys)


@pytest.mark.parametrize(("few", "many"), [(1, 32), (33, 64), (129, 256)])
def test_batch_buckets_share_their_kernels(few: int, many: int) -> None:
    """Padded batch sizes are powers of two: within one, the batch size is an ordinary number."""
    model = decoder(1)
    keys = [{launch.key() for launch in run(model, [1] * n)[0]} for n in (few, many)]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("offend", [lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: bool(x.any())])
def test_the_watch_sees_what_it_should(offend: Callable[[torch.Tensor], object]) -> None:
    """A watch that lets a wait pass would prove nothing."""
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), watched():
        offend(empty(4, dtype=torch.float32))
