"""POST /v1/completions against a scripted engine."""

from typing import Any

import pytest

from server.protocol import FinishReason
from tests.api.conftest import MODEL, REPLY, Server

pytestmark = pytest.mark.anyio


async def test_plain_answer(server: Server) -> None:
    """Guards the shape that every OpenAI client parses, and exact token counts."""
    server.engine.num_cached_tokens = 3
    answer = await server.complete([5, 6, 7, 8])
    num_reply = len(server.tokenizer.encode(REPLY, add_special_tokens=False))
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == MODEL
    [choice] = answer["choices"]
    assert choice["text"] == REPLY
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": num_reply + 1,
        "total_tokens": 4 + num_reply + 1,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


@pytest.mark.parametrize("tokens_per_delta", [1, 2, 7])
@pytest.mark.parametrize("fields", [{}, {"stop": ["wide", "세계 😀"]}, {"echo": True}, {"max_tokens": 9}])
async def test_stream_equals_plain(server: Server, tokens_per_delta: int, fields: dict[str, Any]) -> None:
    """Guards against half characters, lost spaces and leaked stop strings: the stream adds up to the plain answer."""
    server.engine.tokens_per_delta = tokens_per_delta
    body = {"prompt": "Bonjour", "max_tokens": 64, **fields}
    plain = (await server.complete(**body))["choices"][0]
    events = await server.events("/v1/completions", body)
    assert events[-1] == "[DONE]"
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == plain["text"]
    assert not any("\ufffd" in e["choices"][0]["text"] for e in events[:-2])
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]][-1] == plain["finish_reason"]
    assert all("usage" not in e for e in events[:-1])


@pytest.mark.parametrize(
    ("stop", "include", "text", "stop_reason"),
    [
        ("wide", False, " Hello, ", "wide"),
        (["world", "wide"], False, " Hello, ", "wide"),
        (["wide"], True, " Hello, wide", "wide"),
        (["o, w"], False, " Hell", "o, w"),
        (["never there"], False, REPLY, None),
        ([""], False, REPLY, None),
        ("세계 😀", False, " Hello, wide world! 안녕하세요 ", "세계 😀"),
    ],
)
async def test_stop_strings(server: Server, stop: Any, include: bool, text: str, stop_reason: str | None) -> None:
    """Guards the cut to the character, wherever in its tokens the stop string begins and ends."""
    answer = await server.complete(stop=stop, include_stop_str_in_output=include)
    [choice] = answer["choices"]
    assert choice["text"] == text
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop_reason
    aborted = server.engine.unfinished
    assert aborted == ([server.engine.requests[-1].request_id] if stop_reason else [])


async def test_stop_string_counts_the_tokens_up_to_it(server: Server) -> None:
    """Guards usage when tokens behind the stop string were already under way in the same delta."""
    tokens = server.say(" one two three four", end=False)
    server.engine.tokens_per_delta = len(tokens)
    answer = await server.complete(stop="two")
    assert answer["usage"]["completion_tokens"] == 2


async def test_stop_token_of_the_client(server: Server) -> None:
    """Guards that the client's own stop token ends the text before it and is named as the reason."""
    tokens = server.say(" one two three", end=False)
    for include, text in ((False, " one two"), (True, " one two three")):
        [choice] = (await server.complete(stop_token_ids=[tokens[2]], include_stop_str_in_output=include))["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", tokens[2])


async def test_min_tokens_shields_from_stop_strings(server: Server) -> None:
    """Guards min_tokens: a stop string in the first min_tokens tokens does not stop."""
    tokens = server.say(" one two one two", end=False)
    [choice] = (await server.complete(stop=["one"], min_tokens=2, max_tokens=len(tokens)))["choices"]
    assert choice["text"] == " one two "


async def test_n_choices_and_batches(server: Server) -> None:
    """Guards indices, one seed a choice, the prompt counted once, and choice i answering prompt i."""
    answer = await server.complete(["a", "b"], n=3, seed=7, max_tokens=2)
    assert [c["index"] for c in answer["choices"]] == list(range(6))
    requests = {r.request_id.rpartition("-")[2]: r for r in server.engine.requests}
    assert [requests[str(i)].prompt_token_ids for i in range(6)] == [server.tokenizer.encode(p) for p in "aaabbb"]
    seeds = [requests[str(i)].sampling.seed for i in range(6)]
    assert seeds[0] == 7
    assert seeds[:3] == seeds[3:]
    assert len(set(seeds[:3])) == 3
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 12


async def test_stream_of_many_choices(server: Server) -> None:
    """Guards that every chunk names its choice, each choice ends once, and all share one id."""
    events = await server.events("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 64})
    chunks = events[:-1]
    assert len({c["id"] for c in chunks}) == 1
    for index in range(4):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(c["text"] for c in mine) == REPLY
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]


@pytest.mark.parametrize(
    ("options", "usages"),
    [
        ({}, "absent"),
        ({"include_usage": False}, "absent"),
        ({"continuous_usage_stats": True}, "absent"),
        ({"include_usage": True}, "last"),
        ({"include_usage": True, "continuous_usage_stats": True}, "all"),
    ],
)
async def test_usage_in_streams(server: Server, options: dict[str, Any], usages: str) -> None:
    """Guards stream_options: no usage unasked for; else one last chunk without choices, with the plain numbers."""
    body = {"prompt": "Hi", "max_tokens": 5, "stream_options": options}
    chunks = (await server.events("/v1/completions", body))[:-1]
    plain = await server.complete("Hi", max_tokens=5)
    if usages == "absent":
        assert not any("usage" in c for c in chunks)
        assert all(c["choices"] for c in chunks)
        return
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == plain["usage"]
    earlier = [c["usage"] for c in chunks[:-1]]
    assert all(u is not None for u in earlier) if usages == "all" else earlier == [None] * len(earlier)
    if usages == "all":
        assert [u["completion_tokens"] for u in earlier] == [1, 2, 3, 4, 5]


async def test_echo_without_output(server: Server) -> None:
    """Guards scoring: max_tokens = 0 with echo gives the prompt alone, with its log-probabilities."""
    prompt = "The capital of France"
    answer = await server.complete(prompt, echo=True, max_tokens=0, logprobs=1)
    [choice] = answer["choices"]
    assert choice["text"] == prompt
    assert answer["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == prompt
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 3, 11, 14]
    assert logprobs["top_logprobs"][0] is None


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stop", [None, "wide", "o, w", "세계 😀"])
async def test_legacy_logprobs(server: Server, echo: bool, stop: str | None) -> None:
    """Guards that tokens spell the text, also up to a stop string, and that offsets point at them; streamed as well."""
    body = {"prompt": "Say it", "max_tokens": 64, "logprobs": 2, "echo": echo, "stop": stop}
    [choice] = (await server.complete(**body))["choices"]
    logprobs, text = choice["logprobs"], choice["text"]
    num = len(logprobs["tokens"])
    assert {len(values) for values in logprobs.values()} == {num}
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:") and offset + len(token) <= len(text):
            assert text[offset:].startswith(token)
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"] if top is not None)
    streamed: dict[str, list[Any]] = {key: [] for key in logprobs}
    for event in (await server.events("/v1/completions", body))[:-1]:
        for key, values in (event["choices"][0]["logprobs"] or {}).items():
            streamed[key] += values
    assert streamed == logprobs


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("shown", ["", " Hello"])
async def test_legacy_logprobs_of_the_end_token(server: Server, echo: bool, shown: str) -> None:
    """Guards lm-eval's scores: it cuts one entry for the one token it let the model write, be that the end token."""
    server.say(shown)
    answer = await server.complete("Say it", logprobs=1, echo=echo)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    usage, logprobs = answer["usage"], choice["logprobs"]
    num_echoed = usage["prompt_tokens"] if echo else 0
    assert {len(values) for values in logprobs.values()} == {num_echoed + usage["completion_tokens"]}
    assert "".join(logprobs["tokens"]) == choice["text"] + "<|im_end|>"
    assert logprobs["text_offset"][-1] == len(choice["text"])


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(3, 1), (1, 3), (0, 2), (2, 0)])
async def test_an_echo_and_prompt_logprobs_of_different_sizes(
    server: Server, logprobs: int, prompt_logprobs: int
) -> None:
    """Guards two fields that ask for scores of the same prompt: neither gets the other's number of alternatives."""
    fields = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs, "echo": True, "max_tokens": 1}
    [choice] = (await server.complete([5, 6, 7], **fields))["choices"]
    assert {len(top) for top in choice["logprobs"]["top_logprobs"] if top} == {max(1, logprobs)}
    assert {len(entry) for entry in choice["prompt_logprobs"] if entry} == {max(1, prompt_logprobs)}


async def test_an_echo_hides_no_wrong_prompt_logprobs(server: Server) -> None:
    """Guards against a wrong number that passes because another field asks for a larger one."""
    body = {"prompt": "Hi", "echo": True, "logprobs": 2, "prompt_logprobs": -1}
    response = await server.post("/v1/completions", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_prompt_logprobs_and_token_ids(server: Server) -> None:
    """Guards vLLM's extensions, also in a stream."""
    body = {"prompt": [5, 6, 7], "max_tokens": 3, "prompt_logprobs": 1, "return_token_ids": True}
    [choice] = (await server.complete(**body))["choices"]
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert len(choice["token_ids"]) == 3
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["6"]["logprob"] == -0.5
    events = (await server.events("/v1/completions", body))[:-1]
    assert [e["choices"][0]["prompt_logprobs"] for e in events if "prompt_logprobs" in e["choices"][0]] == [
        choice["prompt_logprobs"]
    ]
    assert [t for e in events for t in e["choices"][0]["token_ids"]] == choice["token_ids"]


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.ABORT])
async def test_failure_before_and_in_a_stream(server: Server, reason: FinishReason) -> None:
    """Guards that a failure is an error status before the first byte, and one error event, then [DONE], after it."""
    status = {"error": 500, "timeout": 408, "abort": 503}[reason.value]
    server.engine.fail_after = (3, reason)
    response = await server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 64})
    assert response.status_code == status
    assert response.json()["error"]["message"]
    events = await server.events("/v1/completions", {"prompt": "Hi", "max_tokens": 64})
    assert [set(e) >= {"choices"} for e in events[:2]] == [True, True]
    assert set(events[-2]) == {"error"}
    assert events[-1] == "[DONE]"
    server.engine.fail_after = (0, reason)
    response = await server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 64, "stream": True})
    assert response.status_code == status


async def test_an_engine_that_says_no_end(server: Server) -> None:
    """Guards against an answer that hangs or ends as if it were whole."""
    server.engine.loose_end = True
    response = await server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 4})
    assert response.status_code == 500
