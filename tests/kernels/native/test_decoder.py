"""A whole forward pass in one call against the operations called one by one: equal bits, or it is another model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from kernels.cpu import CpuOps
from kernels.cpu.native_ops import NativeOps
from kernels.layout import KVCache, KVCacheSpec
from kernels.metadata import AttentionMetadata
from kernels.ops import DecoderLayer, DecoderPlan, FusedDecoder, Linear, QkvLayout, Weight
from server.models.decoder import Decoder
from server.models.spec import ModelSpec, RopeSpec
from tests.kernels.cases import BATCHES, Pair, metadata, rotation
from tests.kernels.native.test_quantized_linear import quantized

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM, BLOCK, POSITIONS = 3, 96, 160, 4, 2, 32, 16, 400
CPU = torch.device("cpu")
SPEC = ModelSpec(
    "test", 0, HIDDEN, LAYERS, HEADS, KV_HEADS, DIM, INNER, POSITIONS, 1e-5, RopeSpec(1e4, DIM), (0,) * LAYERS, 0.2
)  # fmt: skip
GEMMA = replace(
    SPEC, windows=(20, 0, 7), activation="gelu_tanh", sandwich_norms=True, qk_norm=True, attention_soft_cap=30.0
)
FAMILIES: dict[str, ModelSpec] = {
    "llama": SPEC,
    "biased": replace(SPEC, qkv_bias=True, output_bias=True, mlp_bias=True),
    "qk_norm": replace(SPEC, qk_norm=True),
    "window": replace(SPEC, windows=(9,) * LAYERS),
    "gemma": GEMMA,
}
WEIGHTS: dict[str, tuple[torch.dtype, tuple[str, ...]]] = {
    "float32": (torch.float32, ("",)),
    "bfloat16": (torch.bfloat16, ("",)),
    "Q4_1": (torch.bfloat16, ("Q4_1",)),
    "mixed": (torch.bfloat16, ("Q8_0", "Q4_0", "", "Q4_1")),
}
"""Activations' dtype, and the kinds that a layer's matrices take in turn; "" is dense."""


@dataclass(frozen=True, slots=True)
class Model:
    plan: DecoderPlan
    fused: FusedDecoder
    decoder: Decoder
    ops: NativeOps

    def cache(self, num_blocks: int, ops: CpuOps | None = None, *, dtype: torch.dtype | None = None) -> KVCache:
        spec = KVCacheSpec(LAYERS, KV_HEADS, DIM, BLOCK, dtype or self.plan.dtype)
        return (ops or self.ops).allocate_kv_cache(spec, num_blocks=num_blocks, device=CPU)


def build(ops: NativeOps, spec: ModelSpec, weights: str) -> Model:
    dtype, kinds = WEIGHTS[weights]
    generator = torch.Generator().manual_seed(1)

    def norm(size: int) -> torch.Tensor:
        return (torch.rand(size, generator=generator) + 0.5).to(dtype)

    def linear(shapes: Sequence[int], in_features: int, biased: bool) -> Linear:
        matrices: list[Weight] = []
        for index, rows in enumerate(shapes):
            dense = (torch.randn(rows, in_features, generator=generator) * 0.15).to(dtype)
            kind = kinds[index % len(kinds)]
            matrices.append(quantized(kind, rows, in_features, seed=rows) if kind else dense)
        bias = torch.randn(sum(shapes), generator=generator).to(dtype) if biased else None
        return ops.pack_linear(matrices, bias, dtype=dtype)

    def layer(window: int) -> DecoderLayer:
        q_norm, k_norm = (norm(DIM), norm(DIM)) if spec.qk_norm else (None, None)
        return DecoderLayer(
            input_norm=norm(HIDDEN),
            qkv=linear([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], HIDDEN, spec.qkv_bias),
            qkv_layout=QkvLayout(HEADS, KV_HEADS, DIM, q_norm, k_norm),
            output=linear([HIDDEN], HEADS * DIM, spec.output_bias),
            mlp_norm=norm(HIDDEN),
            gate_up=linear([INNER, INNER], HIDDEN, spec.mlp_bias),
            down=linear([HIDDEN], INNER, spec.mlp_bias),
            local_rope=spec.sandwich_norms and window > 0,
            window=window,
            post_attention_norm=norm(HIDDEN) if spec.sandwich_norms else None,
            post_mlp_norm=norm(HIDDEN) if spec.sandwich_norms else None,
        )

    plan = DecoderPlan(
        layers=tuple(layer(window) for window in spec.windows),
        final_norm=norm(HIDDEN),
        cos_sin=rotation(POSITIONS, DIM),
        local_cos_sin=rotation(POSITIONS, DIM // 2),
        dtype=dtype,
        norm_eps=spec.norm_eps,
        activation=spec.activation,
        attention_scale=spec.attention_scale,
        attention_soft_cap=spec.attention_soft_cap,
    )
    assert ops.fuse_decoder is not None
    fused = ops.fuse_decoder(plan)
    assert fused is not None
    return Model(plan, fused, one_by_one(ops, spec, plan), ops)


def one_by_one(ops: NativeOps, spec: ModelSpec, plan: DecoderPlan) -> Decoder:
    """The server's decoder on the plan's layers and tables."""

    def unused(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("tests begin with embedded tokens and end with hidden states")

    decoder = Decoder(
        spec=spec, ops=ops, dtype=plan.dtype, embed=unused, layers=list(plan.layers), final_norm=plan.final_norm,
        lm_head=unused, freq_factors=None, device=CPU, weight_bytes=0,
    )  # fmt: skip
    decoder._cos_sin, decoder._local_cos_sin = plan.cos_sin, plan.local_cos_sin
    return decoder


def steps(pairs: Sequence[Pair]) -> Iterator[AttentionMetadata]:
    """First all that the pairs take as computed, in one step, then their new tokens."""
    width = max(-(-kv_len // BLOCK) for _, kv_len in pairs)
    order = torch.randperm(len(pairs) * width, generator=torch.Generator().manual_seed(2)) + 1
    table = order.int().view(len(pairs), width)
    computed = [(kv_len - query_len, kv_len - query_len) for query_len, kv_len in pairs]
    before = [(row, pair) for row, pair in enumerate(computed) if pair[0]]
    if before:
        yield metadata([pair for _, pair in before], table[[row for row, _ in before]], block_size=BLOCK)
    yield metadata(pairs, table, block_size=BLOCK)


def embedded(meta: AttentionMetadata, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(meta.num_tokens, HIDDEN, generator=torch.Generator().manual_seed(meta.num_tokens)).to(dtype)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_are_those_of_the_single_operations(native: NativeOps, family: str, weights: str) -> None:
    """A norm, bias, table, window or buffer of another layer; a row that the last layer picks wrongly; KV lost."""
    model = build(native, FAMILIES[family], weights)
    for pairs in BATCHES.values():
        ours, theirs = (model.cache(len(pairs) * 20) for _ in range(2))
        for meta in steps(pairs):
            last = meta.query_start_loc[1:].long() - 1
            for rows in (last, None, last.flip(0).repeat(meta.num_tokens // len(last) + 1)):
                x = embedded(meta, model.plan.dtype)
                got = model.fused(x.clone(), meta, ours, rows)
                want = model.decoder.layer_by_layer(x, meta, theirs, rows)
                assert got is not None
                assert torch.equal(got, want)
                assert want.float().std() > 0.1, "nothing to compare"
        for one, other in zip(ours.layers, theirs.layers, strict=True):
            assert torch.equal(one.key, other.key)
            assert torch.equal(one.value, other.value)


@pytest.mark.parametrize("weights", ["float32", "mixed"])
def test_a_row_keeps_its_bits_whatever_its_company_and_the_threads(native: NativeOps, weights: str) -> None:
    """A request whose tokens change with its batch, the chunks of its prompt or the machine."""
    model = build(native, GEMMA, weights)
    pairs = [(60, 60), (1, 200), (9, 40)]
    *_, meta = steps(pairs)
    x = embedded(meta, model.plan.dtype)

    def run(cut: AttentionMetadata, x: torch.Tensor, cache: KVCache) -> torch.Tensor:
        out = model.fused(x.clone(), cut, cache, None)
        assert out is not None
        return out

    whole = run(meta, x, model.cache(60))
    threads = torch.get_num_threads()
    torch.set_num_threads(3 if threads != 3 else 1)
    try:
        assert torch.equal(run(meta, x, model.cache(60)), whole)
    finally:
        torch.set_num_threads(threads)
    cache = model.cache(60)
    for start, end in [(0, 1), (1, 18), (18, 60)]:
        chunk = metadata([(end - start, end)], meta.page_table[:1], block_size=BLOCK)
        assert torch.equal(run(chunk, x[start:end], cache), whole[start:end])


def test_a_cache_of_another_layout_or_dtype_is_left_to_the_operations(native: NativeOps) -> None:
    """Memory read in the wrong layout."""
    model = build(native, SPEC, "bfloat16")
    meta = next(steps([(3, 3)]))
    for cache in (model.cache(4, CpuOps()), model.cache(4, dtype=torch.float32)):
        before = [layer.key.clone() for layer in cache.layers]
        assert model.fused(embedded(meta, torch.bfloat16), meta, cache, None) is None
        assert all(torch.equal(layer.key, key) for layer, key in zip(cache.layers, before, strict=True))


def test_caches_take_turns(native: NativeOps) -> None:
    """Addresses of the cache before: its memory may be somebody else's by now."""
    model = build(native, SPEC, "bfloat16")
    meta = next(steps([(3, 3)]))
    first, second = model.cache(4), model.cache(4)
    for cache in (first, second, first):
        cache[LAYERS - 1].key.zero_()
        assert model.fused(embedded(meta, torch.bfloat16), meta, cache, None) is not None
        assert cache[LAYERS - 1].key.count_nonzero()


def test_a_step_of_which_no_row_is_wanted_writes_its_keys(native: NativeOps) -> None:
    """An empty tensor's address, which is null, taken for all rows: they go where there is no memory."""
    model = build(native, SPEC, "bfloat16")
    meta = next(steps([(3, 3)]))
    cache, expected = model.cache(4), model.cache(4)
    x = embedded(meta, torch.bfloat16)
    assert model.fused(x.clone(), meta, expected, None) is not None
    out = model.fused(x, meta, cache, torch.empty(0, dtype=torch.int64))
    assert out is not None
    assert out.shape == (0, HIDDEN)
    assert torch.equal(cache[LAYERS - 1].key, expected[LAYERS - 1].key)


@pytest.mark.parametrize("wrong", [-1, 3])
def test_a_row_out_of_range_is_an_error(native: NativeOps, wrong: int) -> None:
    """Memory before or behind the step's: the library takes bare addresses."""
    model = build(native, SPEC, "float32")
    meta = next(steps([(3, 3)]))
    with pytest.raises(IndexError):
        model.fused(embedded(meta, torch.float32), meta, model.cache(4), torch.tensor([0, wrong]))
    with pytest.raises(ValueError, match="expected"):
        model.fused(embedded(meta, torch.bfloat16), meta, model.cache(4), None)


@pytest.mark.parametrize("change", ["dtype", "activation", "norm", "linear", "shape", "inner"])
def test_plans_out_of_reach_are_refused(native: NativeOps, change: str) -> None:
    """A plan that the library would misread: it has no other check than this one."""
    plan = build(native, SPEC, "bfloat16").plan
    layer = plan.layers[1]
    wider = native.pack_linear([torch.randn(HIDDEN + 16, INNER).bfloat16()], None, dtype=torch.bfloat16)
    widest = replace(
        layer,
        gate_up=native.pack_linear([torch.randn(4 * INNER, HIDDEN).bfloat16()], None, dtype=torch.bfloat16),
        down=native.pack_linear([torch.randn(HIDDEN, 2 * INNER).bfloat16()], None, dtype=torch.bfloat16),
    )
    changed = {
        "dtype": replace(plan, dtype=torch.float16),
        "activation": replace(plan, activation="relu"),
        "norm": replace(plan, final_norm=plan.final_norm.float()),
        "linear": replace(plan, layers=(replace(layer, output=lambda x: x), layer)),
        "shape": replace(plan, layers=(layer, replace(layer, down=wider))),
        "inner": replace(plan, layers=(layer, widest)),  # the scratch memory is measured by the first layer
    }[change]
    assert native.fuse_decoder is not None
    assert native.fuse_decoder(plan) is not None
    assert native.fuse_decoder(changed) is None
