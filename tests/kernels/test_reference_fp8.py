"""8-bit caches: the reference is the oracle of the GPU's, and the CPU refuses them."""

import pytest
import torch
from torch.testing import assert_close

from kernels.cpu import CpuOps
from kernels.layout import KVCacheSpec, LayerKV
from kernels.ops import QkvLayout
from kernels.reference import ReferenceOps
from tests.kernels.cases import build_case, identity_rotation, oracle

SPEC = KVCacheSpec(1, 2, 64, 16, torch.float8_e4m3fn)


def test_reference_scales_and_saturates() -> None:
    """A scale that is applied on one side only; a value past the format's range that turns into NaN."""
    ops, case = ReferenceOps(), build_case([(20, 20)], seed=1)
    blank = ops.allocate_kv_cache(SPEC, num_blocks=case.num_blocks, device=torch.device("cpu"))[0]
    layer = LayerKV(blank.key, blank.value, torch.tensor(0.01), torch.tensor(0.02))
    qkv = torch.cat([case.q.flatten(1), case.keys[0].flatten(1), case.values[0].flatten(1)], dim=1)
    qkv[3, -1] = 1e6
    q = ops.rope_and_write_kv(qkv, QkvLayout(4, 2, 64), identity_rotation(20, 64), layer, case.meta)
    slot = int(case.meta.slot_mapping[3])
    assert float(layer.value.flatten(0, 1)[slot, -1, -1]) == 448.0
    out = ops.attention(q, layer, case.meta, scale=case.scale, num_kv_heads=2)
    assert_close(out[:3].double(), oracle(case)[:3], atol=0.1, rtol=0.1)
    assert bool(out.isfinite().all())


def test_cpu_refuses() -> None:
    """An 8-bit cache that is accepted at start and fails in the first step."""
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        CpuOps().allocate_kv_cache(SPEC, num_blocks=2, device=torch.device("cpu"))
