"""`pageturner bench kv-cache`: what a KV cache saves in time, what it takes in memory, what paging it costs and saves.

The first part runs the model, with and without the cache. Durations of the bookkeeping are also given as multiples of
one turn of a fixed Python loop, so that machines compare.
"""

import argparse
import itertools
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from paging import blocks_needed
from server.bench.arguments import Parser, output_file, output_folder, whole
from server.bench.ceilings import python_loop_ns
from server.bench.kv_costs import COSTS
from server.bench.kv_lesson import PROMPT_LEN, Lesson, lengths_up_to, total_without, typical
from server.bench.plot import Points, line_chart
from server.bench.report import Report, environment
from server.errors import StartupError
from server.models.registry import read_spec
from server.plan import kv_bytes_per_token
from server.weights.locate import locate

CHAT_LENGTHS = (5.0, 1.0)
"""Mean and spread of the logarithm of a chat-like length, of prompt and answer each: median 148 tokens, mean 245."""
RESERVED = 2048
"""The context that a server without paging sets aside for each request; longer ones are cut."""
CONTEXTS = (1024, 1025, 4096, 32768)
BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
DTYPES = ("auto", "float32", "bfloat16", "float16")
MIB = 1 << 20


def chat_moments(num_requests: int, seed: int) -> Iterator[int]:
    """How many tokens a request holds, seen at a random moment while its answer grows."""
    lengths = random.Random(seed)
    for _ in range(num_requests):
        prompt = min(RESERVED // 2, max(1, round(lengths.lognormvariate(*CHAT_LENGTHS))))
        answer = min(RESERVED - prompt, max(1, round(lengths.lognormvariate(*CHAT_LENGTHS))))
        yield lengths.randint(prompt, prompt + answer)


def wasted_share(block_size: int, *, num_requests: int = 20_000, seed: int = 0) -> float:
    """(allocated - filled) / allocated KV slots. block_size RESERVED: each request's context reserved in advance."""
    filled = list(chat_moments(num_requests, seed))
    allocated = sum(blocks_needed(moment, block_size) * block_size for moment in filled)
    return 1 - sum(filled) / allocated


def show_lesson(report: Report, args: argparse.Namespace) -> None:
    """Runs the model. Raises StartupError."""
    lesson = Lesson(args.model, dtype=args.dtype, longest=args.tokens)
    with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        lengths = progress.track(lengths_up_to(args.tokens), description="without a cache")
        without = [(length, lesson.without_cache(length)) for length in lengths]
    cached = lesson.with_cache()
    totals = list(itertools.accumulate(cached))
    rows = []
    for length, seconds in without:
        here = typical(cached, length - PROMPT_LEN)
        total = total_without(without, length)
        with_total = totals[min(length - PROMPT_LEN, len(totals) - 1)]
        rows.append(
            [f"{length:,}", f"{here * 1e3:.1f}", f"{seconds * 1e3:.1f}", f"{seconds / here:.1f} x"]
            + ([f"{with_total:.1f}", f"{total:.1f}", f"{total / with_total:.1f} x"] if total else ["-"] * 3)
        )
    columns = ["context", "next token, ms", "without", "", "so far, s", "without", ""]
    report.show_table(columns, rows, title="The next token, and the answer so far, with a KV cache and without")
    report.raw = {"with_cache_s": cached, "without_cache_s": without}
    report.metrics["with_cache_s"] = totals[-1]
    report.metrics["without_cache_s"] = total_without(without, args.tokens)
    if args.plots:
        series = {
            "with a KV cache": [(PROMPT_LEN + i, s * 1e3) for i, s in enumerate(cached) if i % 8 == 1],
            "without": [(length, s * 1e3) for length, s in without],
        }
        write_plot(args.plots / "kv-cache-time.svg", series, "Time of the next token", "tokens so far", "ms", log=True)


def show_memory(report: Report, model: str) -> None:
    """KV memory of one request, by context and block size. Raises StartupError."""
    per_token = kv_bytes_per_token(read_spec(locate(model)), "auto")
    sizes = (16, 128)
    rows = [
        [f"{length:,}"] + [f"{blocks_needed(length, size) * size * per_token / MIB:,.1f}" for size in sizes]
        for length in CONTEXTS
    ]
    columns = ["context", *(f"MiB, blocks of {size}" for size in sizes)]
    report.show_table(columns, rows, title=f"KV memory of one request, {per_token / 1024:.1f} KiB a token in 16 bits")
    report.metrics["kv_bytes_per_token"] = per_token


def show_waste(report: Report, plots: Path | None) -> None:
    waste = {size: wasted_share(size) for size in (*BLOCK_SIZES, RESERVED)}
    names = {RESERVED: f"none: {RESERVED:,} reserved"}
    rows = [[names.get(size, str(size)), f"{share:.1%}"] for size, share in waste.items()]
    report.show_table(["block size", "waste"], rows, title="KV memory that holds nothing, chat-like lengths")
    report.metrics["waste_by_block_size"] = {str(size): share for size, share in waste.items()}
    if plots:
        series = {"waste": [(size, share * 100) for size, share in waste.items()]}
        write_plot(plots / "kv-cache-waste.svg", series, "KV memory that holds nothing", "block size", "%", log=False)


def show_costs(report: Report, loop_ns: float) -> None:
    costs = {name: function() for name, function in COSTS}
    rows = [[name, f"{ns:.0f}", f"{ns / loop_ns:.1f}"] for name, ns in costs.items()]
    report.show_table(["operation", "ns a block", "loop turns"], rows, title="What the bookkeeping costs")
    report.metrics["ns_per_block"] = costs


def write_plot(path: Path, series: Mapping[str, Points], title: str, x_label: str, y_label: str, *, log: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line_chart(series, title=title, x_label=x_label, y_label=y_label, log_x=True, log_y=log))


def main(argv: list[str] | None = None) -> int:
    """0, or 2 where the model can't be loaded."""
    parser = Parser(prog="pageturner bench kv-cache", description=__doc__)
    add = parser.add_argument
    add("--model", default="", help="as for serve [the embedded default]")
    add("--dtype", choices=DTYPES, default="auto", help="of the run with the model [%(default)s]")
    add("--tokens", type=whole(PROMPT_LEN + 1), default=1024, help="how long the answer grows [%(default)s]")
    add("--no-model", action="store_true", help="only what needs no run of the model")
    add("--plots", type=output_folder, metavar="FOLDER", help="write the curves as SVG")
    add("--json", type=output_file, metavar="FILE", help="write the whole result")
    args = parser.parse_args(argv)
    loop_ns = python_loop_ns()
    report = Report(title="KV cache", environment=environment(), ceilings={"python_loop_ns": loop_ns})
    report.config = {"model": args.model, "dtype": args.dtype, "tokens": args.tokens}
    try:
        positions = read_spec(locate(args.model)).max_position
        if args.tokens >= positions:
            parser.error(f"--tokens {args.tokens}: the model has {positions} positions; give at most {positions - 1}")
        if not args.no_model:
            show_lesson(report, args)
        show_memory(report, args.model)
    except StartupError as error:
        Console(stderr=True).print(str(error), markup=False)
        return 2
    show_waste(report, args.plots)
    show_costs(report, loop_ns)
    report.show_environment()
    if args.json:
        report.write_json(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
