"""Paged attention of every CPU backend against float64 attention over contiguous keys."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from kernels.cpu import CpuOps
from kernels.cpu import step as cpu_step
from kernels.layout import KVCacheSpec, LayerKV
from kernels.ops import Ops, QkvLayout
from tests.kernels.cases import (
    BATCHES,
    BLOCK,
    TOLERANCE,
    PagedCase,
    build_case,
    fill_cache,
    identity_rotation,
    metadata,
    oracle,
    permuted,
)

HEADS = [  # (num_heads, num_kv_heads, head_dim): GQA groups 1, 2, 3, 4, 7, 8, 16 and head dims 64, 80, 128
    (1, 1, 64),
    (5, 5, 80),
    (4, 2, 128),
    (9, 3, 64),
    (8, 2, 80),
    (14, 2, 64),
    (8, 1, 128),
    (16, 1, 64),
]


def attend(ops: Ops, case: PagedCase, layer: LayerKV, *, window: int = 0, soft_cap: float = 0.0) -> torch.Tensor:
    return ops.attention(
        case.q,
        layer,
        case.meta,
        scale=case.scale,
        num_kv_heads=case.num_kv_heads,
        window=window,
        soft_cap=soft_cap,
    )


def check(ops: Ops, case: PagedCase, *, window: int = 0, soft_cap: float = 0.0) -> None:
    """The cache is poisoned: a slot that isn't the request's own shows up as NaN."""
    out = attend(ops, case, fill_cache(ops, case, poison=True), window=window, soft_cap=soft_cap)
    assert out.dtype == case.q.dtype
    want = oracle(case, window=window, soft_cap=soft_cap)
    assert_close(out.double(), want, **TOLERANCE[case.q.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("batch", BATCHES)
def test_matches_oracle(ops: Ops, batch: str, dtype: torch.dtype) -> None:
    """Wrong key range, block or position for some mix of decode, chunk and prefix hit; a NaN slot that is read."""
    check(ops, build_case(BATCHES[batch], num_heads=9, num_kv_heads=3, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_head_shapes(ops: Ops, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """A query head that reads another group's keys; a head dim that the vector width doesn't divide."""
    num_heads, num_kv_heads, head_dim = heads
    case = build_case(
        BATCHES["mixed"], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, seed=1
    )
    check(ops, case)


@pytest.mark.parametrize("block_size", [1, 2, 8, 32, 128])
def test_block_sizes(ops: Ops, block_size: int) -> None:
    """A block size that is baked in somewhere; off-by-one errors at the edges of a block or a page-table row."""
    edge = 2 * block_size
    pairs = [(1, edge - 1), (1, edge), (1, edge + 1), (3, edge + 1), (edge, edge), (edge + 1, edge + 1)]
    check(ops, build_case(pairs, block_size=block_size, seed=2))


@pytest.mark.parametrize("window", [1, 4, BLOCK, BLOCK + 1, 1000])
@pytest.mark.parametrize("batch", ["decode_uneven", "mixed", "long_chunk"])
def test_sliding_window(ops: Ops, batch: str, window: int) -> None:
    """A window that is one key too long or too short, or that is measured from the chunk and not from the query."""
    check(ops, build_case(BATCHES[batch], seed=3), window=window)


def test_window_sees_exactly_its_keys(ops: Ops) -> None:
    """Window 4 at position 10 sees keys 7 .. 10: told by one-hot values, not by an oracle that may share the error."""
    case = build_case([(1, 11)], num_heads=1, num_kv_heads=1, seed=4)
    one_hot = torch.eye(11, 64)[:, None, :]
    case = replace(case, values=(one_hot,))
    out = attend(ops, case, fill_cache(ops, case), window=4)
    assert torch.nonzero(out[0]).flatten().tolist() == [7, 8, 9, 10]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("window", [0, 20])
def test_soft_cap(ops: Ops, window: int, dtype: torch.dtype) -> None:
    """A cap applied before the scale or after the mask; a cap so low that it matters."""
    check(ops, build_case(BATCHES["mixed"], dtype=dtype, seed=5), window=window, soft_cap=0.7)


@pytest.mark.parametrize("query_len", [127, 128, 129, 300])
def test_long_extend(ops: Ops, query_len: int) -> None:
    """Tiles of queries: a key too many for a tile's first query, or a short last tile masked like a full one."""
    pairs = [(query_len, query_len), (query_len, query_len + 45)]
    check(ops, build_case(pairs, num_heads=2, num_kv_heads=1, seed=6))
    check(ops, build_case(pairs, num_heads=2, num_kv_heads=1, seed=6), window=50)


def test_many_requests_of_many_lengths(ops: Ops) -> None:
    """Rows that come back in another order where requests are grouped by length."""
    lengths = [1 + (37 * i) % 290 for i in range(40)]
    check(ops, build_case([(1, n) for n in lengths], num_heads=3, num_kv_heads=1, seed=7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("batch", ["mixed", "chunk", "decode_uneven"])
def test_permuting_blocks_changes_no_bit(ops: Ops, batch: str, dtype: torch.dtype) -> None:
    """Arithmetic that depends on where a block lies."""
    case = build_case(BATCHES[batch], dtype=dtype, seed=8)
    moved = permuted(case)
    assert not torch.equal(case.meta.page_table, moved.meta.page_table)
    assert torch.equal(attend(ops, case, fill_cache(ops, case)), attend(ops, moved, fill_cache(ops, moved)))


@pytest.mark.parametrize("window", [0, 5])
def test_poison_changes_no_bit(ops: Ops, window: int) -> None:
    """An unused slot or the null block that is multiplied by zero rather than left out: harmless until it holds NaN."""
    case = build_case(BATCHES["mixed"], seed=9)
    clean = attend(ops, case, fill_cache(ops, case), window=window)
    assert torch.equal(attend(ops, case, fill_cache(ops, case, poison=True), window=window), clean)


@pytest.mark.parametrize("chunks", [[50], [1] * 50, [16, 16, 16, 2], [17, 32, 1], [49, 1]], ids=str)
def test_chunked_equals_whole(ops: Ops, chunks: list[int]) -> None:
    """A chunk that attends to the wrong part of what earlier steps wrote."""
    case = build_case([(50, 50)], seed=10)
    spec = KVCacheSpec(1, case.num_kv_heads, case.head_dim, case.block_size, torch.float32)
    layer = ops.allocate_kv_cache(spec, num_blocks=case.num_blocks, device=torch.device("cpu"))[0]
    layout = QkvLayout(case.num_heads, case.num_kv_heads, case.head_dim)
    qkv = torch.cat([case.q.flatten(1), case.keys[0].flatten(1), case.values[0].flatten(1)], dim=1)
    outputs, end = [], 0
    for chunk in chunks:
        end += chunk
        meta = metadata([(chunk, end)], case.meta.page_table, block_size=case.block_size)
        q = ops.rope_and_write_kv(qkv[end - chunk : end], layout, identity_rotation(50, case.head_dim), layer, meta)
        outputs.append(ops.attention(q, layer, meta, scale=case.scale, num_kv_heads=case.num_kv_heads))
    assert_close(torch.cat(outputs).double(), oracle(case), **TOLERANCE[torch.float32])


def test_company_changes_nothing(ops: Ops) -> None:
    """A request's result that depends on the requests beside it, beyond the last bits that a BLAS may change."""
    case = build_case(BATCHES["mixed"], seed=11)
    layer = fill_cache(ops, case)
    together = attend(ops, case, layer).split([query_len for query_len, _ in case.pairs])
    queries = case.q.split([query_len for query_len, _ in case.pairs])
    for b, pair in enumerate(case.pairs):
        meta = metadata([pair], case.meta.page_table[b : b + 1], block_size=case.block_size)
        alone = ops.attention(queries[b], layer, meta, scale=case.scale, num_kv_heads=case.num_kv_heads)
        assert_close(alone, together[b], atol=1e-6, rtol=1e-5)


def test_group_size_limit_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode groups that are split to bound scratch memory, and lose or swap a request."""
    ops = CpuOps()
    case = build_case([(1, n) for n in (200, 3, 199, 180, 201, 60, 1)], seed=12)
    monkeypatch.setattr(cpu_step, "MAX_GATHERED_TOKENS", 300)
    check(ops, case)


def test_plan_depends_on_own_length_only() -> None:
    """Padding to the longest request of the batch, which lets company change a request's arithmetic."""
    shape = cpu_step.AttentionShape(BLOCK, 2, 0, torch.float32)
    case = build_case([(1, n) for n in (5, 70, 300, 71, 150)], seed=13)
    widths = {}
    for group in cpu_step.plan_attention(case.meta, shape).decodes:
        widths.update(dict.fromkeys(group.rows.tolist(), group.kv_len))
    assert sorted(widths) == list(range(5))
    for b, pair in enumerate(case.pairs):
        meta = metadata([pair], case.meta.page_table[b : b + 1], block_size=BLOCK)
        (group,) = cpu_step.plan_attention(meta, shape).decodes
        assert group.kv_len == widths[b]
