"""Seeded random requests: right ones, ones that are wrong in a field, and bodies that are no JSON at all."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.values import nested, odd_text, odd_value, random_schema

GENERATION = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
POSTS = (*GENERATION, "/v1/messages/count_tokens", "/tokenize", "/detokenize")
GETS = ("/livez", "/readyz", "/health", "/version", "/metrics", "/v1/models", "/debug/pages", "/debug/requests")
STRANGE_PATHS = (
    "/",
    "/v1",
    "/v1/",
    "/v1/models/none",
    "/v1/models/%00",
    "/v1/chat/completions/",
    "/%ff%fe",
    "//",
    "/a?b=%",
)
METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE")
CONTENT_TYPES = (
    "application/json; charset=utf-16",
    "text/plain",
    "multipart/form-data; boundary=x",
    "",
    "application/xml",
    "\xff",
)


@dataclass(frozen=True, slots=True)
class Shot:
    """One request. hang_up: the client goes away after the first bytes of the answer."""

    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    hang_up: bool = False

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.headers} {self.body[:1500]!r}"


def shots(seed: int, count: int) -> Iterator[Shot]:
    """The same ones for the same seed. Each is made of its own random numbers, so one can be made again alone."""
    return (shot(seed, number) for number in range(count))


def shot(seed: int, number: int) -> Shot:
    rng = random.Random(f"{seed}/{number}")
    draw = rng.random()
    if draw < 0.05:
        return Shot("GET", rng.choice(GETS))
    if draw < 0.10:
        return Shot(
            rng.choice(("GET", "POST", *METHODS)), rng.choice((*STRANGE_PATHS, *POSTS, *GETS)), rng.randbytes(9)
        )
    path = rng.choice((*GENERATION, *GENERATION, *POSTS))
    body = _valid_body(path, rng)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
        _spoil(body, rng)
    _bound(path, body)
    return Shot("POST", path, _written(body, rng), _headers(rng), hang_up=rng.random() < 0.08)


# ------------------------------------------------------------------------------------------------ bodies that are fine


def _valid_body(path: str, rng: random.Random) -> dict[str, Any]:
    body = _BODIES[path](rng)
    if path in GENERATION[:2]:
        for name in rng.sample(sorted(_OPTIONS), rng.randrange(5)):
            body[name] = _OPTIONS[name](rng)
    return {name: value for name, value in body.items() if value is not None}


def _completion(rng: random.Random) -> dict[str, Any]:
    prompt: Any = rng.choice((_text(rng), [_text(rng), "b"], _ids(rng), [_ids(rng), _ids(rng)], [""], "x"))
    return {
        "prompt": prompt,
        "max_tokens": rng.choice((0, 1, 2, 5, 12)),
        "echo": rng.choice((None, True, False)),
        "logprobs": rng.choice((None, None, 0, 1, 5)),
        "stream": rng.choice((True, False)),
    }


def _chat(rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": _messages(rng, ("system", "user", "assistant")),
        "max_tokens": rng.choice((1, 2, 5, 12)),
        "stream": rng.choice((True, False)),
        "logprobs": rng.choice((None, True)),
    }
    if rng.random() < 0.25:
        functions = [{"name": f"f{i}", "description": _text(rng), "parameters": random_schema(rng)} for i in range(2)]
        body["tools"] = [{"type": "function", "function": function} for function in functions]
        named = {"type": "function", "function": {"name": rng.choice(("f0", "f1", "g"))}}
        body["tool_choice"] = rng.choice((None, "auto", "none", "required", named))
        body["parallel_tool_calls"] = rng.choice((None, True, False))
    elif rng.random() < 0.2:
        body["chat_template"] = rng.choice(
            ("{{ messages }}", "{% for m in messages %}{{ m.content }}{% endfor %}", "{{")
        )
    return body


def _responses(rng: random.Random) -> dict[str, Any]:
    parts = [{"role": "user", "content": [{"type": "input_text", "text": _text(rng)}]}]
    return {
        "input": rng.choice((_text(rng), parts, _messages(rng, ("user", "assistant")))),
        "instructions": rng.choice((None, _text(rng))),
        "max_output_tokens": rng.choice((1, 16, 20)),
        "stream": rng.choice((True, False)),
        "temperature": rng.choice((None, 0, 1.5)),
    }


def _anthropic(rng: random.Random) -> dict[str, Any]:
    body = _count_tokens(rng)
    return body | {
        "max_tokens": rng.choice((1, 2, 5, 12)),
        "stream": rng.choice((True, False)),
        "stop_sequences": rng.choice((None, [], ["a"], [odd_text(rng)])),
        "temperature": rng.choice((None, 0.0, 1.0)),
    }


def _count_tokens(rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": _messages(rng, ("user", "assistant")), "system": rng.choice((None, _text(rng)))}
    if rng.random() < 0.3:
        body["tools"] = [{"name": "f", "description": _text(rng), "input_schema": random_schema(rng)}]
        body["tool_choice"] = rng.choice((None, {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}))
    return body


def _tokenize(rng: random.Random) -> dict[str, Any]:
    chat = {"messages": _messages(rng, ("system", "user"))}
    return rng.choice(({"prompt": _text(rng)}, chat, {"prompt": "a"} | chat)) | {
        "return_token_strs": rng.choice((None, True))
    }


def _detokenize(rng: random.Random) -> dict[str, Any]:
    return {"tokens": _ids(rng)}


_BODIES: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "/v1/completions": _completion,
    "/v1/chat/completions": _chat,
    "/v1/responses": _responses,
    "/v1/messages": _anthropic,
    "/v1/messages/count_tokens": _count_tokens,
    "/tokenize": _tokenize,
    "/detokenize": _detokenize,
}


def _messages(rng: random.Random, roles: tuple[str, ...]) -> list[dict[str, Any]]:
    count = rng.choice((1, 1, 2, 3))
    messages: list[dict[str, Any]] = [{"role": rng.choice(roles), "content": _text(rng)} for _ in range(count)]
    messages[-1]["role"] = "user"
    if rng.random() < 0.3:
        messages[-1]["content"] = [{"type": "text", "text": _text(rng)} for _ in range(rng.randrange(1, 3))]
    return messages


def _text(rng: random.Random) -> str:
    words = " ".join(
        rng.choices(("Say", "one", "word", "두", "слово", "🙂", "\n", "  ", "x=1;"), k=rng.randrange(1, 9))
    )
    return odd_text(rng) if rng.random() < 0.15 else words


def _ids(rng: random.Random) -> list[int]:
    return [rng.randrange(49152) for _ in range(rng.choice((1, 3, 40)))]


def _constraint(rng: random.Random) -> dict[str, Any]:
    return rng.choice(
        (
            {"json": random_schema(rng)},
            {"regex": rng.choice((r"\d{3}", "(a|b)*c", "(?=a)", odd_text(rng)))},
            {"choice": rng.choice((["yes", "no"], [], [odd_text(rng)], list("abcdefgh" * 200)))},
            {"grammar": rng.choice(('start: "a" | "b"', "root ::= [a-z]+", odd_text(rng)))},
            {"json": {"$ref": "#"}},
            {},
        )
    )


def _format(rng: random.Random) -> dict[str, Any]:
    schema = rng.choice((random_schema(rng), {"type": "nothing"}, {"$ref": "#/a"}, True, {"enum": []}))
    of_schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    return rng.choice(({"type": "text"}, {"type": "json_object"}, of_schema))


_OPTIONS: dict[str, Callable[[random.Random], Any]] = {
    "n": lambda rng: rng.choice((1, 2, 3)),
    "stop": lambda rng: rng.choice(("a", ["e", "zz"], "", [], [odd_text(rng)] * 3)),
    "temperature": lambda rng: rng.choice((0, 1e-9, 0.7, 2, 100.0)),
    "top_p": lambda rng: rng.choice((0, 1e-9, 0.5, 1)),
    "top_k": lambda rng: rng.choice((-1, 0, 1, 7, 10**6)),
    "min_p": lambda rng: rng.choice((0, 0.3, 1)),
    "seed": lambda rng: rng.choice((0, -1, 7, 2**63, -(2**64))),
    "repetition_penalty": lambda rng: rng.choice((0.01, 1, 1.3, 1e9)),
    "presence_penalty": lambda rng: rng.choice((-2, 0.5, 2)),
    "frequency_penalty": lambda rng: rng.choice((-2, 0.5, 2)),
    "logit_bias": lambda rng: {str(rng.randrange(-3, 50_000)): rng.choice((-100, 100, 5.5, 101))},
    "min_tokens": lambda rng: rng.choice((0, 1, 3)),
    "ignore_eos": lambda rng: rng.choice((True, False)),
    "stop_token_ids": lambda rng: rng.choice(([], [2], _ids(rng), [-1])),
    "include_stop_str_in_output": lambda rng: True,
    "skip_special_tokens": lambda rng: False,
    "prompt_logprobs": lambda rng: rng.choice((0, 1, 3)),
    "stream_options": lambda rng: {"include_usage": rng.choice((True, False)), "continuous_usage_stats": True},
    "response_format": _format,
    "structured_outputs": _constraint,
    "cache_salt": odd_text,
    "priority": lambda rng: rng.choice((-5, 0, 5)),
    "truncate_prompt_tokens": lambda rng: rng.choice((-1, 1, 2, 0)),
    "return_token_ids": lambda rng: True,
    "timeout": lambda rng: rng.choice((1e-6, 0.05, 1)),
    "model": lambda rng: rng.choice(("SmolLM2-135M-Instruct", "another", odd_text(rng))),
    "top_logprobs": lambda rng: rng.choice((0, 1, 5)),
    "max_completion_tokens": lambda rng: rng.choice((1, 4)),
    "continue_final_message": lambda rng: True,
    "add_generation_prompt": lambda rng: False,
    "chat_template_kwargs": lambda rng: {odd_text(rng): odd_value(rng)},
    "reasoning_effort": lambda rng: rng.choice(("none", "high")),
    "user": odd_text,
}


# ------------------------------------------------------------------------------------------------------------ spoiling


def _spoil(body: dict[str, Any], rng: random.Random) -> None:
    """One wrong thing somewhere: a value, deep or not, a field that is gone, or one that nobody knows."""
    draw = rng.random()
    if draw < 0.1 and body:
        del body[rng.choice(list(body))]
    elif draw < 0.2:
        body[odd_text(rng)] = odd_value(rng)
    elif draw < 0.45:
        body[rng.choice(("messages", "prompt", "input", "tools", "tool_choice", "n", *_OPTIONS))] = odd_value(rng)
    elif body:
        _replace_somewhere(body, rng)


def _bound(path: str, body: dict[str, Any]) -> None:
    """What is left valid must not write until the context is full: that is slow, and right."""
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
        if type(body.get(name)) is int and 64 < body[name] < 100_000:
            body[name] = 64
    if path in GENERATION and body.get("timeout") is None:
        body["timeout"] = 4.0


def _replace_somewhere(value: Any, rng: random.Random) -> None:
    while True:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        inner = value[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
            value[key] = odd_value(rng)
            return
        value = inner


def _written(body: dict[str, Any], rng: random.Random) -> bytes:
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5)
    written = text.encode(errors="surrogatepass")
    if rng.random() > 0.12:
        return written
    return rng.choice(
        (
            lambda: written[: rng.randrange(len(written))],
            lambda: written + b"}",
            lambda: b"\xef\xbb\xbf" + written,
            lambda: text.encode("utf-16", errors="surrogatepass"),
            lambda: written.replace(b"a", b"\xff", 1),
            lambda: _with_raw_member(text, rng).encode(errors="surrogatepass"),
            lambda: nested(rng.choice((100, 300, 3000, 100_000)), rng).encode(),
            lambda: json.dumps(odd_value(rng)).encode(),
            lambda: rng.randbytes(rng.randrange(200)),
            lambda: b" " * rng.randrange(4),
        )
    )()


def _with_raw_member(text: str, rng: random.Random) -> str:
    """A member that json.dumps would not write; where its name is there already, twice."""
    name = rng.choice(("seed", "n", "messages", "prompt", "metadata", "temperature", "chat_template_kwargs"))
    value = rng.choice(
        (
            "NaN",
            "-Infinity",
            "1e999",
            "1" * 5000,
            "0x10",
            "01",
            "+1",
            "'a'",
            '"\\ud83d"',
            '"\t"',
            nested(150, rng),
            nested(9000, rng),
        )
    )
    return f'{{"{name}": {value}, {text[1:]}' if rng.random() < 0.5 else f'{text[:-1]}, "{name}": {value}}}'


def _headers(rng: random.Random) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    if rng.random() < 0.1:
        headers["content-type"] = rng.choice(CONTENT_TYPES)
    if rng.random() < 0.05:
        headers["x-request-id"] = rng.choice(("abc", "a" * 5000, "a b", "é"))
    if rng.random() < 0.03:
        headers["content-encoding"] = rng.choice(("gzip", "br", "nonsense"))
    if rng.random() < 0.03:
        headers["accept"] = "text/event-stream"
    if rng.random() < 0.03:
        headers["authorization"] = rng.choice(("", "Bearer", "Bearer é", "Basic eDp5", "Bearer " + "k" * 9000))
    return headers
