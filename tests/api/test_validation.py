"""Requests that are wrong: a 4xx with the error body that names the field, before anything runs."""

import json
from typing import Any

import pytest

from server.config import ApiConfig
from server.frontend.sampling_defaults import SamplingDefaults
from server.protocol import Ready
from server.tokenizer import ChatTemplate, Tokenizer
from tests.api.conftest import Server, ok
from tests.api.fakes import READY

pytestmark = pytest.mark.anyio

BOTH = ("/v1/completions", "/v1/chat/completions")


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    start = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    return {**start, "max_tokens": 4, **fields}


def check_error(response: Any, status: int = 400, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    assert set(response.json()) - {"type"} == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 2**40}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"best_of": 1000000}, "best_of"),
        ({"stop": 5}, "stop"),
        ({"stop": [1, 2]}, "stop[0]"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "x" * 5000}, "stop"),
        ({"stream": "maybe"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"seed": "abc"}, "seed"),
        ({"stop_token_ids": [49152]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
        ({"logit_bias": [1, 2]}, "logit_bias"),
        ({"logit_bias": {"49152": 5}}, "logit_bias"),
        ({"logit_bias": {"-7": -100}}, "logit_bias"),
        ({"logit_bias": {"50": 1e9}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 5000}, "truncate_prompt_tokens"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -3}, "timeout"),
        ({"priority": 2**40}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"stream_options": 5}, "stream_options"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"logit_bias": {"str": "x"}}, "logit_bias.str"),
        ({"stop_token_ids": [1, "x"]}, "stop_token_ids[1]"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"guided_json": {}}, "guided_json"),
        ({"length_penalty": 2.0}, "length_penalty"),
    ],
)
async def test_fields(server: Server, fields: dict[str, Any], param: str | None) -> None:
    """Guards every field's type and range: a wrong request opens no stream and never reaches the engine."""
    for path in BOTH:
        for stream in (False, True):
            check_error(await server.post(path, body_for(path, **{"stream": stream, **fields})), param=param)
    assert server.engine.requests == []


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"logprobs": 100000}, "logprobs"),
        ("/v1/completions", {"logprobs": True}, "logprobs"),
        ("/v1/completions", {"suffix": "x"}, "suffix"),
        ("/v1/completions", {"stream_options": {"include_usage": None}}, "stream_options"),
        ("/v1/chat/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": 2}, "logprobs"),
        ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "functions"),
        ("/v1/chat/completions", {"modalities": ["audio"]}, "modalities"),
        ("/v1/chat/completions", {"store": True}, "store"),
        ("/v1/chat/completions", {"web_search_options": {}}, "web_search_options"),
    ],
)
async def test_fields_of_one_endpoint(server: Server, path: str, fields: dict[str, Any], param: str) -> None:
    """Guards that a field we know and can't honour is refused by name, never ignored."""
    check_error(await server.post(path, body_for(path, **fields)), param=param)


@pytest.mark.parametrize(
    "prompt",
    ["", [""], [], [[]], ["x", ""], None, {"a": 1}, 5, True, [None], [["a"]], [{"a": 1}], ["a", 5], [1.5], [True], [-1],
     [49152], [5, -3], [2**63], [[5], [10**7]], ["x"] * 257],
)  # fmt: skip
async def test_prompts(server: Server, prompt: Any) -> None:
    """Guards the prompt's shapes and its ids: nothing out of the vocabulary reaches the engine."""
    check_error(await server.post("/v1/completions", {"prompt": prompt}), param="prompt")


@pytest.mark.parametrize(
    "body",
    [b'{"a":', b"", b"{bad}", b"[]", b"null", b"123", b'"str"', b"true", b"\xff\xfe", b"[" * 50000, b'{"a":' * 20000,
     b'{"prompt": NaN}', b'{"prompt":"\xff"}', b'{"prompt":"\\ud800"}', b'{"tokens": ' + b"9" * 5000 + b"}", b"{}"],
)  # fmt: skip
async def test_bodies(server: Server, body: bytes) -> None:
    """Guards against a 500 from what is no JSON object, or one nested too deep."""
    for path in (*BOTH, "/tokenize", "/detokenize", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"):
        check_error(await server.post(path, body))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi", "guided_json": {}}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "guided_json": {}}),
        ("/tokenize", {"prompt": "hi", "guided_json": {}}),
    ],
)
async def test_known_fields_that_nothing_honors_are_refused_everywhere(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    """Guards against the one endpoint that ignores without a word what the others refuse."""
    check_error(await server.post(path, body), param="guided_json")


async def test_lone_surrogates(server: Server) -> None:
    """Guards the tokenizer from text that is no Unicode."""
    check_error(await server.post("/v1/completions", json.dumps({"prompt": "\ud800"}).encode()))


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"top_p": 0}, {"top_k": -1}, {"top_k": 0}, {"top_k": 10**6}])
async def test_edges_that_are_fine(server: Server, fields: dict[str, Any]) -> None:
    """Guards the edges of ranges that clients use on purpose."""
    await server.complete(**fields)
    sampling = server.engine.requests[-1].sampling
    assert 0 < sampling.top_p <= 1
    assert sampling.top_k == 0


@pytest.mark.parametrize(
    "name",
    ["n", "best_of", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "top_k", "priority",
     "truncate_prompt_tokens", "temperature", "timeout", "presence_penalty"],
)  # fmt: skip
@pytest.mark.parametrize("value", [10**400, -(10**400)])
async def test_numbers_beyond_a_float(server: Server, name: str, value: int) -> None:
    """Guards against OverflowError: an integer of JSON has no bound, and not every function takes such a one."""
    response = await server.post("/v1/completions", {"prompt": "Hi", name: value})
    if name == "top_k" and value > 0:
        assert response.status_code == 200  # more than the vocabulary: off
    else:
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**63 - 1, 2**64, -(2**70)])
async def test_any_seed(server: Server, seed: int) -> None:
    """Guards seeds beyond 64 bits, which would break the engine's message."""
    await server.complete(seed=seed)
    assert server.engine.requests[-1].sampling.seed == seed % 2**64


async def test_unseeded_requests_differ(server: Server) -> None:
    """Guards against the same random answer for everybody."""
    for _ in range(3):
        await server.complete()
    assert len({r.sampling.seed for r in server.engine.requests}) == 3


async def test_end_tokens(server: Server) -> None:
    """Guards ignore_eos: only the client's own stop tokens are left."""
    await server.complete(stop_token_ids=[7], ignore_eos=True)
    assert server.engine.requests[-1].sampling.stop_token_ids == (7,)
    await server.complete(stop_token_ids=[7])
    assert set(server.engine.requests[-1].sampling.stop_token_ids) == {7, *server.tokenizer.end_token_ids}


def small_cache(num_blocks: int) -> Ready:
    return Ready(**{**{f: getattr(READY, f) for f in READY.__struct_fields__}, "num_blocks": num_blocks})


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_blocks", "numbers"),
    [
        (2048, 1, 256, ("2048",)),
        (3000, None, 256, ("2048", "3000")),
        (2000, 49, 256, ("2048", "2049", "2000", "48")),
        (100, 61, 10, ("160", "10 blocks of 16", "161")),
        (161, None, 10, ("160", "161")),
    ],
)
async def test_too_long(
    server: Server, num_prompt: int, max_tokens: int | None, num_blocks: int, numbers: tuple[str, ...]
) -> None:
    """Guards the refusal, with the numbers, of what fits neither the context nor the KV cache."""
    server.engine.state.ready = small_cache(num_blocks)
    body = {"prompt": [5] * num_prompt, "max_tokens": max_tokens}
    response = await server.post("/v1/completions", body)
    check_error(response)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    for number in numbers:
        assert number in response.json()["error"]["message"]


async def test_exactly_full(server: Server) -> None:
    """Guards the edge: prompt + max_tokens equal to the limit is fine."""
    await server.complete([5] * 2000, max_tokens=48)
    await server.complete([5] * 2048, max_tokens=0, echo=True)


async def test_megabytes_are_refused_unread(server: Server) -> None:
    """Guards the event loop from encoding a text that can't fit anyhow."""
    response = await server.post("/v1/completions", {"prompt": "lorem ipsum " * 700_000})
    check_error(response, param="prompt")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_conversations_of_megabytes_are_refused_unread(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Guards the processor from encoding, for many seconds, a conversation that can't fit anyhow."""
    messages = [{"role": "user", "content": "lorem ipsum " * 20_000}]
    monkeypatch.setattr(Tokenizer, "encode", lambda *_args, **_kwargs: pytest.fail("encoded"))
    response = await server.post(path, {"messages": messages})
    check_error(response, param="messages")
    assert response.json()["error"]["code"] == "context_length_exceeded"
    monkeypatch.undo()
    assert (await server.post(BOTH[1], {"messages": messages, "truncate_prompt_tokens": 9})).status_code == 200


@pytest.mark.parametrize(("keep", "expected"), [(None, 10), (3, 3), (100, 10), (-1, 10)])
async def test_truncation(server: Server, keep: int | None, expected: int) -> None:
    """Guards that the end of the prompt is what stays."""
    await server.complete(list(range(5, 15)), truncate_prompt_tokens=keep)
    assert server.engine.requests[-1].prompt_token_ids == list(range(15 - expected, 15))


async def test_truncation_to_what_fits(server: Server) -> None:
    """Guards -1: room for max_tokens is left."""
    await server.complete([5] * 5000, truncate_prompt_tokens=-1, max_tokens=48)
    assert len(server.engine.requests[-1].prompt_token_ids) == 2000


async def test_a_text_beyond_the_context_is_truncated(server: Server) -> None:
    """Guards against refusing, as too long, the very texts that truncation is for."""
    await server.complete("lorem ipsum " * 20_000, truncate_prompt_tokens=7)
    assert len(server.engine.requests[-1].prompt_token_ids) == 7


@pytest.mark.parametrize("path", BOTH)
async def test_model_names(server: Server, path: str) -> None:
    """Guards 404 model_not_found, and that the answer says the name that was asked for."""
    response = await server.post(path, body_for(path, model="no-such-model"))
    check_error(response, 404, "model")
    assert response.json()["error"]["code"] == "model_not_found"
    for name in ("\x00", "x" * 100_000, "../../../etc/passwd"):
        check_error(await server.post(path, body_for(path, model=name)), 404)
    assert (await server.post(path, body_for(path, model="alias"))).json()["model"] == "alias"


@pytest.mark.parametrize("path", BOTH)
async def test_harmless_and_unknown_fields(server: Server, path: str) -> None:
    """Guards that fields which change no answer, and unknown ones, are no error."""
    fields = {"user": "u1", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "foo_bar": 1}
    fields |= {"use_beam_search": False, "length_penalty": 1.0, "functions": [], "audio": None}
    assert (await server.post(path, body_for(path, **fields))).status_code == 200


async def test_extensions_reach_the_engine(server: Server) -> None:
    """Guards priority, cache_salt and timeout, which only the engine honours."""
    await server.complete(priority=-3, cache_salt="tenant", timeout=5)
    request = server.engine.requests[-1]
    assert (request.priority, request.cache_salt) == (-3, "tenant")
    assert request.deadline is not None
    assert abs(request.deadline - request.arrival_time - 5) < 1e-6


async def test_the_models_own_defaults(tokenizer: Tokenizer, chat_template: ChatTemplate) -> None:
    """Guards models published with their sampling: it holds where a request leaves it open, and nowhere else."""
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
    server = Server(tokenizer, chat_template, ApiConfig(), defaults=defaults)
    await server.chat()
    sampling = server.engine.requests[-1].sampling
    assert all(getattr(sampling, name) == getattr(defaults, name) for name in SamplingDefaults.__slots__)
    own = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    await server.chat(**own)
    sampling = server.engine.requests[-1].sampling
    assert {name: getattr(sampling, name) for name in own} == {**own, "top_k": 0}
    response = ok(await server.post("/v1/responses", {"input": "x", "top_p": 0.5}))
    assert (response["temperature"], response["top_p"]) == (0.6, 0.5)


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/v1/completions", {"stop": 5}, "stop: Input should be a valid string or a valid array"),
        ("/v1/completions", {"stop": ["a", 1]}, "stop[1]: Input should be a valid string"),
        ("/v1/responses", {"input": 3}, "input: Input should be a valid string or a valid array"),
        ("/v1/responses", {"input": [3]}, "input[0]: Input should be an object"),
        ("/v1/messages", {"max_tokens": 1, "messages": [], "system": [1]}, "system[0]: Input should be an object"),
        ("/v1/chat/completions", {"messages": ["x"]}, "messages[0]: Input should be an object"),
        ("/v1/chat/completions", {}, "messages is missing"),
    ],
)
async def test_fields_are_named_as_the_client_spells_them(
    server: Server, path: str, fields: dict[str, Any], message: str
) -> None:
    """Regression: `stop.str`, where a kind of value that the validator had tried was taken for a field."""
    response = await server.post(path, {"prompt": "x", **fields} if path == "/v1/completions" else fields)
    check_error(response, param=message.partition(":")[0].removesuffix(" is missing"))
    assert response.json()["error"]["message"] == message
