"""What must hold for any batch: where the blocks lie, how the prompt was cut and what lies next to it can't be seen."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.layout import NULL_BLOCK
from kernels.reference import ReferenceOps
from kernels.triton.launch import PrefillConfig
from kernels.triton.ops import TritonOps
from kernels.triton.prefill_attention import prefill_attention
from tests.kernels.cases import BATCHES, TOLERANCE, PagedCase, build_case, fill_cache, metadata, oracle, permuted

OPS = TritonOps("cpu")
INVARIANT = TritonOps("cpu", batch_invariant=True)

PAIR = st.tuples(st.integers(1, 40), st.integers(0, 90)).map(lambda lengths: (lengths[0], sum(lengths)))


def attend(case: PagedCase, *, ops: TritonOps | None = None, window: int = 0, soft_cap: float = 0.0) -> torch.Tensor:
    layer = fill_cache(ReferenceOps(), case, poison=True)
    heads = case.num_kv_heads
    return (ops or OPS).attention(
        case.q, layer, case.meta, scale=case.scale, num_kv_heads=heads, window=window, soft_cap=soft_cap
    )


@settings(max_examples=25)
@given(
    pairs=st.lists(PAIR, min_size=1, max_size=4),
    group=st.integers(1, 6),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([16, 40, 64, 80]),
    block_size=st.sampled_from([8, 16, 48]),
    window=st.sampled_from([0, 0, 5, 33]),
    soft_cap=st.sampled_from([0.0, 0.0, 3.0]),
    batch_invariant=st.booleans(),
)
def test_any_batch_is_the_oracle(
    pairs: list[tuple[int, int]],
    group: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int,
    soft_cap: float,
    batch_invariant: bool,
) -> None:
    """A combination that no table lists. Everything unused is NaN, the null block included."""
    shape = {"num_heads": group * num_kv_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    case = build_case(pairs, block_size=block_size, **shape)
    out = attend(case, ops=INVARIANT if batch_invariant else None, window=window, soft_cap=soft_cap)
    want = oracle(case, window=window, soft_cap=soft_cap)
    torch.testing.assert_close(out.double(), want, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("batch", BATCHES)
def test_permuting_the_blocks_changes_nothing(batch: str) -> None:
    """A result that depends on physical addresses. Bit-equal."""
    case = build_case(BATCHES[batch])
    assert torch.equal(attend(case), attend(permuted(case)))


@pytest.mark.parametrize("batch", BATCHES)
def test_paged_is_contiguous(batch: str) -> None:
    """One block that holds a whole request is a contiguous cache: pages must not cost a bit."""
    paged = build_case(BATCHES[batch])
    whole = build_case(BATCHES[batch], block_size=512)
    assert torch.equal(attend(paged), attend(whole))


@pytest.mark.parametrize("cuts", [(1, 30), (10, 37), (16, 32), (5, 6, 7, 50)])
@pytest.mark.parametrize("window", [0, 9])
def test_a_chunked_prompt_is_the_whole_prompt(
    cuts: tuple[int, ...], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A softmax whose tiles start at the chunk instead of at key 0. Bit-equal."""
    # BLAS adds in an order that depends on where in the tile a row lies; matrix units don't.
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("ik,kj->ij", a, b, dtype=dtype))
    length = 70
    case = build_case([(length, length)])
    layer = fill_cache(ReferenceOps(), case)
    config = PrefillConfig(rows=32, tile=32, num_warps=4, num_stages=2)

    def prefill(start: int, end: int) -> torch.Tensor:
        q = case.q[start:end]
        meta = metadata([(end - start, end)], case.meta.page_table, block_size=case.block_size)
        out = torch.full_like(q, torch.nan).flatten(1)
        prefill_attention(q, layer, meta, out, scale=case.scale, config=config, window=window)
        return out

    edges = [0, *cuts, length]
    chunks = [prefill(start, end) for start, end in pairwise(edges)]
    assert torch.equal(torch.cat(chunks), prefill(0, length))


def test_the_null_block_never_shows() -> None:
    """Padding of the page table points at block 0, whatever lies there: twice the same but for that block."""
    case = build_case(BATCHES["mixed"])
    layer = fill_cache(ReferenceOps(), case)
    results = []
    for content in (0.0, 1e4, torch.inf, torch.nan):
        layer.key[NULL_BLOCK] = content
        layer.value[NULL_BLOCK] = content
        results.append(OPS.attention(case.q, layer, case.meta, scale=case.scale, num_kv_heads=2))
    assert all(torch.equal(result, results[0]) for result in results)
