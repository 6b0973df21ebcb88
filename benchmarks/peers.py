"""Our server and others on this machine in one run, measured in turn under the same closed loop.

python -m benchmarks.peers --start 'llama-server=llama-server -m FILE.gguf -c 32768 -np 32 -t 2 --port {port}' \\
    --start 'vllm=env VLLM_CPU_KVCACHE_SPACE=2 vllm serve FOLDER --max-model-len 4096 --port {port}'

Every server is started, answers a first request and then waits, idle; only one is asked at a time, and which of them
begins changes from round to round. All get the same prompts, no prompt comes twice. Medians of the rounds. The peers
live in environments of their own; a peer that runs already is given as --peer NAME=URL.
"""

import argparse
import asyncio
import contextlib
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil
import uvloop
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.launch import free_port, running
from server.bench import load
from server.bench.arguments import Parser, connections_left, output_file, several, whole
from server.bench.ceilings import measure_in_child
from server.bench.client import Pool, parse_target
from server.bench.report import Report, environment
from server.bench.serve import Level, first_model, run_level

OURS = "pageturner"
START_LIMIT_S = 600.0
REQUEST_LIMIT_S = 600.0
IDLE_SHARE, IDLE_LIMIT_S = 0.1, 30.0
"""The machine counts as idle below this share of one core; a measurement waits so long for it, then goes on."""
FIRST_ANSWER_LIMIT_S, MEMORY_LIMIT_MB, JITTER_LIMIT = 3.0, 1000.0, 3.0


@dataclass(frozen=True, slots=True)
class Server:
    """One that answers. first_answer_s: from its start; None where it ran already, and then there is no process."""

    name: str
    url: str
    model: str
    first_answer_s: float | None = None
    process: subprocess.Popen[bytes] | None = None

    def memory_mb(self) -> float | None:
        """1e6 bytes of the process and all its descendants, shared pages once."""
        if self.process is None:
            return None
        family = [psutil.Process(self.process.pid)]
        family += family[0].children(recursive=True)
        return float(sum(member.memory_full_info().pss for member in family)) / 1e6


def named(text: str) -> tuple[str, str]:
    """ "NAME=REST" -> (NAME, REST)."""
    name, _, rest = text.partition("=")
    if not name.strip() or not rest.strip() or name == OURS:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=..., and a name other than {OURS}")
    return name, rest


def named_url(text: str) -> tuple[str, str]:
    name, url = named(text)
    try:
        parse_target(url)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name, url


def named_command(text: str) -> tuple[str, str]:
    name, command = named(text)
    if "{port}" not in command:
        raise argparse.ArgumentTypeError(f"{command!r}: say {{port}} where the command takes its port")
    return name, command


async def first_answer(url: str) -> str:
    """The model's name, once one token was written. Raises OSError while the server isn't ready."""
    model = await first_model(parse_target(url))
    pool = Pool(parse_target(url))
    workload = load.Workload(prompt_words=4, max_tokens=1)
    try:
        call = await pool.post(workload.path, next(workload.bodies(model)), timeout_s=REQUEST_LIMIT_S)
    finally:
        pool.close()
    if call.error is not None:
        raise OSError(call.error)
    return model


@contextlib.contextmanager
def started(name: str, command: Sequence[str], port: int) -> Iterator[Server]:
    """Raises RuntimeError, with the end of its log, where the server doesn't come to answer."""
    begin, url = time.perf_counter(), f"http://127.0.0.1:{port}"
    with running(command) as (process, log):
        while True:
            try:
                model = uvloop.run(first_answer(url))
                break
            except OSError as error:
                if process.poll() is not None or time.perf_counter() - begin > START_LIMIT_S:
                    tail = log.read_text(errors="replace")[-3000:]
                    raise RuntimeError(f"{name} does not answer ({error}); its log ends:\n{tail}") from None
            time.sleep(0.05)
        yield Server(name, url, model, time.perf_counter() - begin, process)


def wait_until_idle() -> float:
    """Seconds of CPU a second, of the whole machine, when waiting ended."""
    deadline = time.monotonic() + IDLE_LIMIT_S
    while True:
        busy: float = psutil.cpu_percent(0.5) / 100 * (psutil.cpu_count() or 1)
        if busy < IDLE_SHARE or time.monotonic() > deadline:
            return busy


async def measured(server: Server, clients: int, seed: str, num_requests: int, progress: Progress) -> dict[str, Any]:
    """The figures of one level. Raises RuntimeError where a request failed: a rate over failures says nothing."""
    pool = Pool(parse_target(server.url))
    try:
        calls, client_cpu = await run_level(
            pool,
            Level(f"{server.name}, {clients} clients", clients, None),
            load.Workload(seed=seed),
            model=server.model,
            num_requests=num_requests,
            timeout_s=REQUEST_LIMIT_S,
            progress=progress,
        )
    finally:
        pool.close()
        progress.remove_task(progress.task_ids[-1])
    figures = load.summarize(calls, {}) | {"client_cpu": client_cpu}
    if figures["failed"]:
        raise RuntimeError(f"{server.name}: {figures['failed']} requests failed: {figures['failures']}")
    return figures


def run_rounds(servers: Sequence[Server], args: argparse.Namespace, progress: Progress) -> list[dict[str, Any]]:
    """One entry a server, level and round, in the order of measurement."""
    found = []
    for round_ in range(args.rounds):
        for clients in map(int, args.clients):
            for i in range(len(servers)):
                server = servers[(i + round_) % len(servers)]
                busy = wait_until_idle()
                num_requests = 8 + args.requests_per_client * clients
                seed = f"{round_}.{clients}"
                figures = asyncio.run(measured(server, clients, seed, num_requests, progress))
                found.append(
                    {"server": server.name, "clients": clients, "round": round_, "busy_before": busy} | figures
                )
    return found


# -------------------------------------------------------------------------------------------------------------- figures

Rates = Mapping[str, Mapping[int, float]]
"""Tokens a second by server and number of clients."""


def medians(entries: Sequence[dict[str, Any]], *path: str) -> dict[str, dict[int, float]]:
    """The median over the rounds of one figure, by server and number of clients."""
    values: dict[str, dict[int, list[float]]] = {}
    for entry in entries:
        value: Any = entry
        for key in path:
            value = value[key]
        values.setdefault(entry["server"], {}).setdefault(entry["clients"], []).append(value)
    return {name: {n: statistics.median(v) for n, v in levels.items()} for name, levels in values.items()}


def ratio_targets(rates: Rates) -> list[list[str]]:
    """Rows (what, target, measured, verdict). For one client against llama-server where it is among the peers."""
    rows = []
    peers = [name for name in rates if name != OURS]
    for clients in rates[OURS] if peers else ():
        llama = [name for name in peers if name.startswith("llama")]
        rivals, least = (llama or peers, 1.5) if clients == 1 else (peers, 2.0)
        best = max(rivals, key=lambda name: rates[name][clients])
        ratio = rates[OURS][clients] / rates[best][clients]
        what = f"tok/s, {clients} clients, of {best}'s"
        rows.append([what, f">= {least} x", f"{ratio:.2f} x", "holds" if ratio >= least else "MISSED"])
    return rows


def own_targets(
    server: Server, memory_mb: float, p50: Mapping[int, float], p99: Mapping[int, float]
) -> list[list[str]]:
    """Rows like ratio_targets', of what isn't measured against others. p50, p99: milliseconds between tokens."""
    found = [("first answer after the start", server.first_answer_s or 0.0, FIRST_ANSWER_LIMIT_S, "s")]
    found.append(("memory after the load", memory_mb, MEMORY_LIMIT_MB, "MB"))
    found += [(f"ITL p99 / p50, {n} clients", p99[n] / p50[n], JITTER_LIMIT, "x") for n in p50]
    return [
        [what, f"<= {limit:g} {unit}", f"{value:,.2f} {unit}", "holds" if value <= limit else "MISSED"]
        for what, value, limit, unit in found
    ]


def table_rows(entries: Sequence[dict[str, Any]]) -> list[list[str]]:
    rates = medians(entries, "output_tokens_per_s")
    latencies = [medians(entries, *p) for p in (("ttft_ms", "p50"), ("itl_ms", "p50"), ("itl_ms", "p99"))]
    rows = []
    for clients in rates[OURS]:
        for name in rates:
            seen = [e["output_tokens_per_s"] for e in entries if (e["server"], e["clients"]) == (name, clients)]
            row = [str(clients), name, f"{rates[name][clients]:.1f}", f"{min(seen):.0f} - {max(seen):.0f}"]
            row += [f"{rates[OURS][clients] / rates[name][clients]:.2f} x"]
            rows.append(row + [f"{figure[name][clients]:.1f}" for figure in latencies])
    return rows


# ------------------------------------------------------------------------------------------------------------- the run


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--start", type=named_command, action="append", default=[], metavar="NAME=COMMAND", help="a peer to start")
    add("--peer", type=named_url, action="append", default=[], metavar="NAME=URL", help="a peer that runs already")
    add("--ours", default="", metavar="FLAGS", help="more flags of `pageturner serve`")
    add("--clients", type=several(whole(1, connections_left())), default=[1, 8, 32], help="[1,8,32]")
    add("--rounds", type=whole(1), default=3, help="[%(default)s]")
    add("--requests-per-client", type=whole(1), default=2, help="a level; 8 come on top [%(default)s]")
    add("--json", type=output_file, metavar="FILE", help="write the whole result")
    args = parser.parse_args(argv)
    names = [name for name, _ in args.start + args.peer]
    if len(set(names)) < len(names):
        parser.error("two peers have one name; give each its own")
    return args


def show(report: Report, servers: Sequence[Server], entries: Sequence[dict[str, Any]]) -> None:
    columns = ["clients", "server", "tok/s", "rounds", "ours / theirs", "TTFT p50", "ITL p50", "ITL p99"]
    report.show_table(columns, table_rows(entries), title="Closed loop, 128 words in, 64 tokens out; latencies in ms")
    memory = {server.name: server.memory_mb() for server in servers}
    starts = [
        [
            s.name,
            "-" if s.first_answer_s is None else f"{s.first_answer_s:.1f}",
            f"{memory[s.name] or float('nan'):,.0f}",
        ]
        for s in servers
    ]
    report.show_table(["server", "first answer, s", "memory, MB"], starts, title="Start, and memory after the load")
    itl = [medians(entries, "itl_ms", q)[OURS] for q in ("p50", "p99")]
    rates = medians(entries, "output_tokens_per_s")
    verdicts = ratio_targets(rates) + own_targets(servers[0], memory[OURS] or 0.0, itl[0], itl[1])
    report.show_table(["what", "target", "measured", ""], verdicts, title="Targets")
    report.metrics = {
        "tok_s": rates,
        "ttft_p50_ms": medians(entries, "ttft_ms", "p50"),
        "itl_p50_ms": medians(entries, "itl_ms", "p50"),
        "itl_p99_ms": medians(entries, "itl_ms", "p99"),
        "first_answer_s": {server.name: server.first_answer_s for server in servers},
        "memory_mb": memory,
        "targets": verdicts,
    }


def main(argv: list[str] | None = None) -> int:
    """0; 1 where a server doesn't answer or a request fails."""
    args = parse(argv)
    errors = Console(stderr=True)
    report = Report(title="Servers side by side", environment=environment(), config=vars(args) | {"json": None})
    report.ceilings = msgspec.to_builtins(measure_in_child())
    progress = Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=errors)
    try:
        with contextlib.ExitStack() as stack:
            port = free_port()
            ours = [sys.executable, "-m", "server", "serve", "--port", str(port), *shlex.split(args.ours)]
            servers = [stack.enter_context(started(OURS, ours, port))]
            for name, command in args.start:
                port = free_port()
                words = [word.replace("{port}", str(port)) for word in shlex.split(command)]
                servers.append(stack.enter_context(started(name, words, port)))
            servers += [Server(name, url, uvloop.run(first_answer(url))) for name, url in args.peer]
            with progress:
                entries = run_rounds(servers, args, progress)
            report.raw = entries
            show(report, servers, entries)
    except (OSError, RuntimeError) as error:
        errors.print(str(error), markup=False)
        return 1
    report.show_environment()
    if (busy := max(entry["busy_before"] for entry in entries)) >= IDLE_SHARE:
        errors.print(f"Careful: something else ran before a measurement ({busy:.1f} cores)", style="yellow")
    if args.json:
        report.write_json(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
