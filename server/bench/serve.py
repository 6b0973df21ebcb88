"""`pageturner bench serve`: load on any OpenAI-compatible server, closed loop or Poisson, and what came of it."""

import argparse
import functools
import json
import sys
import time
from typing import Any

import msgspec
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from server.bench import load
from server.bench.arguments import Parser, connections_left, limits, output_file, real, several, whole, word
from server.bench.ceilings import ceiling_rows, measure_in_child
from server.bench.client import Call, Pool, Target, parse_target
from server.bench.report import Report, environment

LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})
MAX_WORDS = 1_000_000
DAY_S = 86_400
_LATENCIES = ("TTFT p50", "p99", "TPOT p50", "p99", "ITL p50", "p99", "E2EL p50", "p99")
COLUMNS = ["load", "requests", "failed", "out tok/s", "req/s", *_LATENCIES, "goodput", "client CPU"]


def url(text: str) -> str:
    """A server's address as it was given, once it is known to be one."""
    try:
        parse_target(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def build_parser() -> Parser:
    parser = Parser(prog="pageturner bench serve", description="Measure an OpenAI-compatible server.")
    add, load_kind = parser.add_argument, parser.add_mutually_exclusive_group()
    add("--url", type=url, default="http://127.0.0.1:8000", help="the server, with or without /v1 [%(default)s]")
    add("--api-key", type=word, metavar="KEY", help="sent as a bearer token")
    add("--model", help="name in the requests; default: the first of /v1/models")
    add("--endpoint", choices=("completions", "chat"), default="completions", help="[%(default)s]")
    clients = several(whole(1, connections_left()))
    load_kind.add_argument(
        "--clients", type=clients, default=[1, 8, 32], help="closed loop: so many users each time [1,8,32]"
    )
    load_kind.add_argument(
        "--rate", type=several(real(0.001, 100_000)), help="Poisson arrivals instead: requests a second, each in turn"
    )
    add("--requests", type=whole(1), help="requests a level; default: 8 and 4 for each client")
    add("--warmup", type=whole(0), default=2, help="requests before the first level that don't count [%(default)s]")
    add("--prompt-words", type=whole(1, MAX_WORDS), default=128, help="random words a prompt [%(default)s]")
    add("--shared-words", type=whole(0, MAX_WORDS), default=0, help="of them, the same in every prompt [%(default)s]")
    add("--max-tokens", type=whole(1), default=64, help="tokens an answer [%(default)s]")
    add("--temperature", type=real(0), default=0.0, help="[%(default)s]")
    add("--plain", action="store_true", help="send no extension of OpenAI's fields; answers may then end early")
    goodput = limits(("ttft", "tpot", "e2el"))
    add("--goodput", type=goodput, default={}, metavar="ttft=MS,tpot=MS", help="count requests that met these limits")
    add("--timeout", type=real(0.001, DAY_S), default=600.0, help="seconds a request may take [%(default)s]")
    add("--seed", default="0", help="of prompts and arrivals [%(default)s]")
    add("--no-ceilings", action="store_true", help="don't measure the machine first")
    add("--json", type=output_file, metavar="FILE", help="write the whole result")
    return parser


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Exits with status 2 where a value, or two together, make no sense."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.shared_words > args.prompt_words:
        parser.error(f"--shared-words {args.shared_words}: a prompt has only {args.prompt_words}; raise --prompt-words")
    busiest = int(max(args.clients))
    if args.requests and not args.rate and args.requests < busiest:
        parser.error(f"--requests {args.requests} can't keep {busiest} clients busy; give at least {busiest}")
    if args.model is not None and not args.model.strip():
        parser.error("--model is empty; leave it out for the first that the server names")
    return args


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


async def first_model(target: Target) -> str:
    """Raises OSError where the server can't be reached or names no model."""
    pool = Pool(target)
    try:
        answer = await pool.get("/v1/models")
        return str(json.loads(answer)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise OSError("/v1/models names no model; is this an OpenAI-compatible server? Else give --model") from None
    finally:
        pool.close()


async def measure(args: argparse.Namespace, model: str, report: Report, progress: Progress) -> None:
    """Fills the report."""
    pool = Pool(parse_target(args.url, args.api_key))
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
    args = parse(argv)
    errors = Console(stderr=True)
    target = parse_target(args.url, args.api_key)
    report = Report(title="Serving (latencies in ms)", environment=environment())
    try:
        model = args.model or uvloop.run(first_model(target))
    except OSError as error:
        errors.print(f"{args.url}: {error}", markup=False)
        return 1
    if not args.no_ceilings and target.host in LOCAL:
        ceilings = measure_in_child()
        report.ceilings = msgspec.to_builtins(ceilings)
        report.show_table(["ceiling", "value", "unit"], ceiling_rows(ceilings), title="Ceilings of this machine")
    columns = [TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, TextColumn("{task.fields[speed]}"), console=errors) as progress:
        uvloop.run(measure(args, model, report, progress))
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
