"""The whole engine on interpreted Triton kernels, with tiny random checkpoints: the reference backend's tokens."""

import time
from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType

from kernels.triton.ops import TritonOps
from server.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from server.engine.assemble import assemble
from server.engine.core import EngineCore
from server.protocol import GenerateRequest
from tests.models.checkpoints import make_model, save
from tests.runner.driver import Driver, greedy, load, token_ids
from tests.weights.gguf_files import write_gguf

NUM_TOKENS = 5
PROMPTS = [list(range(3, 25)), [200, 5, 17] * 3, [9]]


def generate(path: Path, backend: str) -> list[list[int]]:
    model = load(path, backend=backend)
    assert isinstance(model.ops, TritonOps) == (backend == "triton")
    results = Driver(model).generate(PROMPTS, [greedy(NUM_TOKENS) for _ in PROMPTS], chunk=12)
    return [token_ids(result) for result in results]


@pytest.mark.parametrize("case", ["llama", "mistral-window", "qwen3", "gemma3-capped"])
def test_runner_gives_the_reference_tokens(case: str, tmp_path: Path) -> None:
    """Kernels that are right one by one and wrong together: chunks, pages, windows, norms and biases of each family."""
    path = save(make_model(case), tmp_path)
    assert generate(path, "triton") == generate(path, "reference")


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_quantized_checkpoints_give_the_reference_tokens(kind: str, tmp_path: Path) -> None:
    """Rows permuted before or after packing, or a merged projection stacked in another order."""
    path = write_gguf(make_model("llama"), tmp_path / "model.gguf", "llama", kind=GGMLQuantizationType[kind])
    assert generate(path, "triton") == generate(path, "reference")


def test_static_buffers_give_the_reference_tokens(tmp_path: Path) -> None:
    """What a captured graph runs: padded rows without keys, stale columns of a page table of full width. The capture
    itself needs a GPU; here the pass is simply run again."""
    path = save(make_model("llama"), tmp_path)
    driver = Driver(load(path, backend="triton"), length=64, capture=lambda run: run)
    driver.runner.warm_up(4)
    results = driver.generate(PROMPTS, [greedy(NUM_TOKENS) for _ in PROMPTS])
    assert [token_ids(result) for result in results] == generate(path, "reference")


def serve(path: Path, backend: str) -> dict[str, list[int]]:
    """Every prompt's tokens from an engine core with too few blocks for all of them at once."""
    config = EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", max_model_len=48),
        cache=CacheConfig(block_size=8, num_blocks=7),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
        device=DeviceConfig(device="cpu", backend=backend),
    )
    core, ready = assemble(config, lambda phase, share: None)
    assert ready.backend == backend
    for index, prompt in enumerate(PROMPTS):
        core.add(GenerateRequest(f"r{index}", prompt, greedy(NUM_TOKENS), time.monotonic()))
    return run(core)


def run(core: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for _ in range(200):
        if not core.has_work:
            break
        output = core.execute(core.schedule())
        for delta in output.deltas:
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    core.check_invariants()
    return tokens


def test_engine_gives_the_reference_tokens(tmp_path: Path) -> None:
    """Scheduler, paging, preemption and runner on the GPU backend's kernels."""
    path = save(make_model("llama"), tmp_path)
    tokens = serve(path, "triton")
    assert {name: len(ids) for name, ids in tokens.items()} == {f"r{i}": NUM_TOKENS for i in range(len(PROMPTS))}
    assert tokens == serve(path, "reference")
    assert len(torch.tensor(list(tokens.values())).unique()) > 3, "a checkpoint that repeats itself shows nothing"
