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
from server.errors import ConfigError
from server.protocol import GenerateRequest, SamplingParams
from server.sampling.fused import FusedSampler
from server.sampling.row_state import SamplingRow
from server.sampling.sampler import choose
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


SAMPLED = [
    SamplingParams(max_tokens=NUM_TOKENS, seed=1, temperature=1.3),
    SamplingParams(max_tokens=NUM_TOKENS, seed=2**63 + 5, top_k=20, top_p=0.9, logprobs=1),
    SamplingParams(max_tokens=NUM_TOKENS, seed=3, min_p=0.05, presence_penalty=0.5),
]


def test_sampled_tokens_do_not_depend_on_company(tmp_path: Path) -> None:
    """The kernel's rows mixed up, or seeds and positions that are the batch's instead of the request's."""
    model = load(save(make_model("llama"), tmp_path), backend="triton")
    together = Driver(model).generate(PROMPTS, SAMPLED, chunk=12)
    alone = [Driver(model).generate([prompt], [params])[0] for prompt, params in zip(PROMPTS, SAMPLED, strict=True)]
    assert [token_ids(result) for result in together] == [token_ids(result) for result in alone]
    assert token_ids(alone[0]) != generate(tmp_path, "reference")[0]


def test_a_row_without_a_choice_fails_alone() -> None:
    """A NaN in one row's logits is that request's failure, and no token 0."""
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    best = logits.argmax(-1).tolist()
    logits[1] = torch.nan
    rows = [SamplingRow(greedy(4), [1], [], vocab_size=100, device=torch.device("cpu")) for _ in range(3)]
    chosen = choose(logits, rows, [1, 1, 1], fused=FusedSampler(TritonOps("cpu").sampler, torch.device("cpu")))
    sampled = chosen.read(chosen.tensors)
    assert (sampled.token_ids[0], sampled.token_ids[2]) == (best[0], best[2])
    assert list(sampled.failed) == [1]


def serve(
    path: Path, backend: str, *, kv_cache_dtype: str = "auto", async_scheduling: str = "auto"
) -> dict[str, list[int]]:
    """Every prompt's tokens from an engine core with too few blocks for all of them at once."""
    config = EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", max_model_len=48),
        cache=CacheConfig(block_size=8, num_blocks=7, kv_cache_dtype=kv_cache_dtype),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, async_scheduling=async_scheduling),
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
        for delta in output.deltas if output else ():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    core.check_invariants()
    return tokens


def test_engine_gives_the_reference_tokens(tmp_path: Path) -> None:
    """Scheduler, paging, preemption and runner on the GPU backend's kernels."""
    path = save(make_model("llama"), tmp_path)
    tokens = serve(path, "triton")
    assert {name: len(ids) for name, ids in tokens.items()} == {f"r{i}": NUM_TOKENS for i in range(len(PROMPTS))}
    assert tokens == serve(path, "reference")
    assert tokens == serve(path, "triton", async_scheduling="on"), "as on a GPU: steps launched ahead of their tokens"
    assert len(torch.tensor(list(tokens.values())).unique()) > 3, "a checkpoint that repeats itself shows nothing"


def test_fp8_cache_is_served(tmp_path: Path) -> None:
    """A dtype that stops at the configuration: e4m3 must change some token of a random checkpoint, and lose none."""
    path = save(make_model("llama"), tmp_path)
    tokens = serve(path, "triton", kv_cache_dtype="fp8")
    assert {name: len(ids) for name, ids in tokens.items()} == {f"r{i}": NUM_TOKENS for i in range(len(PROMPTS))}
    assert tokens != serve(path, "reference")


def test_fp8_cache_is_refused_where_there_is_none(tmp_path: Path) -> None:
    """A flag that is accepted and ignored, or a traceback instead of the flag's name."""
    path = save(make_model("llama"), tmp_path)
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype.*CPU backend"):
        serve(path, "cpu", kv_cache_dtype="fp8")
