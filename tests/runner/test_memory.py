"""How many blocks fit, and what the message says where none do."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.reference import ReferenceOps
from server.errors import ConfigError, OutOfMemoryAtStart
from server.models.spec import ModelSpec, RopeSpec
from server.runner import memory as memory_module
from server.runner.kv_cache import allocate_kv_cache, kv_cache_spec
from server.runner.memory import Memory, MemoryPlan, estimate_activations, measure_memory, plan

SPEC = ModelSpec(
    family="llama",
    vocab_size=1000,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_position=4096,
    norm_eps=1e-5,
    rope=RopeSpec(10000.0, 16),
    windows=(0, 0),
    attention_scale=0.25,
)
KV = kv_cache_spec(SPEC, block_size=16, dtype=torch.bfloat16)
BLOCK = KV.bytes_per_block
PLENTY = Memory(1 << 34, 1 << 33)


def planned(memory: Memory = PLENTY, **settings: object) -> MemoryPlan:
    return plan(SPEC, KV, memory, **{"weights": 5000, "activations": 1000, "max_num_seqs": 4, **settings})


def test_block_bytes() -> None:
    """keys and values x layers x heads x dims x tokens x bytes."""
    assert BLOCK == 2 * 2 * 2 * 16 * 16 * 2


def test_default_holds_the_whole_context_once() -> None:
    """A default that can't serve the context it announces, or takes all that there is."""
    result = planned()
    assert (result.num_blocks, result.max_model_len) == (256, 4096)
    assert planned(max_num_seqs=64).num_blocks == 64 * 256 // 16


def test_default_shrinks_with_the_memory() -> None:
    """A context announced that does not fit, where the user named none."""
    room = 400 * BLOCK
    result = planned(Memory(1 << 30, room + 1000))
    assert result.num_blocks == 99
    assert result.max_model_len == 99 * 16


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        ({"num_blocks": 7}, 7),
        ({"kv_cache_memory": 10 * BLOCK + 5}, 9),
        ({"num_blocks": 7, "kv_cache_memory": 10 * BLOCK}, 7),
        ({"gpu_memory_utilization": 0.75}, ((1 << 34) // 4 - 1000) // BLOCK - 1),
    ],
)
def test_what_the_user_says(settings: dict[str, object], num_blocks: int) -> None:
    """A setting ignored, or the null block not counted in a size."""
    result = planned(**settings)
    assert result.num_blocks == num_blocks
    assert result.ledger.kv_cache == (num_blocks + 1) * BLOCK
    assert result.max_model_len == min(4096, num_blocks * 16)


def test_ledger_adds_up() -> None:
    """Memory counted twice or not at all."""
    ledger = planned(num_blocks=7).ledger
    assert (ledger.weights, ledger.activations, ledger.total) == (5000, 1000, 1 << 34)
    assert ledger.kv_cache + ledger.activations + ledger.free == PLENTY.available


@pytest.mark.parametrize(
    ("available", "settings", "remedies"),
    [
        (101 * BLOCK, {"num_blocks": 101}, ["--num-blocks between 1 and 100"]),
        (101 * BLOCK, {"kv_cache_memory": 200 * BLOCK}, [f"and {101 * BLOCK}"]),
        (101 * BLOCK, {"kv_cache_memory": BLOCK}, ["too small", f"between {2 * BLOCK}"]),
        (101 * BLOCK, {"num_blocks": 10, "max_model_len": 161}, ["at most 160", f"at least {12 * BLOCK}"]),
        (BLOCK, {}, ["smaller model"]),
        (0, {"num_blocks": 1}, ["smaller model"]),
    ],
)
def test_what_does_not_fit_is_refused_with_a_value_that_does(
    available: int, settings: dict[str, object], remedies: list[str]
) -> None:
    """An allocation tried and failed, or a refusal that leaves the user guessing."""
    with pytest.raises(OutOfMemoryAtStart) as caught:
        planned(Memory(1 << 30, available + 1000), **settings)
    for part in [*remedies, "Memory: weights"]:
        assert part in str(caught.value)


def test_the_remedy_works() -> None:
    """A value proposed that is refused in its turn."""
    memory = Memory(1 << 30, 101 * BLOCK + 1000)
    assert planned(memory, kv_cache_memory=101 * BLOCK).num_blocks == 100
    assert planned(memory, num_blocks=100).num_blocks == 100
    assert planned(memory, kv_cache_memory=12 * BLOCK, max_model_len=161).max_model_len == 161


def test_longer_than_the_checkpoint_allows() -> None:
    """Positions that the model was never trained for."""
    with pytest.raises(ConfigError, match="4096"):
        planned(max_model_len=4097)


def test_activations_grow_with_the_step() -> None:
    """An estimate that forgets the logits, the largest tensor of a small model."""
    small = estimate_activations(SPEC, num_tokens=16, num_sequences=4, dtype=torch.float32)
    assert small > 4 * 4 * SPEC.vocab_size
    assert estimate_activations(SPEC, num_tokens=160, num_sequences=4, dtype=torch.float32) > small
    wide = replace(SPEC, vocab_size=100 * SPEC.vocab_size)
    assert estimate_activations(wide, num_tokens=16, num_sequences=4, dtype=torch.float32) > 50 * 4 * 4 * 1000


@pytest.mark.parametrize(
    ("limit", "current", "expected"),
    [(None, None, (8000 << 10, 5000 << 10)), ("max", "5", (8000 << 10, 5000 << 10)), ("4096000", "96000", None)],
)
def test_containers_limits_count(
    limit: str | None,
    current: str | None,
    expected: tuple[int, int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server in a container that sizes itself by the machine and is killed."""
    (tmp_path / "meminfo").write_text("MemTotal: 8000 kB\nMemFree: 100 kB\nMemAvailable: 5000 kB\n")
    if limit is not None and current is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text(current + "\n")
    monkeypatch.setattr(memory_module, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory_module, "_CGROUP", tmp_path)
    measured = measure_memory(torch.device("cpu"))
    assert (measured.total, measured.available) == (expected or (4096000, 4000000))


def test_failed_allocation_is_a_startup_error() -> None:
    """A traceback where the operating system gives less than it announced."""

    class Full(ReferenceOps):
        def allocate_kv_cache(self, *args: object, **settings: object) -> None:
            raise RuntimeError("can't allocate memory")

    with pytest.raises(OutOfMemoryAtStart, match="kv-cache-memory"):
        allocate_kv_cache(Full(), KV, num_blocks=3, device=torch.device("cpu"))
