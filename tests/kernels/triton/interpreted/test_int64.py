"""Caches of more than 2**31 elements, without the memory: the storage is a sparse file and a block's stride is huge."""

from pathlib import Path

import pytest
import torch

from kernels.layout import LayerKV
from kernels.ops import QkvLayout
from kernels.reference import ReferenceOps
from kernels.triton.ops import TritonOps
from tests.kernels.cases import BATCHES, TOLERANCE, PagedCase, build_case, fill_cache, identity_rotation, oracle

OPS = TritonOps("cpu")
BLOCK_STRIDE = 2**28
"""Elements from one block to the next: block 8 lies at 2**31."""


def huge_layer(case: PagedCase, folder: Path) -> LayerKV:
    shape = (case.num_blocks, case.block_size, case.num_kv_heads, case.head_dim)
    strides = (BLOCK_STRIDE, case.num_kv_heads * case.head_dim, case.head_dim, 1)
    size = case.num_blocks * BLOCK_STRIDE

    def view(name: str) -> torch.Tensor:
        storage = torch.from_file(str(folder / name), shared=True, size=size, dtype=torch.float16)
        return storage.as_strided(shape, strides)

    return LayerKV(view("key"), view("value"))


def far_case(batch: str) -> PagedCase:
    """The batch with blocks of 16 tokens, among them some beyond 2**31 elements."""
    case = build_case(BATCHES[batch], dtype=torch.float16)
    assert int(case.meta.page_table.max()) * BLOCK_STRIDE > 2**31
    return case


@pytest.mark.parametrize("batch", ["decode_uneven", "mixed", "long_chunk"])
def test_attention_beyond_2_31_elements(batch: str, tmp_path: Path) -> None:
    """An offset computed in 32 bits: fine on every small cache, another request's memory on a real one."""
    case = far_case(batch)
    small, layer = fill_cache(ReferenceOps(), case), huge_layer(case, tmp_path)
    layer.key.copy_(small.key)
    layer.value.copy_(small.value)
    out = OPS.attention(case.q, layer, case.meta, scale=case.scale, num_kv_heads=case.num_kv_heads)
    torch.testing.assert_close(out.double(), oracle(case), **TOLERANCE[torch.float16])


def test_write_beyond_2_31_elements(tmp_path: Path) -> None:
    """The same for the slot arithmetic of the write."""
    case = far_case("mixed")
    small, layer = fill_cache(ReferenceOps(), case), huge_layer(case, tmp_path)
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(case.meta.num_tokens, 8 * 64, generator=generator).half()
    for ops, target in ((ReferenceOps(), small), (OPS, layer)):
        ops.rope_and_write_kv(qkv, QkvLayout(4, 2, 64), identity_rotation(100, 64), target, case.meta)
    slots = case.meta.slot_mapping
    for got, want in ((layer.key, small.key), (layer.value, small.value)):
        assert torch.equal(got[slots // 16, slots % 16], want[slots // 16, slots % 16])
