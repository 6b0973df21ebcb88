"""Ours beside others: what decides which figure counts."""

import argparse
import asyncio

import pytest
from rich.progress import Progress

from benchmarks import peers
from benchmarks.peers import OURS, Server

RATES = {OURS: {1: 150.0, 8: 500.0}, "llama-server": {1: 100.0, 8: 110.0}, "other": {1: 120.0, 8: 251.0}}


def entry(server: str, clients: int, rate: float) -> dict:
    latency = {"p50": 5.0, "p99": 9.0}
    return {"server": server, "clients": clients, "output_tokens_per_s": rate, "ttft_ms": latency, "itl_ms": latency}


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (RATES, [(">= 1.5 x", "1.50 x", "holds"), (">= 2.0 x", "1.99 x", "MISSED")]),
        ({OURS: {1: 150.0}, "a": {1: 50.0}, "b": {1: 110.0}}, [(">= 1.5 x", "1.36 x", "MISSED")]),
        ({OURS: {1: 150.0}}, []),
    ],
)
def test_the_best_peer_is_the_measure(rates, expected):
    """A target held against the slowest peer; for one client it is llama-server's, where that runs."""
    assert [tuple(row[1:]) for row in peers.ratio_targets(rates)] == expected


def test_medians_not_means_and_not_bests():
    """One lucky or disturbed round decides the published ratio."""
    entries = [entry(OURS, 8, rate) for rate in (100.0, 400.0, 110.0)] + [entry("a", 8, 55.0)]
    assert peers.medians(entries, "output_tokens_per_s") == {OURS: {8: 110.0}, "a": {8: 55.0}}
    assert [row[2:5] for row in peers.table_rows(entries)] == [
        ["110.0", "100 - 400", "1.00 x"],
        ["55.0", "55 - 55", "2.00 x"],
    ]


def test_servers_take_turns_and_share_prompts(monkeypatch):
    """The server that is always first meets the coolest machine; or prompts return and the prefix cache answers."""
    asked = []

    async def measured(server, clients, seed, num_requests, progress):
        asked.append((server.name, clients, seed, num_requests))
        return {}

    monkeypatch.setattr(peers, "measured", measured)
    monkeypatch.setattr(peers, "wait_until_idle", lambda: 0.0)
    args = argparse.Namespace(rounds=2, clients=[1.0, 8.0], requests_per_client=2)
    servers = [Server(name, "http://a", "m") for name in ("x", "y")]
    entries = peers.run_rounds(servers, args, Progress(disable=True))
    assert [call[0] for call in asked] == ["x", "y", "x", "y", "y", "x", "y", "x"]
    assert len({seed for _, _, seed, _ in asked}) == 4
    assert [call[3] for call in asked[:4]] == [10, 10, 24, 24]
    assert [(e["server"], e["round"]) for e in entries[3:5]] == [("y", 0), ("y", 1)]


def test_a_failed_request_ends_the_run():
    """A ratio over a server that answers half of the requests, and those quickly."""
    server = Server("gone", "http://127.0.0.1:9", "m")
    with pytest.raises(RuntimeError, match="gone: 3 requests failed"):
        asyncio.run(peers.measured(server, 1, "0", 3, Progress(disable=True)))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--start", "a=serve --port 8000"], "{port}"),
        (["--peer", "http://127.0.0.1:8000"], "write NAME="),
        (["--peer", "a=https://b"], "want http://HOST:PORT"),
        (["--peer", f"{OURS}=http://127.0.0.1:8000"], "a name other than"),
        (["--peer", "a=http://b:1", "--start", "a=c {port}"], "one name"),
        (["--rounds", "0"], "0 is out of range"),
    ],
)
def test_nonsense_is_refused(flags, message, capsys):
    """A peer that never answers is waited for, for ten minutes, because of a typing error."""
    with pytest.raises(SystemExit) as ended:
        peers.parse(flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_server_that_does_not_come_up_is_shown():
    """The benchmark waits for a process that has ended, or hides what it said."""
    command = ["/bin/sh", "-c", "echo no such model >&2; exit 3"]
    with pytest.raises(RuntimeError, match="no such model"), peers.started("a", command, 9):
        pytest.fail("it can't have answered")
