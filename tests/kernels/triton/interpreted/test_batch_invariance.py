"""TritonOps(batch_invariant=True): a token's bits depend on its own sequence only.

Neither who else is in its steps, nor how many there are, nor how its sequence was cut into steps can be seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.layout import KVCacheSpec
from kernels.ops import Linear, QkvLayout
from kernels.reference import ReferenceOps
from kernels.triton.ops import TritonOps
from kernels.triton.sampling import sample
from server.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from server.engine.assemble import assemble
from server.models.registry import read_spec
from server.protocol import GenerateRequest
from server.weights.load import load_model
from server.weights.locate import locate
from tests.kernels.cases import PagedCase, Pair, build_case, fill_cache, metadata, rotation
from tests.kernels.triton.interpreted.audit import audited
from tests.kernels.triton.interpreted.test_engine import run
from tests.kernels.triton.interpreted.test_quantized_matmul import quantized
from tests.models.checkpoints import make_model, save
from tests.runner.driver import greedy

OPS = TritonOps("cpu", batch_invariant=True)
ORDINARY = TritonOps("cpu")


@pytest.fixture(autouse=True)
def dots_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """BLAS adds in an order that depends on where in the tile a row lies; matrix units don't."""

    def matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        product: np.ndarray = np.einsum("ik,jk->ij", a.astype(dtype), np.ascontiguousarray(b.T, dtype))
        return product

    monkeypatch.setattr(np, "matmul", matmul)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dense(dtype: torch.dtype, *, out_dtype: torch.dtype | None = None, ops: TritonOps = OPS) -> Linear:
    weights = [random(n, 100, dtype=dtype, seed=n) for n in (30, 41)]
    return ops.pack_linear(list(weights), random(71, seed=3), dtype=dtype, out_dtype=out_dtype)


def packed(kind: str, *, ops: TritonOps = OPS) -> Linear:
    return ops.pack_linear([quantized(kind, 40, 256)], random(40, seed=3), dtype=torch.float32)


PRODUCTS: dict[str, tuple[Callable[[], Linear], int, torch.dtype]] = {
    "fp32": (lambda: dense(torch.float32), 100, torch.float32),
    "fp16": (lambda: dense(torch.float16), 100, torch.float16),
    "bf16 logits": (lambda: dense(torch.bfloat16, out_dtype=torch.float32), 100, torch.bfloat16),
    "Q4_1": (lambda: packed("Q4_1"), 256, torch.float32),
    "Q8_0": (lambda: packed("Q8_0"), 256, torch.float32),
}


@pytest.mark.parametrize("count", [2, 5, 17, 40])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_row_of_a_product(name: str, count: int) -> None:
    """A tile chosen by the number of rows: another order of the sums."""
    make, depth, dtype = PRODUCTS[name]
    linear, x = make(), random(count, depth, dtype=dtype)
    together = linear(x)
    for row in {0, 1, count // 2, count - 1}:
        assert torch.equal(together[row : row + 1], linear(x[row : row + 1]))


def test_a_product_is_the_product() -> None:
    """Steps of K or of the columns lost: shapes that fill no tile, against float64."""
    for dtype, atol in ((torch.float32, 1e-4), (torch.float16, 1e-2)):
        weight, bias, x = random(71, 100, dtype=dtype), random(71, seed=3), random(33, 100, dtype=dtype, seed=4)
        got = OPS.pack_linear([weight], bias, dtype=dtype)(x)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), x.double() @ weight.double().T + bias, atol=atol, rtol=1e-3)


def test_logits_keep_their_float32_sums() -> None:
    """A result rounded to the activations' dtype on its way to float32."""
    got = dense(torch.float16, out_dtype=torch.float32)(random(2, 100, dtype=torch.float16))
    assert got.dtype == torch.float32
    assert not torch.equal(got, got.half().float())


HEADS: dict[str, Any] = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 40}

COMPANIES: dict[str, list[Pair]] = {
    "one": [(1, 90)],
    "four": [(1, 300), (1, 1), (1, 77), (1, 64)],
    "sixteen": [(1, 3 * i + 1) for i in range(16)],
    "a prefill": [(70, 70)],
    "everything": [(20, 150), (1, 400), (2, 5), (33, 33)],
}


def attend(ops: TritonOps, case: PagedCase, *, window: int = 0) -> torch.Tensor:
    layer = fill_cache(ReferenceOps(), case, poison=True)
    return ops.attention(case.q, layer, case.meta, scale=case.scale, num_kv_heads=case.num_kv_heads, window=window)


def with_company(own: PagedCase, company: list[Pair], *, first: bool) -> PagedCase:
    """The case's requests with others beside them, in front or behind."""
    pairs = [*own.pairs, *company] if first else [*company, *own.pairs]
    case, start = build_case(pairs, seed=9, **HEADS), 0 if first else len(company)
    keys, values = list(case.keys), list(case.values)
    keys[start : start + len(own.pairs)], values[start : start + len(own.pairs)] = own.keys, own.values
    q = case.q.clone()
    offset = 0 if first else sum(query_len for query_len, _ in company)
    q[offset : offset + len(own.q)] = own.q
    return replace(case, q=q, keys=tuple(keys), values=tuple(values))


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("company", COMPANIES)
def test_attention_beside_others(company: str, window: int) -> None:
    """Splits chosen from the batch's total, one kernel for decode and another for a mixed batch, or a tile that a
    neighbour moves."""
    own = build_case([(1, 300), (21, 180), (1, 40)], **HEADS)
    want = attend(OPS, own, window=window)
    before = attend(OPS, with_company(own, COMPANIES[company], first=False), window=window)
    assert torch.equal(before[-len(want) :], want)
    behind = attend(OPS, with_company(own, COMPANIES[company], first=True), window=window)
    assert torch.equal(behind[: len(want)], want)


LENGTH = 140
"""More than two of the interpreter's splits."""


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (9, 0.0), (100, 5.0)])
@pytest.mark.parametrize("cuts", [(64,), (1, 2, 63, 130), (13, 65, 66, 67, 139), tuple(range(125, 140))], ids=len)
def test_any_cut_of_a_sequence(cuts: tuple[int, ...], window: int, soft_cap: float) -> None:
    """Chunks, single tokens and decode: a softmax that starts where the chunk starts, splits merged in another order
    in scratch than in registers."""
    case = build_case([(LENGTH, LENGTH)], **HEADS)
    layer = fill_cache(ReferenceOps(), case, poison=True)

    def attend(start: int, end: int) -> torch.Tensor:
        meta = metadata([(end - start, end)], case.meta.page_table, block_size=case.block_size)
        return OPS.attention(
            case.q[start:end], layer, meta, scale=case.scale, num_kv_heads=1, window=window, soft_cap=soft_cap
        )

    parts = [attend(start, end) for start, end in pairwise([0, *cuts, LENGTH])]
    assert torch.equal(torch.cat(parts), attend(0, LENGTH))


@pytest.mark.parametrize("count", [2, 5, 17])
def test_rows_of_the_other_kernels(count: int) -> None:
    """A statistic or a draw that runs across rows."""
    x, weight = random(count, 100), random(100, seed=1)
    last = slice(count - 1, count)
    assert torch.equal(OPS.rms_norm(x, weight, 1e-6)[last], OPS.rms_norm(x[last], weight, 1e-6))
    together = OPS.add_rms_norm(x, x.flip(0).clone(), weight, 1e-6)
    alone = OPS.add_rms_norm(x[last], x.flip(0)[last].clone(), weight, 1e-6)
    assert all(torch.equal(many[last], one) for many, one in zip(together, alone, strict=True))
    assert torch.equal(OPS.gated_activation(x, "silu")[last], OPS.gated_activation(x[last], "silu"))

    case = build_case([(1, 30 + i) for i in range(count)])
    layer = fill_cache(ReferenceOps(), case)
    layout = QkvLayout(4, 2, 64, random(64, seed=2), random(64, seed=3))
    qkv, table, meta = random(count, 8 * 64), rotation(64, 64), case.meta
    many = OPS.rope_and_write_kv(qkv, layout, table, layer, meta)
    written = layer.key.clone()
    single = replace(meta, slot_mapping=meta.slot_mapping[last], positions=meta.positions[last])
    assert torch.equal(OPS.rope_and_write_kv(qkv[last], layout, table, layer, single), many[last])
    assert torch.equal(layer.key, written)

    limits = {"temperature": torch.full((count,), 0.8), "top_p": torch.full((count,), 0.9)}
    limits |= {"top_k": torch.full((count,), 40, dtype=torch.int32), "min_p": torch.full((count,), 0.01)}
    limits |= {"seeds": torch.arange(count), "positions": 7 * torch.arange(count)}
    logits = random(count, 1500)
    row = {name: values[last] for name, values in limits.items()}
    assert torch.equal(sample(logits[last], **row), sample(logits, **limits)[last])


def test_the_ordinary_form_differs() -> None:
    """Tests that no form could fail. Splits, the cut of a prompt and the quantised product's tile show there."""
    own = build_case([(1, 600)], **HEADS)
    company = with_company(own, [(1, 900)] * 9, first=False)
    assert not torch.equal(attend(ORDINARY, company)[-1:], attend(ORDINARY, own))
    whole = build_case([(2 * LENGTH, 2 * LENGTH)], **HEADS)
    last = replace(whole, q=whole.q[-1:], meta=metadata([(1, 2 * LENGTH)], whole.meta.page_table, block_size=16))
    assert not torch.equal(attend(ORDINARY, whole)[-1:], attend(ORDINARY, last))
    linear, x = packed("Q4_1", ops=ORDINARY), random(17, 256)
    assert not torch.equal(linear(x)[:1], linear(x[:1]))


def logits(
    path: Path, sequences: Sequence[Sequence[int]], cuts: Sequence[Sequence[int]], ops: TritonOps
) -> torch.Tensor:
    """Of each sequence's last token, float32[sequences, V]; all sequences take their n-th piece in step n."""
    files = locate(str(path))
    model = load_model(files, read_spec(files), ops, dtype=torch.float32, device=torch.device("cpu"))
    model.prepare_positions(256)
    spec = KVCacheSpec(model.spec.num_layers, model.spec.num_kv_heads, model.spec.head_dim, 8, torch.float32)
    width = 256 // spec.block_size
    cache = ops.allocate_kv_cache(spec, num_blocks=1 + width * len(sequences), device=torch.device("cpu"))
    table = torch.arange(1, 1 + width * len(sequences), dtype=torch.int32).view(len(sequences), width)
    result = torch.empty(len(sequences), model.spec.vocab_size)
    edges = [[0, *cut, len(tokens)] for cut, tokens in zip(cuts, sequences, strict=True)]
    for step in range(max(map(len, edges)) - 1):
        taking = [i for i, edge in enumerate(edges) if step + 1 < len(edge)]
        pieces = [sequences[i][edges[i][step] : edges[i][step + 1]] for i in taking]
        pairs = [(len(piece), edges[i][step + 1]) for i, piece in zip(taking, pieces, strict=True)]
        meta = metadata(pairs, table[taking], block_size=spec.block_size)
        ids = torch.tensor([token for piece in pieces for token in piece])
        with torch.inference_mode():
            result[taking] = model.logits(model.forward(ids, meta, cache, meta.query_start_loc[1:].long() - 1))
    return result


@pytest.mark.parametrize("case", ["llama", "gemma3-capped"])
def test_a_model_s_logits(case: str, tmp_path: Path) -> None:
    """An operation of the decoder that nobody listed: alone in one step, and in company, with chunks and single tokens,
    as after prefix hits and preemptions."""
    path = save(make_model(case), tmp_path)
    sequences = [[(7 * i + 5 * j + 3) % 200 for i in range(length)] for j, length in enumerate((72, 20, 9))]
    cuts = [[30, 63, 69, 70, 71], [], [1, 2, 7]]
    ordinary, invariant = (
        [logits(path, sequences[:count], cuts[:count] if count > 1 else [[]], ops)[0] for count in (1, 3)]
        for ops in (ORDINARY, OPS)
    )
    assert torch.equal(*invariant)
    assert not torch.equal(*ordinary)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_setting_reaches_the_kernels(batch_invariant: bool, tmp_path: Path) -> None:
    """A flag that is accepted and stops at the configuration."""
    config = EngineConfig(
        model=ModelConfig(model=str(save(make_model("llama"), tmp_path)), dtype="float32", max_model_len=48),
        cache=CacheConfig(block_size=8, num_blocks=7),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16),
        device=DeviceConfig(device="cpu", backend="triton", batch_invariant=batch_invariant),
    )
    core, _ = assemble(config, lambda phase, share: None)
    core.add(GenerateRequest("r0", [3, 5, 7], greedy(2), 0.0))
    with audited() as launches:
        run(core)
    own = {"invariant_kernel", "matmul_kernel"}
    assert own & {launch.kernel for launch in launches} == (own if batch_invariant else set())
