"""The decoder, the loader and the runner against transformers, on tiny random checkpoints in float32."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.models.checkpoints import CASES, make_model, save
from tests.runner.driver import Driver, greedy, load, token_ids

TOLERANCE = 1e-4
NUM_TOKENS = 32
PROMPTS = [list(range(3, 40)), [200, 5, 17] * 13, [9]]


@torch.no_grad()
def reference_tokens(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Greedy, token by token with transformers' own cache."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False, attention_mask=torch.ones_like(ids))
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def reference_logprobs(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """float32[len(prompt) - 1]: of each prompt token given those before it."""
    logits = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


@pytest.mark.parametrize("case", CASES)
def test_family_matches_transformers(case: str, tmp_path: Path) -> None:
    """A family read wrongly: a missing bias, norm, scale, window or RoPE variant; or chunks and pages that leak."""
    model = make_model(case)
    driver = Driver(load(save(model, tmp_path)))
    expected = [reference_tokens(model, prompt) for prompt in PROMPTS]
    assert len(set(expected[0])) > 3, "the checkpoint repeats itself and shows nothing"
    results = driver.generate(PROMPTS, [greedy(NUM_TOKENS, prompt_logprobs=0) for _ in PROMPTS], chunk=11)
    assert [token_ids(result) for result in results] == expected
    for prompt, result in zip(PROMPTS, results, strict=True):
        scored = result[0].prompt_logprobs
        assert scored is not None
        assert scored[0] is None
        found = torch.tensor([entry.logprob for entry in scored[1:]])
        torch.testing.assert_close(found, reference_logprobs(model, prompt), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", ["llama", "mistral-window", "qwen3", "gemma3"])
def test_cpu_backend_matches_transformers(case: str, tmp_path: Path) -> None:
    """The CPU backend computes something else than the oracle once a whole model runs on it."""
    model = make_model(case)
    driver = Driver(load(save(model, tmp_path), backend="cpu"))
    results = driver.generate(PROMPTS, [greedy(NUM_TOKENS) for _ in PROMPTS], chunk=11)
    assert [token_ids(result) for result in results] == [reference_tokens(model, prompt) for prompt in PROMPTS]


def test_dynamic_rope_grows_past_the_trained_context(tmp_path: Path) -> None:
    """Positions past max_position_embeddings rotated with the old base, or the short ones with a new one."""
    model = make_model("llama-dynamic-rope", max_position_embeddings=20)
    decoder = load(save(model, tmp_path))
    assert decoder.spec.max_position == 40
    prompt = PROMPTS[0][:7]
    [result] = Driver(decoder).generate([prompt], [greedy(NUM_TOKENS)], chunk=3)
    assert token_ids(result) == reference_tokens(model, prompt)
