"""`pageturner bench serve`: load on any OpenAI-compatible server, closed loop or Poisson, and what came of it."""

import argparse
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from server.bench import load
from server.bench.ceilings import ceiling_rows, measure_in_child
from server.bench.client import Call, Pool, parse_target
from server.bench.report import Report, environment

LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})
_LATENCIES = ("TTFT p50", "p99", "TPOT p50", "p99", "ITL p50", "p99", "E2EL p50", "p99")
COLUMNS = ["load", "requests", "failed", "out tok/s", "req/s", *_LATENCIES, "goodput", "client CPU"]


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def limits(text: str) -> dict[str, float]:
    """ "ttft=500,tpot=50" -> milliseconds by name."""
    pairs = dict(part.split("=", 1) for part in text.split(","))
    if unknown := set(pairs) - {"ttft", "tpot", "e2el"}:
        raise argparse.ArgumentTypeError(
            f"{', '.join(sorted(unknown))}: limits are ttft, tpot and e2el, in milliseconds"
        )
    return {name: float(value) for name, value in pairs.items()}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pageturner bench serve", description="Measure an OpenAI-compatible server.")
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server, with or without /v1 [%(default)s]")
    add("--api-key", help="sent as a bearer token")
    add("--model", help="name in the requests; default: the first of /v1/models")
    add("--endpoint", choices=("completions", "chat"), default="completions", help="[%(default)s]")
    add("--clients", type=numbers, default=[1, 8, 32], help="closed loop: so many users each time [1,8,32]")
    add("--rate", type=numbers, help="Poisson arrivals instead: requests a second, each in turn")
    add("--requests", type=int, help="requests a level; default: 8 and 4 for each client")
    add("--warmup", type=int, default=2, help="requests before the first level that don't count [%(default)s]")
    add("--prompt-words", type=int, default=128, help="random words a prompt [%(default)s]")
    add("--shared-words", type=int, default=0, help="of them, the same in every prompt [%(default)s]")
    add("--max-tokens", type=int, default=64, help="tokens an answer [%(default)s]")
    add("--temperature", type=float, default=0.0, help="[%(default)s]")
    add("--plain", action="store_true", help="send no extension of OpenAI's fields; answers may then end early")
    add("--goodput", type=limits, default={}, metavar="ttft=MS,tpot=MS", help="count requests that met these limits")
    add("--timeout", type=float, default=600.0, help="seconds a request may take [%(default)s]")
    add("--seed", default="0", help="of prompts and arrivals [%(default)s]")
    add("--no-ceilings", action="store_true", help="don't measure the machine first")
    add("--json", type=Path, metavar="FILE", help="write the whole result")
    return parser


class Level(msgspec.Struct, frozen=True):
    """One amount of load: num_clients in a closed loop, or `rate` requests a second."""

    name: str
    num_clients: int | None
    rate: float | None

    @property
    def default_requests(self) -> int:
        return 8 + 4 * (self.num_clients or round(8 * (self.rate or 0)))


def levels_of(args: argparse.Namespace) -> list[Level]:
    if args.rate:
        return [Level(f"{rate:g} req/s", None, rate) for rate in args.rate]
    return [Level(f"{clients:g} clients", int(clients), None) for clients in args.clients]


async def run_level(
    pool: Pool,
    level: Level,
    workload: load.Workload,
    *,
    model: str,
    num_requests: int,
    timeout_s: float,
    progress: Progress,
) -> tuple[list[Call], float]:
    """(calls, share of one core that this client itself took)."""
    task = progress.add_task(level.name, total=num_requests, speed="")
    begin, cpu, num_tokens = time.perf_counter(), time.process_time(), 0

    def on_done(call: Call) -> None:
        nonlocal num_tokens
        num_tokens += call.output_tokens
        progress.update(task, advance=1, speed=f"{num_tokens / (time.perf_counter() - begin):.0f} tok/s")

    calls = await load.run(
        pool,
        workload,
        model=model,
        num_requests=num_requests,
        num_clients=level.num_clients,
        rate=level.rate,
        timeout_s=timeout_s,
        on_done=on_done,
    )
    return calls, (time.process_time() - cpu) / (time.perf_counter() - begin)


async def measure(args: argparse.Namespace, report: Report, progress: Progress) -> None:
    """Fills the report. Raises OSError where the server can't be reached at all."""
    pool = Pool(parse_target(args.url, args.api_key))
    model = args.model or json.loads(await pool.get("/v1/models"))["data"][0]["id"]
    workload = load.Workload(
        endpoint=args.endpoint,
        prompt_words=args.prompt_words,
        shared_words=args.shared_words,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        extensions=not args.plain,
        seed=args.seed,
    )
    report.config = {"url": args.url, "model": model} | msgspec.to_builtins(workload) | {"limits_ms": args.goodput}
    report.raw = {}
    go = functools.partial(run_level, pool, model=model, timeout_s=args.timeout, progress=progress)
    try:
        if args.warmup:
            await go(Level("warm-up", 2, None), workload.reseeded("warm-up"), num_requests=args.warmup)
        for i, level in enumerate(levels_of(args)):
            num_requests = args.requests or level.default_requests
            calls, client_cpu = await go(level, workload.reseeded(str(i)), num_requests=num_requests)
            report.metrics[level.name] = load.summarize(calls, args.goodput) | {"client_cpu": client_cpu}
            report.raw[level.name] = msgspec.to_builtins(calls)
    finally:
        pool.close()


def table_rows(metrics: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, level in metrics.items():
        row = [name, str(level["completed"] + level["failed"]), str(level["failed"])]
        row += [f"{level['output_tokens_per_s']:.1f}", f"{level['requests_per_s']:.2f}"]
        for latency in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
            row += [f"{level[latency][q]:.1f}" for q in ("p50", "p99")]
        row += [
            "-" if level["goodput_per_s"] is None else f"{level['goodput_per_s']:.2f}",
            f"{level['client_cpu']:.0%}",
        ]
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    """0, or 1 where a request failed or the server can't be reached."""
    args = build_parser().parse_args(argv)
    errors = Console(stderr=True)
    report = Report(title="Serving (latencies in ms)", environment=environment())
    if not args.no_ceilings and parse_target(args.url).host in LOCAL:
        ceilings = measure_in_child()
        report.ceilings = msgspec.to_builtins(ceilings)
        report.show_table(["ceiling", "value", "unit"], ceiling_rows(ceilings), title="Ceilings of this machine")
    columns = [TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    try:
        with Progress(*columns, TextColumn("{task.fields[speed]}"), console=errors) as progress:
            uvloop.run(measure(args, report, progress))
    except OSError as error:
        errors.print(f"{args.url}: {error}")
        return 1
    report.show_table(COLUMNS, table_rows(report.metrics))
    report.show_environment()
    failures = {name: level["failures"] for name, level in report.metrics.items() if level["failed"]}
    for name, kinds in failures.items():
        errors.print(f"{name}: {kinds}", markup=False)
    if args.json:
        report.write_json(args.json)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
