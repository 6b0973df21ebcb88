"""A short barrage in `make test`; the long one is `python -m tests.fuzz.client`."""

import json

import httpx
import pytest

from tests.fuzz.client import aftermath, barrage, complaint_about, kv_usage
from tests.fuzz.shots import POSTS, Shot, shot, shots

NUM_SCRIPTED, NUM_REAL = 600, 100


@pytest.mark.anyio
async def test_no_request_gets_a_wrong_kind_of_answer(server):
    """A value of a strange type, size or encoding that some path forgot: a 500, or a refusal without an error body."""
    report = await barrage(server.http, shots(0, NUM_SCRIPTED), concurrency=4)
    assert not report.faults, str(report)
    assert report.statuses[200] > NUM_SCRIPTED // 10
    assert report.statuses[400] > NUM_SCRIPTED // 10


@pytest.mark.anyio
async def test_a_real_server_survives_and_keeps_no_blocks(real_server):
    """Blocks that stay with a request which was refused late, cut short or deserted; an engine that a request ends."""
    async with httpx.AsyncClient(base_url=real_server.url) as http:
        baseline = await kv_usage(http)
        report = await barrage(http, shots(1, NUM_REAL))
        faults = report.faults + await aftermath(http, baseline=baseline)
    assert not faults, str(report)


def test_every_endpoint_is_fired_at_and_a_shot_can_be_repeated():
    """A generator that grew a blind spot, or a report that names requests which nobody can make again."""
    assert {s.path for s in shots(0, NUM_SCRIPTED)} >= set(POSTS)
    assert list(shots(7, 20))[13] == shot(7, 13)


ERROR = {"message": "m", "type": "t", "param": None, "code": None}


@pytest.mark.parametrize(
    ("status", "body", "complains"),
    [
        (500, {"error": ERROR}, True),
        (302, {}, True),
        (400, {"error": ERROR}, False),
        (400, {"detail": "no"}, True),
        (400, {"error": {**ERROR, "message": ""}}, True),
        (400, {"error": {**ERROR, "param": ["body", "n"]}}, True),
        (429, {"error": ERROR}, True),
        (200, {"logprob": float("nan")}, True),
        (200, {"ok": 1}, False),
    ],
)
def test_the_fuzzer_can_tell_right_from_wrong(status, body, complains):
    """A checker that believes everything."""
    response = httpx.Response(status, headers={"content-type": "application/json"})
    assert bool(complaint_about(Shot("POST", "/tokenize"), response, json.dumps(body).encode())) is complains


@pytest.mark.parametrize(
    ("path", "body", "complains"),
    [
        ("/v1/completions", b'data: {"a": 1}\n\ndata: [DONE]\n\n', False),
        ("/v1/completions", b'data: {"a": 1}\n\n', True),
        ("/v1/completions", b'data: {"a": \n\ndata: [DONE]\n\n', True),
        ("/v1/completions", b'data: {"error": {"message": "m"}}\n\ndata: [DONE]\n\n', True),
        ("/v1/messages", b'event: message_stop\ndata: {"type": "message_stop"}\n\n', False),
        ("/v1/messages", b'event: message_start\ndata: {"type": "message_start"}\n\n', True),
    ],
)
def test_the_fuzzer_reads_streams(path, body, complains):
    """Streams that break off, or that end in an error which nobody looks at."""
    response = httpx.Response(200, headers={"content-type": "text/event-stream"})
    assert bool(complaint_about(Shot("POST", path), response, body)) is complains
