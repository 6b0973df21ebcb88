"""Many at once, some of whom leave, and a KV cache that is too small for all of them."""

import asyncio
import random

import openai
import pytest

from tests.e2e.conftest import DEFAULT_MODEL, Server, serving


def prompts(num: int, lengths: list[int], seed: int) -> list[list[int]]:
    """Token ids, so that the lengths are exact; no two share a prefix."""
    ids = random.Random(seed)
    return [[ids.randrange(100, 40_000) for _ in range(lengths[i % len(lengths)])] for i in range(num)]


def ask(prompt: list[int], max_tokens: int) -> dict:
    return {
        "model": DEFAULT_MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }


async def answers(server: Server, requests: list[dict]) -> list[openai.types.Completion]:
    """All at once."""
    async with server.async_client() as client:
        return await asyncio.gather(*(client.completions.create(**request) for request in requests))


async def stream(client: openai.AsyncOpenAI, request: dict, leave_after: int | None) -> str:
    """The text; leave_after: hang up after so many chunks."""
    text, num_chunks = "", 0
    async with await client.completions.create(**request, stream=True) as chunks:
        async for chunk in chunks:
            text += chunk.choices[0].text
            num_chunks += 1
            if num_chunks == leave_after:
                break
    return text


def test_half_of_32_streams_leave(server, client):
    """Blocks of a client that hung up stay taken, or its leaving disturbs the others' answers."""
    requests = [ask(prompt, 16) for prompt in prompts(32, [3, 17, 40, 120], seed=1)]
    server.eventually("num_requests_running", 0)
    baseline = server.metric("kv_cache_usage_perc")

    async def main() -> list[str]:
        async with server.async_client() as connection:
            leaving = (None if i % 2 else 1 + i % 5 for i in range(len(requests)))
            return await asyncio.gather(
                *(stream(connection, request, leave) for request, leave in zip(requests, leaving, strict=True))
            )

    together = asyncio.run(main())
    server.eventually("num_requests_running", 0)
    server.eventually("num_requests_waiting", 0)
    assert server.metric("kv_cache_usage_perc") == baseline
    alone = {i: client.completions.create(**requests[i]).choices[0].text for i in range(1, 32, 4)}
    assert {i: together[i] for i in alone} == alone


@pytest.mark.parametrize("ahead", ["off", "on"])
def test_a_small_cache_preempts_and_nobody_notices(server, tmp_path, ahead):
    """64 blocks hold a third of 16 requests of 200 tokens: a preempted one loses or repeats tokens, or never ends. The
    same where steps are planned ahead, and two of the requests have a grammar that must see each token first."""
    requests = [ask(prompt, 45) for prompt in prompts(16, [155], seed=2)]
    for request in requests[3:5]:
        request["extra_body"] = {"structured_outputs": {"regex": "[a-z ]{200}"}}
    roomy = asyncio.run(answers(server, requests))
    flags = (
        "--dtype",
        "float32",
        "--num-blocks",
        "64",
        "--block-size",
        "16",
        "--admission",
        "now",
        "--async-scheduling",
        ahead,
    )
    with serving(tmp_path / "log", *flags) as small:
        tight = asyncio.run(answers(small, requests))
        assert small.metric("num_preemptions_total") > 0
        small.eventually("kv_cache_usage_perc", 0)
        with small.client() as one, pytest.raises(openai.BadRequestError, match="1024"):
            one.completions.create(**ask(prompts(1, [1000], seed=3)[0], 100))
        assert small.terminate() == 0
    lengths = [answer.usage.completion_tokens for answer in tight]
    assert lengths[:3] + lengths[5:] == [45] * 14
    assert [answer.choices[0].text for answer in tight] == [answer.choices[0].text for answer in roomy]
