"""Decode and prefill kernels against the float64 oracle, over the shapes that models and schedulers produce."""

import math
from dataclasses import replace

import pytest
import torch

from kernels.layout import LayerKV
from kernels.reference import ReferenceOps
from kernels.triton.decode_attention import decode_attention
from kernels.triton.launch import DecodeConfig, PrefillConfig
from kernels.triton.ops import TritonOps
from kernels.triton.prefill_attention import prefill_attention
from tests.kernels.cases import BATCHES, TOLERANCE, PagedCase, Pair, build_case, fill_cache, oracle

OPS = TritonOps("cpu")
INVARIANT = TritonOps("cpu", batch_invariant=True)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def attend(case: PagedCase, *, ops: TritonOps | None = None, window: int = 0, soft_cap: float = 0.0) -> torch.Tensor:
    """The case's attention over a cache that the reference filled: both keep [block, slot, head, dim]."""
    layer = fill_cache(ReferenceOps(), case, poison=True)
    kv_heads = case.num_kv_heads
    return (ops or OPS).attention(
        case.q, layer, case.meta, scale=case.scale, num_kv_heads=kv_heads, window=window, soft_cap=soft_cap
    )


def check(case: PagedCase, out: torch.Tensor, *, window: int = 0, soft_cap: float = 0.0) -> None:
    want = oracle(case, window=window, soft_cap=soft_cap)
    assert out.dtype == case.q.dtype
    torch.testing.assert_close(out.double(), want, **TOLERANCE[case.q.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_every_batch_in_every_dtype(batch: str, dtype: str) -> None:
    """A wrong position, block edge or request boundary in decode, chunks, prefix hits or a mix of them."""
    case = build_case(BATCHES[batch], dtype=DTYPES[dtype])
    check(case, attend(case))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("window", [0, 16, 100])
def test_batch_invariant_form(batch: str, window: int) -> None:
    """The form with fixed splits is a kernel of its own, and must arrive at the same figures."""
    case = build_case(BATCHES[batch], num_heads=6, head_dim=80)
    check(case, attend(case, ops=INVARIANT, window=window), window=window)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 9, 16])
@pytest.mark.parametrize("pairs", [[(1, 37), (1, 16)], [(19, 35), (1, 9)]], ids=["decode", "mixed"])
def test_head_shapes(head_dim: int, group: int, pairs: list[Pair]) -> None:
    """Lanes of a padded head dim or a padded GQA group that reach a neighbour's head."""
    case = build_case(pairs, num_heads=2 * group, num_kv_heads=2, head_dim=head_dim)
    check(case, attend(case))


@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 64, 128])
@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.parametrize("pairs", [[(1, 130), (1, 7)], [(33, 130), (2, 66)]], ids=["decode", "prefill"])
def test_blocks_and_tiles_are_independent(block_size: int, tile: int, pairs: list[Pair]) -> None:
    """A kernel that takes its tile for a block: right only where the two sizes agree."""
    case = build_case(pairs, block_size=block_size)
    layer = fill_cache(ReferenceOps(), case, poison=True)
    out = torch.full_like(case.q, torch.nan).flatten(1)
    if case.meta.is_decode:
        config = DecodeConfig(tile=tile, num_warps=4, num_stages=2)
        decode_attention(case.q, layer, case.meta, out, scale=case.scale, config=config, num_sms=4)
    else:
        config = PrefillConfig(rows=32, tile=tile, num_warps=4, num_stages=2)
        prefill_attention(case.q, layer, case.meta, out, scale=case.scale, config=config)
    check(case, out)


@pytest.mark.parametrize("kv_len", [edge + delta for edge in (16, 32, 48, 64, 256, 512) for delta in (-1, 0, 1)])
@pytest.mark.parametrize("query_len", [1, 2, 15])
def test_edges(kv_len: int, query_len: int) -> None:
    """Off by one at the end of a block (16), a tile (32) or a split (256)."""
    case = build_case([(query_len, kv_len)], num_heads=2, num_kv_heads=1)
    check(case, attend(case))


@pytest.mark.parametrize("window", [1, 4, 16, 31, 32, 33, 100])
@pytest.mark.parametrize("batch", ["decode", "decode_uneven", "chunk", "mixed", "long_chunk"])
def test_sliding_window(batch: str, window: int) -> None:
    """Query p sees keys p - window + 1 .. p: off by one at either end, or a first tile skipped too early."""
    case = build_case(BATCHES[batch])
    check(case, attend(case, window=window), window=window)


@pytest.mark.parametrize("soft_cap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("batch", ["decode_uneven", "mixed"])
def test_soft_cap(batch: str, window: int, soft_cap: float) -> None:
    """A cap applied after the mask (which would unmask) or to unscaled scores."""
    case = build_case(BATCHES[batch])
    check(case, attend(case, soft_cap=soft_cap, window=window), soft_cap=soft_cap, window=window)


@pytest.mark.parametrize("query_lens", [(2, 2, 2), (1, 4, 3), (8, 1), (5,)])
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("window", [0, 6])
def test_a_few_queries_in_the_decode_kernel(query_lens: tuple[int, ...], group: int, window: int) -> None:
    """Causality between the packed queries of one request (speculation, short chunks)."""
    pairs = [(n, 40 + 30 * i + n) for i, n in enumerate(query_lens)]
    case = build_case(pairs, num_heads=2 * group, num_kv_heads=2)
    check(case, attend(case, window=window), window=window)


@pytest.mark.parametrize("num_sms", [1, 2, 16, 132])
@pytest.mark.parametrize("lengths", [(900,), (600, 3, 1), (1, 258, 700, 31), (256, 257, 512, 513)])
def test_any_number_of_splits(num_sms: int, lengths: tuple[int, ...]) -> None:
    """Split bookkeeping: a work item lost, taken twice, or merged into another request, on any machine's width."""
    case = build_case([(1, n) for n in lengths], num_heads=3, num_kv_heads=1, head_dim=16)
    layer = fill_cache(ReferenceOps(), case, poison=True)
    out = torch.full_like(case.q, torch.nan).flatten(1)
    config = DecodeConfig(tile=32, num_warps=4, num_stages=2)
    decode_attention(case.q, layer, case.meta, out, scale=case.scale, config=config, num_sms=num_sms)
    check(case, out)


def test_scores_far_apart() -> None:
    """Overflow of exp, or a running maximum that a later tile doesn't correct: the largest score comes last."""
    case = build_case([(1, 300), (20, 90)])
    layer = fill_cache(ReferenceOps(), case)
    scale = 40.0
    out = OPS.attention(case.q, layer, case.meta, scale=scale, num_kv_heads=case.num_kv_heads)
    stretched = build_case([(1, 300), (20, 90)])
    stretched.q.mul_(scale * math.sqrt(case.head_dim))
    torch.testing.assert_close(out.double(), oracle(stretched), atol=1e-4, rtol=1e-4)


def test_requests_without_tokens_in_a_padded_batch() -> None:
    """A graph bucket's padding rows (no query, length 0) must neither compute nor disturb their neighbours."""
    case = build_case([(1, 40), (1, 19)])
    meta = case.meta
    zeros = torch.zeros(3, dtype=torch.int32)
    padded = type(meta)(
        query_start_loc=torch.cat([meta.query_start_loc, meta.query_start_loc[-1:].repeat(3)]),
        seq_lens=torch.cat([meta.seq_lens, zeros]),
        page_table=torch.cat([meta.page_table, meta.page_table.new_zeros(3, meta.page_table.shape[1])]),
        slot_mapping=meta.slot_mapping,
        positions=meta.positions,
        num_requests=5,
        num_tokens=2,
        max_query_len=1,
        max_seq_len=40,
    )
    layer: LayerKV = fill_cache(ReferenceOps(), case, poison=True)
    out = OPS.attention(case.q, layer, padded, scale=case.scale, num_kv_heads=2)
    check(case, out)


def test_a_page_table_with_a_stride() -> None:
    """The runner's page table is a view of a wider buffer."""
    case = build_case(BATCHES["mixed"])
    wide = torch.zeros(case.meta.page_table.shape[0], 64, dtype=torch.int32)
    wide[:, : case.meta.page_table.shape[1]] = case.meta.page_table
    view = replace(case, meta=replace(case.meta, page_table=wide[:, :8]))
    check(view, attend(view))
