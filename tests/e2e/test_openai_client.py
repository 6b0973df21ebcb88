"""What people do with the official client on the first day."""

import httpx
import openai
import pytest

from tests.e2e.conftest import DEFAULT_MODEL, Server

PROMPTS = {
    "English": "List three colors and one animal.",
    "Korean": "한국의 수도는 어디인가요? 한국어로 대답해 주세요.",
    "emoji": "Repeat exactly, nothing else: 🙂🚀👩‍👩‍👧 안녕하세요 🎉",
}


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def count(server: Server, **body: object) -> int:
    return httpx.post(f"{server.url}/tokenize", json={"model": DEFAULT_MODEL} | body).json()["count"]


def test_the_model_is_listed(client):
    """A client that asks which models there are finds none, or another name than requests need."""
    assert [model.id for model in client.models.list().data] == [DEFAULT_MODEL]
    assert client.models.retrieve(DEFAULT_MODEL).id == DEFAULT_MODEL


def test_chat_answers_sensibly(client):
    """Wrong weights, positions or template: fluent servers that know nothing."""
    answer = client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=say("What is the capital of France? Answer in one word."),
        temperature=0,
        max_tokens=16,
    )
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
def test_streamed_equals_plain(client, prompt):
    """Half a character, a lost first or last piece, or text of a cut-off token in one of the two forms."""
    ask = {"model": DEFAULT_MODEL, "messages": say(prompt), "temperature": 0, "max_tokens": 32}
    plain = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == plain.choices[0].message.content
    assert not any("\ufffd" in piece for piece in pieces)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == plain.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == plain.usage.prompt_tokens


def test_usage_is_exact(client, server):
    """Bills and budgets that count template tokens, end tokens or stop strings wrongly."""
    messages = say("Tell me about the sea.")
    answer = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=messages, temperature=0, max_tokens=24, extra_body={"ignore_eos": True}
    )
    assert answer.usage.prompt_tokens == count(server, messages=messages)
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    assert answer.choices[0].finish_reason == "length"


def test_a_repeated_prompt_is_cached(client):
    """The prefix cache never hits, or hits and is not reported, or claims the whole prompt."""
    ask = {"model": DEFAULT_MODEL, "prompt": list(range(1000, 1100)), "max_tokens": 4, "temperature": 0}
    first, second = client.completions.create(**ask), client.completions.create(**ask)
    assert first.choices[0].text == second.choices[0].text
    assert second.usage.prompt_tokens == 100
    assert 0 < second.usage.prompt_tokens_details.cached_tokens < 100


def test_completion_of_text_tokens_and_batches(client, server):
    """A batch whose choices are out of order, or token ids that are tokenised again."""
    text = "The three primary colors are"
    tokens = httpx.post(f"{server.url}/tokenize", json={"model": DEFAULT_MODEL, "prompt": text}).json()["tokens"]
    ask = {"model": DEFAULT_MODEL, "temperature": 0, "max_tokens": 8}
    alone = client.completions.create(prompt=text, **ask).choices[0].text
    assert client.completions.create(prompt=tokens, **ask).choices[0].text == alone
    batch = client.completions.create(prompt=["One, two, three,", text], **ask)
    assert [choice.index for choice in batch.choices] == [0, 1]
    assert batch.choices[1].text == alone
    assert client.completions.create(prompt=text, echo=True, **ask).choices[0].text == text + alone


def test_three_answers_from_one_prompt(client):
    """n answers that share one random state, or one usage that counts the prompt n times."""
    ask = {"model": DEFAULT_MODEL, "messages": say("Invent a name for a ship."), "n": 3, "max_tokens": 12, "seed": 5}
    answer = client.chat.completions.create(**ask, temperature=1.2)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert answer.usage.completion_tokens <= 36
    again = client.chat.completions.create(**ask, temperature=1.2)
    assert [choice.message.content for choice in again.choices] == texts


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_the_text(client, stream):
    """The stop string, or its first half, reaches the client; or generation goes on behind it."""
    ask = {"model": DEFAULT_MODEL, "prompt": "1, 2, 3, 4, 5,", "temperature": 0, "max_tokens": 40}
    whole = client.completions.create(**ask).choices[0].text
    stop = whole[10:14]
    expected = whole[: whole.index(stop)]
    if stream:
        chunks = [c.choices[0] for c in client.completions.create(**ask, stop=[stop, "@@"], stream=True) if c.choices]
        text, reason = "".join(c.text for c in chunks), chunks[-1].finish_reason
    else:
        choice = client.completions.create(**ask, stop=[stop, "@@"]).choices[0]
        text, reason = choice.text, choice.finish_reason
    assert (text, reason) == (expected, "stop")


def test_a_seed_repeats_and_no_seed_varies(client):
    """A seed that is ignored, or a "random" answer that is always the same."""
    ask = {"model": DEFAULT_MODEL, "prompt": "Once upon a time", "max_tokens": 16, "temperature": 1.0}
    assert (
        client.completions.create(**ask, seed=7).choices[0].text
        == client.completions.create(**ask, seed=7).choices[0].text
    )
    assert len({client.completions.create(**ask).choices[0].text for _ in range(3)}) > 1


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({"max_tokens": 10**6}, openai.BadRequestError, None),
        ({"n": 10**6}, openai.BadRequestError, "n"),
        ({"model": "another"}, openai.NotFoundError, None),
    ],
)
def test_a_wrong_request_is_refused_and_harms_nobody(client, change, error, param):
    """A 500, a 422 in FastAPI's own form, or a parameter that is clamped in silence."""
    with pytest.raises(error) as caught:
        client.completions.create(**({"model": DEFAULT_MODEL, "prompt": "x", "max_tokens": 2} | change))
    assert caught.value.body["message"]
    if param:
        assert caught.value.body["param"] == param
    assert client.completions.create(model=DEFAULT_MODEL, prompt="x", max_tokens=2).usage.completion_tokens <= 2


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health", "/version", "/metrics"])
def test_probes_answer(server, path):
    """An orchestrator restarts a server that is well."""
    assert httpx.get(server.url + path).status_code == 200
