"""Log-probabilities over HTTP against transformers in float32, on the same weights."""

import math

import pytest
import torch
from transformers import LlamaForCausalLM

from server.weights.locate import locate
from tests.clients.oracle import load_oracle
from tests.e2e.conftest import DEFAULT_MODEL

TOLERANCE = 1e-3
TEXTS = ["The capital of France is Paris, and", "def add(a, b):\n    return", "한국의 수도는 서울입니다. 🙂"]


@pytest.fixture(scope="module")
def oracle() -> LlamaForCausalLM:
    return load_oracle(locate("", offline=True).path)


@torch.no_grad()
def expected(oracle: LlamaForCausalLM, token_ids: list[int]) -> torch.Tensor:
    """[num_tokens, vocab_size], float32: row i has the log-probabilities of token i + 1."""
    return oracle(torch.tensor([token_ids])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("text", TEXTS)
def test_completions_score_as_transformers_does(client, oracle, text):
    """Wrong temperature, wrong position or rounded logits in what evaluations read, of the prompt or the output."""
    answer = client.completions.create(
        model=DEFAULT_MODEL,
        prompt=text,
        echo=True,
        max_tokens=6,
        logprobs=3,
        temperature=0.7,
        seed=1,
        extra_body={"return_token_ids": True, "ignore_eos": True, "prompt_logprobs": 3},
    )
    choice = answer.choices[0]
    token_ids = choice.prompt_token_ids + choice.token_ids
    table = expected(oracle, token_ids)
    for position, logprob in enumerate(choice.logprobs.token_logprobs[1:], start=1):
        assert logprob == pytest.approx(table[position - 1, token_ids[position]].item(), abs=TOLERANCE)
        best = table[position - 1].topk(3).values.tolist()
        seen = sorted(choice.logprobs.top_logprobs[position].values(), reverse=True)[:3]
        assert seen == pytest.approx(best, abs=TOLERANCE)
    for position, entry in enumerate(choice.prompt_logprobs[1:], start=1):
        for token_id, figures in entry.items():
            assert figures["logprob"] == pytest.approx(table[position - 1, int(token_id)].item(), abs=TOLERANCE)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_scores_as_transformers_does(client, oracle, stream):
    """Scores of a chat that belong to another prompt than the rendered one, or to the scaled distribution."""
    ask = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": "Name three colors."}], "max_tokens": 8}
    ask |= {"temperature": 1.5, "seed": 3, "logprobs": True, "top_logprobs": 2}
    extra = {"return_token_ids": True, "ignore_eos": True}
    if stream:
        chunks = list(client.chat.completions.create(**ask, stream=True, extra_body=extra))
        prompt = chunks[0].prompt_token_ids
        pieces = [chunk.choices[0] for chunk in chunks]
        written = [t for piece in pieces for t in getattr(piece, "token_ids", None) or ()]
        content = [entry for piece in pieces if piece.logprobs for entry in piece.logprobs.content]
    else:
        answer = client.chat.completions.create(**ask, extra_body=extra)
        prompt, written = answer.prompt_token_ids, answer.choices[0].token_ids
        content = answer.choices[0].logprobs.content
    table = expected(oracle, prompt + written)
    assert len(content) == len(written) == 8
    for number, (token_id, entry) in enumerate(zip(written, content, strict=True)):
        row = table[len(prompt) + number - 1]
        assert entry.logprob == pytest.approx(row[token_id].item(), abs=TOLERANCE)
        assert [t.logprob for t in entry.top_logprobs] == pytest.approx(row.topk(2).values.tolist(), abs=TOLERANCE)
        assert math.isfinite(entry.logprob)
