"""Serving targets S1 to S7 on servers that this script starts itself, with the default model.

python -m benchmarks.scenarios [--only S2] [--json FILE]
"""

import asyncio
import dataclasses
import sys

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.scenarios.serving import SCENARIOS, Outcome
from server.bench.arguments import Parser, output_file
from server.bench.ceilings import measure_in_child
from server.bench.report import Report, environment


def main() -> int:
    parser = Parser(prog="python -m benchmarks.scenarios", description=__doc__)
    parser.add_argument("--only", choices=[f"S{i}" for i in range(1, 8)], default="", help="one of the targets")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the whole result")
    args = parser.parse_args()
    report = Report(title="Serving targets", environment=environment())
    report.ceilings = msgspec.to_builtins(measure_in_child())
    chosen = {name: run for name, run in SCENARIOS.items() if args.only in name}
    outcomes: list[Outcome] = []
    columns = (TextColumn("{task.description:>12}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(chosen))
        for name, run in chosen.items():
            progress.update(task, description=name)
            outcomes += asyncio.run(run())
            progress.advance(task)
    rows = [[o.target_id, o.claim, o.ours, o.target, "holds" if o.holds else "MISSED"] for o in outcomes]
    report.show_table(["id", "claim", "ours", "target", "verdict"], rows)
    report.show_environment()
    report.metrics = {outcome.target_id: outcome.value for outcome in outcomes}
    report.raw = [dataclasses.asdict(outcome) for outcome in outcomes]
    if args.json:
        report.write_json(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
