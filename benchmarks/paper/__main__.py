"""Published claims, checked on our own scheduler: claim, theirs, ours, verdict.

python -m benchmarks.paper [--json FILE]
"""

import dataclasses
import sys

from rich.console import Console
from rich.progress import track

from benchmarks.paper.claims import CLAIMS
from server.bench.arguments import Parser, output_file
from server.bench.report import Report, environment

VERDICTS = {True: "holds", False: "MISSED"}


def main() -> int:
    parser = Parser(prog="python -m benchmarks.paper", description=__doc__)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the whole result")
    args = parser.parse_args()
    verdicts = [claim() for claim in track(CLAIMS, "claims", console=Console(stderr=True))]
    report = Report(title="Published claims on our own scheduler, simulated", environment=environment())
    rows = [[v.claim, v.theirs, v.ours, v.target or "-", VERDICTS[v.holds] if v.target else "-"] for v in verdicts]
    report.show_table(["claim", "theirs", "ours", "target", "verdict"], rows)
    report.show_environment()
    report.metrics = {v.claim: v.value for v in verdicts}
    report.raw = [dataclasses.asdict(v) for v in verdicts]
    if args.json:
        report.write_json(args.json)
    return 0 if all(v.holds for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
