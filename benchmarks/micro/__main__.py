"""The host side in figures: targets H1 to H6.

python -m benchmarks.micro [--json FILE]
"""

import sys

from rich.console import Console
from rich.progress import Progress

from benchmarks.micro.host import GROUPS, REFERENCE_LOOP_NS, Figure
from server.bench.arguments import Parser, output_file
from server.bench.ceilings import python_loop_ns
from server.bench.report import Report, environment


def main() -> int:
    parser = Parser(prog="python -m benchmarks.micro", description=__doc__)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the whole result")
    args = parser.parse_args()
    figures: list[tuple[Figure, float]] = []
    with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        for group in progress.track(GROUPS, description="host"):
            before = python_loop_ns()
            found = group()
            loop_ns = (before + python_loop_ns()) / 2
            figures += [(figure, loop_ns) for figure in found]
            progress.refresh()
    report = Report(title="Host side of a step", environment=environment())
    report.ceilings = {"python_loop_ns": [loop_ns for _, loop_ns in figures]}
    report.config = {"reference_loop_ns": REFERENCE_LOOP_NS}
    rows = []
    for figure, loop_ns in figures:
        scaled = figure.at_reference(loop_ns)
        verdict = "holds" if scaled <= figure.limit else "MISSED"
        limit = f"<= {figure.limit:g}"
        rows.append([figure.name, f"{figure.value:.3g}", figure.unit, f"{scaled:.3g}", limit, verdict])
        report.metrics[figure.name] = {"value": figure.value, "unit": figure.unit, "at_reference": scaled}
    report.show_table(["figure", "measured", "unit", "at reference speed", "target", "verdict"], rows)
    report.show_environment()
    if args.json:
        report.write_json(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
