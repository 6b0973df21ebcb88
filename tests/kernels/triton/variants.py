"""The kernel variants that are shipped, as their launchers launch them for a target."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from kernels.layout import LayerKV
from kernels.metadata import AttentionMetadata
from kernels.ops import QkvLayout
from kernels.triton.activation import gated_activation
from kernels.triton.decode_attention import decode_attention
from kernels.triton.invariant_attention import invariant_attention
from kernels.triton.kv_write import copy_blocks, rope_and_write_kv, zero_blocks
from kernels.triton.launch import Target, decode_config, invariant_config, prefill_config
from kernels.triton.matmul import matmul
from kernels.triton.prefill_attention import prefill_attention
from kernels.triton.quantized_matmul import PackedWeight, quantized_matmul
from kernels.triton.rms_norm import rms_norm
from kernels.triton.sampling import sample
from tests.kernels.triton.recording import Launch, recording

TARGETS = {
    "sm_80": Target("sm_80", 108),
    "sm_90": Target("sm_90", 132),
    "sm_100": Target("sm_100", 148),
    "gfx942": Target("gfx942", 304),
}
HEAD_DIMS = (64, 80, 96, 128, 256)
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor without memory: launchers look at shapes and strides only."""
    return torch.empty(shape, dtype=dtype, device="meta")


def kv_layer(head_dim: int, *, dtype: torch.dtype = BF16, num_kv_heads: int = 8, block_size: int = 16) -> LayerKV:
    key, value = (empty(1000, block_size, num_kv_heads, head_dim, dtype=dtype) for _ in range(2))
    if dtype.itemsize > 1:
        return LayerKV(key, value)
    return LayerKV(key, value, empty(dtype=torch.float32), empty(dtype=torch.float32))


def step(query_lens: list[int], *, width: int = 512) -> AttentionMetadata:
    """A step's tensors; width: of the page table."""
    num_requests, num_tokens = len(query_lens), sum(query_lens)
    return AttentionMetadata(
        query_start_loc=empty(num_requests + 1, dtype=torch.int32),
        seq_lens=empty(num_requests, dtype=torch.int32),
        page_table=empty(num_requests, width, dtype=torch.int32),
        slot_mapping=empty(num_tokens, dtype=torch.int64),
        positions=empty(num_tokens, dtype=torch.int64),
        num_requests=num_requests,
        num_tokens=num_tokens,
        max_query_len=max(query_lens),
        max_seq_len=width * 16,
    )


def shipped(target: Target) -> Iterator[tuple[str, Launch]]:
    """(variant's name, launch) of every kernel and configuration for the target."""
    with recording() as launches:
        for name in _launch_all(target):
            for launch in launches:
                yield f"{launch.name.removesuffix('_kernel')}-{name}", launch
            launches.clear()


def _launch_all(target: Target) -> Iterator[str]:
    yield from _attention(target)
    for head_dim, norms in ((64, False), (80, True), (128, True), (256, False)):
        norm = empty(head_dim) if norms else None
        layout = QkvLayout(32, 8, head_dim, norm, norm)
        rope_and_write_kv(empty(8, 48 * head_dim), layout, _rotation(head_dim), kv_layer(head_dim), step([1] * 8))
        yield f"d{head_dim}" + ("-norm" if norms else "")
    if target.has_fp8:
        layer = kv_layer(128, dtype=FP8)
        rope_and_write_kv(empty(8, 48 * 128), QkvLayout(32, 8, 128), _rotation(128), layer, step([1] * 8))
        yield "d128-fp8"
    rms_norm(empty(8, 576), empty(576), 1e-6)
    yield "576"
    rms_norm(empty(8, 4096), empty(4096), 1e-6, residual=empty(8, 4096))
    yield "4096-add"
    for kind in ("silu", "gelu_tanh"):
        gated_activation(empty(8, 24576), kind)
        yield kind
    yield from _products(target)
    i64, f32 = torch.int64, torch.float32
    sample(
        empty(8, 151936, dtype=f32), temperature=empty(8, dtype=f32), top_k=empty(8, dtype=torch.int32),
        top_p=empty(8, dtype=f32), min_p=empty(8, dtype=f32), seeds=empty(8, dtype=i64), positions=empty(8, dtype=i64),
    )  # fmt: skip
    yield "f32"
    copy_blocks(kv_layer(128), empty(4, dtype=i64), empty(4, dtype=i64))
    yield "copy"
    zero_blocks(kv_layer(128), empty(4, dtype=i64))
    yield "zero"


def _attention(target: Target) -> Iterator[str]:
    decode_step, prefill_step = step([1] * 8), step([100] * 8)

    def decode(
        head_dim: int, *, group: int = 4, dtype: torch.dtype = BF16, kv: torch.dtype = BF16, **form: float
    ) -> None:
        q = empty(8 * form.get("max_query", 1), 8 * group, head_dim, dtype=dtype)
        decode_attention(
            q, kv_layer(head_dim, dtype=kv), decode_step, q.flatten(1),
            scale=0.1, config=decode_config(target, head_dim), num_sms=target.num_sms, **form,
        )  # fmt: skip

    def prefill(head_dim: int, *, group: int = 4, kv: torch.dtype = BF16, **form: Any) -> None:
        q = empty(800, 8 * group, head_dim)
        prefill_attention(
            q, kv_layer(head_dim, dtype=kv), prefill_step, q.flatten(1),
            scale=0.1, config=prefill_config(target, head_dim), **form,
        )  # fmt: skip

    def invariant(head_dim: int, *, group: int = 4, kv: torch.dtype = BF16, **form: Any) -> None:
        q = empty(800, 8 * group, head_dim)
        invariant_attention(
            q, kv_layer(head_dim, dtype=kv), prefill_step, q.flatten(1),
            scale=0.1, config=invariant_config(target, head_dim), **form,
        )  # fmt: skip

    for head_dim in HEAD_DIMS:
        decode(head_dim)
        prefill(head_dim)
        invariant(head_dim)
        yield f"d{head_dim}"
    decode(128, group=16)
    prefill(64, group=3)
    invariant(64, group=3)
    yield "odd-group"
    decode(128, max_query=8)
    yield "d128-8-queries"
    decode(128, dtype=FP16, kv=FP16)
    yield "d128-fp16"
    decode(256, window=1024, soft_cap=50.0)
    prefill(256, window=1024, soft_cap=50.0)
    invariant(256, window=1024, soft_cap=50.0)
    yield "d256-window-cap"
    if target.has_fp8:
        decode(128, kv=FP8)
        prefill(128, kv=FP8)
        invariant(128, kv=FP8)
        yield "d128-fp8"


def _products(target: Target) -> Iterator[str]:
    for name, dtype, out_features, form in (
        ("narrow", BF16, 4096, {}),
        ("wide-bias", BF16, 12288, {"bias": empty(12288)}),
        ("logits", BF16, 151936, {"out_dtype": torch.float32}),
        ("narrow-fp16", FP16, 4096, {}),
        ("fp32", torch.float32, 4096, {}),
    ):
        x, weight = empty(1, 4096, dtype=dtype), empty(out_features, 4096, dtype=dtype)
        matmul(x, weight, **{"bias": None, "out_dtype": dtype, "target": target} | form)
        yield name
    out_features, in_features = 4096, 4096
    scales = empty(in_features // 32, out_features, dtype=FP16)
    four = PackedWeight(empty(in_features // 32, out_features, 16, dtype=torch.uint8), scales, scales, None)
    eight = PackedWeight(empty(in_features // 32, out_features, 32, dtype=torch.int8), scales, None, None)
    for name, weight in (("4-bit", four), ("8-bit", eight)):
        for rows in (1, 64):
            quantized_matmul(empty(rows, in_features), weight)
            yield f"{name}-{rows}"
        quantized_matmul(empty(1, in_features), weight, batch_invariant=True)
        yield f"{name}-invariant"
    quantized_matmul(empty(1, in_features), replace(four, bias=empty(out_features)))
    yield "4-bit-1-bias"


def _rotation(head_dim: int) -> torch.Tensor:
    return empty(4096, head_dim, dtype=torch.float32)
