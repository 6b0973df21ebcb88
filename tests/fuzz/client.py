"""A fuzzing client: `python -m tests.fuzz.client --requests 10000 --url http://127.0.0.1:8000`.

Sends seeded random requests and believes only answers of the contract: 2xx, 4xx or 503, an error body with each
refusal, streams that end as they should. Afterwards a normal request must work and no KV block may be left in use.
"""

import argparse
import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import httpx

from tests.fuzz.shots import Shot, shots

CONCURRENCY = 16
PATIENCE_S = 120.0
_ENDS = {"/v1/responses": "response.", "/v1/messages": "message_stop"}
_SERVER_BUGS = ("internal_error", "engine_error")


@dataclass
class Report:
    statuses: Counter[int | str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{status}: {count}" for status, count in sorted(self.statuses.items(), key=str))
        return "\n".join([f"{sum(self.statuses.values())} requests; {counts}; {len(self.faults)} faults", *self.faults])


async def barrage(http: httpx.AsyncClient, rounds: Iterable[Shot], *, concurrency: int = CONCURRENCY) -> Report:
    """Fires them all, `concurrency` at a time. Raises nothing: what goes wrong is in the report."""
    report = Report()
    queue = iter(rounds)

    async def gunner() -> None:
        for shot in queue:
            await _fire(http, shot, report)

    await asyncio.gather(*(gunner() for _ in range(concurrency)))
    return report


async def _fire(http: httpx.AsyncClient, shot: Shot, report: Report) -> None:
    headers = [(name.encode(), value.encode("latin-1")) for name, value in shot.headers.items()]
    try:
        async with http.stream(
            shot.method, shot.path, content=shot.body, headers=headers, timeout=PATIENCE_S
        ) as response:
            if shot.hang_up:
                async for _ in response.aiter_raw():
                    break
                report.statuses["hung up"] += 1
                return
            body = await response.aread()
    except (httpx.HTTPError, OSError) as error:
        report.statuses["no answer"] += 1
        report.faults.append(f"{type(error).__name__} {error}: {shot}")
        return
    report.statuses[response.status_code] += 1
    if complaint := complaint_about(shot, response, body):
        report.faults.append(f"{response.status_code} {complaint}: {shot} -> {body[-600:]!r}")


def complaint_about(shot: Shot, response: httpx.Response, body: bytes) -> str | None:
    """What is wrong with this answer; None: nothing."""
    status = response.status_code
    if not (200 <= status < 300 or 400 <= status < 500 or status == 503):
        return "wrong status"
    if status >= 400:
        return None if shot.method == "HEAD" else _complaint_about_error(body, status, response.headers)
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        return _complaint_about_stream(shot, body)
    if response.headers.get("content-type") == "application/json" and shot.method != "HEAD":
        try:
            _strict_json(body)
        except ValueError as error:
            return f"no JSON ({error})"
    return None


def _complaint_about_error(body: bytes, status: int, headers: httpx.Headers) -> str | None:
    if status in (429, 503) and "retry-after" not in headers:
        return "no Retry-After"
    try:
        parsed = _strict_json(body)
    except ValueError as error:
        return f"error is no JSON ({error})"
    if status == 503 and isinstance(parsed, dict) and "phase" in parsed:
        return None  # a probe's own answer
    return _complaint_about_error_object(parsed.get("error") if isinstance(parsed, dict) else None)


def _complaint_about_error_object(error: object) -> str | None:
    if not isinstance(error, dict) or {"message", "type", "param", "code"} - error.keys():
        return "no error body"
    if not isinstance(error["message"], str) or not error["message"] or not isinstance(error["type"], str):
        return "error without message or type"
    if not isinstance(error["param"], str | None) or not isinstance(error["code"], str | None):
        return "error with a strange param or code"
    return "the server's own bug" if error["code"] in _SERVER_BUGS else None


def _complaint_about_stream(shot: Shot, body: bytes) -> str | None:
    path = shot.path
    try:
        text = body.decode()
        data = [m.removeprefix("data: ") for m in re.findall(r"^data: .*$", text, flags=re.MULTILINE)]
        ends_with_done = bool(data) and data[-1] == "[DONE]"
        events = [_strict_json(item.encode()) for item in (data[:-1] if ends_with_done else data)]
    except ValueError as error:
        return f"stream with broken data ({error})"
    errors = [event["error"] for event in events if isinstance(event, dict) and event.get("error")]
    if complaint := next(filter(None, map(_complaint_about_error_object, errors)), None):
        return f"in the stream: {complaint}"
    if path not in _ENDS:
        return None if ends_with_done else "stream without [DONE]"
    last = events[-1].get("type", "") if events else ""
    return None if errors or last.startswith(_ENDS[path]) else f"stream that ends with {last!r}"


def _strict_json(body: bytes) -> object:
    def refuse(literal: str) -> None:
        raise ValueError(f"{literal} is no JSON")

    return json.loads(body, parse_constant=refuse)


async def aftermath(http: httpx.AsyncClient, *, baseline: float) -> list[str]:
    """What the server is left with: whether it still serves, and whether every block came back. Faults, in words."""
    faults = []
    body = {"prompt": "One, two, three,", "max_tokens": 4}
    response = await http.post("/v1/completions", json=body, timeout=PATIENCE_S)
    if response.status_code != 200:
        faults.append(f"a normal request afterwards gets {response.status_code}: {response.text[:300]}")
    usage = await kv_usage(http)
    for _ in range(100):
        if usage <= baseline:
            break
        await asyncio.sleep(0.1)
        usage = await kv_usage(http)
    else:
        faults.append(f"KV usage is {usage}, it was {baseline}")
    return faults


async def kv_usage(http: httpx.AsyncClient) -> float:
    """Share of the KV blocks that requests hold, 0 to 1."""
    text = (await http.get("/metrics", timeout=PATIENCE_S)).text
    found = re.search(r"^\w+[:_]kv_cache_usage_perc\S* (\S+)$", text, flags=re.MULTILINE)
    assert found is not None, "no KV usage in /metrics"
    return float(found[1])


async def _main(url: str, requests: int, seed: int, key: str | None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=4 * CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits) as http:
        baseline = await kv_usage(http)
        report = await barrage(http, shots(seed, requests))
        report.faults += await aftermath(http, baseline=baseline)
    print(report)
    return 1 if report.faults else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--key")
    arguments = parser.parse_args()
    return asyncio.run(_main(arguments.url, arguments.requests, arguments.seed, arguments.key))


if __name__ == "__main__":
    sys.exit(main())
