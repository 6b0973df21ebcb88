"""What the kernels read and write, counted exactly: a performance test without a clock, and a memory-safety test."""

import numpy as np
import pytest
import torch

from kernels.layout import LayerKV
from kernels.ops import QkvLayout
from kernels.reference import ReferenceOps
from kernels.triton.ops import TritonOps
from kernels.triton.sampling import sample
from tests.kernels.cases import BATCHES, PagedCase, Pair, build_case, fill_cache, rotation
from tests.kernels.triton.interpreted.audit import Traffic, audited
from tests.kernels.triton.interpreted.test_quantized_matmul import quantized

OPS = TritonOps("cpu")
INVARIANT = TritonOps("cpu", batch_invariant=True)


def attend(case: PagedCase, *, window: int = 0, ops: TritonOps | None = None) -> tuple[LayerKV, list[Traffic]]:
    layer = fill_cache(ReferenceOps(), case)
    with audited() as launches:
        (ops or OPS).attention(
            case.q, layer, case.meta, scale=case.scale, num_kv_heads=case.num_kv_heads, window=window
        )
    return layer, launches


def visible_slots(case: PagedCase, window: int) -> tuple[set[int], int]:
    """The slots that the step's queries may see, and how many there are, request by request."""
    slots: list[int] = []
    for request, (query_len, kv_len) in enumerate(case.pairs):
        first = max(0, kv_len - query_len - window + 1) if window else 0
        blocks = case.meta.page_table[request].tolist()
        slots += [blocks[p // case.block_size] * case.block_size + p % case.block_size for p in range(first, kv_len)]
    return set(slots), len(slots)


def slots_read(case: PagedCase, launches: list[Traffic], argument: str) -> tuple[set[int], int]:
    """(distinct slots, bytes) of all launches' loads of the keys or the values."""
    offsets = np.concatenate([launch.read(argument) for launch in launches])
    itemsize = case.q.itemsize
    slot_bytes = case.num_kv_heads * case.head_dim * itemsize
    return set((offsets // slot_bytes).tolist()), len(offsets) * itemsize


@pytest.mark.parametrize("window", [0, 10])
@pytest.mark.parametrize("batch", ["one_token", "decode", "decode_block_edges", "decode_uneven"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_decode_reads_each_key_and_value_once(batch: str, window: int, batch_invariant: bool) -> None:
    """Decode is bound by memory: a tile read twice, or keys read and then masked, is time lost. The bar is 1.00."""
    case = build_case(BATCHES[batch], num_heads=6, num_kv_heads=2, head_dim=80)
    _, launches = attend(case, window=window, ops=INVARIANT if batch_invariant else None)
    owned, count = visible_slots(case, window)
    for argument in ("key_ptr", "value_ptr"):
        slots, num_bytes = slots_read(case, launches, argument)
        assert slots == owned
        minimum = count * case.num_kv_heads * case.head_dim * case.q.itemsize
        assert num_bytes / minimum == 1.00


@pytest.mark.parametrize("window", [0, 10])
@pytest.mark.parametrize("batch", ["prefill_block_edges", "chunk", "prefix_hit", "mixed", "long_chunk"])
def test_prefill_reads_what_the_request_owns(batch: str, window: int) -> None:
    """A read of an unowned slot, of the null block or beyond seq_len, masked afterwards: harmless until it is NaN."""
    case = build_case(BATCHES[batch])
    _, launches = attend(case, window=window)
    owned, _ = visible_slots(case, window)
    tile = 32  # a window's first tile starts at a multiple of this, and is read whole
    allowed = owned if not window else visible_slots(case, window + tile - 1)[0]
    for argument in ("key_ptr", "value_ptr"):
        slots, _ = slots_read(case, launches, argument)
        assert owned <= slots <= allowed


@pytest.mark.parametrize("pairs", [[(1, 9), (3, 40)], [(17, 17)]], ids=["mixed", "prefill"])
def test_the_write_touches_its_slots_once(pairs: list[Pair]) -> None:
    """Two programs that write one slot, or a write beyond the token's own slot."""
    case = build_case(pairs, num_heads=9, num_kv_heads=3, head_dim=80)
    layer = fill_cache(ReferenceOps(), case)
    qkv = torch.randn(case.meta.num_tokens, 15 * 80)
    with audited() as launches:
        OPS.rope_and_write_kv(qkv, QkvLayout(9, 3, 80), rotation(64, 80), layer, case.meta)
    slot_bytes = 3 * 80 * 4
    for argument in ("key_ptr", "value_ptr"):
        offsets = np.concatenate(launches[0].writes[argument])
        assert sorted(set((offsets // slot_bytes).tolist())) == sorted(case.meta.slot_mapping.tolist())
        assert len(offsets) == len(set(offsets.tolist())) == case.meta.num_tokens * 3 * 80
    assert len(launches[0].read("qkv_ptr")) == qkv.numel()


def test_pointwise_kernels_read_and_write_once() -> None:
    """A second pass over memory in a kernel whose row fits into registers."""
    x, residual, weight = torch.randn(5, 100), torch.randn(5, 100), torch.randn(100)
    with audited() as launches:
        OPS.add_rms_norm(x, residual, weight, 1e-6)
        OPS.gated_activation(torch.randn(5, 200), "silu")
    norm, activation = launches
    assert len(norm.read("x_ptr")) == len(norm.read("residual_ptr")) == 500
    assert sum(map(len, norm.writes["out_ptr"])) == sum(map(len, norm.writes["residual_ptr"])) == 500
    assert len(activation.read("gate_up_ptr")) == 1000
    assert sum(map(len, activation.writes["out_ptr"])) == 500


@pytest.mark.parametrize(("kind", "code_bytes"), [("Q4_1", 16), ("Q8_0", 32)])
def test_quantized_weights_are_read_once(kind: str, code_bytes: int) -> None:
    """One row is bound by the weights: codes, scales and minima each once."""
    out_features, groups = 70, 5
    linear = OPS.pack_linear([quantized(kind, out_features, 32 * groups)], None, dtype=torch.float32)
    with audited() as launches:
        linear(torch.randn(1, 32 * groups))
    assert len(launches[0].read("codes_ptr")) == out_features * groups * code_bytes
    assert len(launches[0].read("scales_ptr")) == out_features * groups


def test_sampling_stays_within_its_row() -> None:
    """Lanes beyond the vocabulary belong to the next row."""
    rows, vocab_size = 3, 1100
    with audited() as launches:
        sample(
            torch.randn(rows, vocab_size),
            temperature=torch.tensor([0.0, 1.0, 0.5]),
            top_k=torch.tensor([0, 4, 0], dtype=torch.int32),
            top_p=torch.tensor([1.0, 1.0, 0.9]),
            min_p=torch.zeros(rows),
            seeds=torch.arange(rows),
            positions=torch.arange(rows),
        )
    assert sum(map(len, launches[0].writes["out_ptr"])) == rows


def test_the_audit_sees_what_it_should() -> None:
    """An auditor that is blind passes everything: a block id beyond the cache must raise before the access."""
    case = build_case(BATCHES["decode"])
    case.meta.page_table[0, 0] = case.num_blocks + 7
    layer = LayerKV(*(torch.zeros(case.num_blocks, case.block_size, 2, 64) for _ in range(2)))
    with pytest.raises(Exception, match="outside every argument"), audited():
        OPS.attention(case.q, layer, case.meta, scale=1.0, num_kv_heads=2)
