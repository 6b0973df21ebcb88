"""Targets C1 to C6 on this machine, each with its verdict, and where the time of a step goes. Takes a few minutes.

python -m benchmarks.cpu_targets [--json FILE]
"""

import dataclasses
import subprocess
import sys

import msgspec
from rich.console import Console

from benchmarks.cpu_targets.engine import FORWARD
from benchmarks.cpu_targets.measure import OUTPUT_LEN, PREFILL_LEN, PROMPT_LEN, REPEATS, Measured
from benchmarks.cpu_targets.verdicts import verdicts
from server.bench.arguments import Parser, output_file
from server.bench.ceilings import ceiling_rows
from server.bench.report import Report, environment
from server.config import engine_environment

LIMIT_S = 900.0


def measure_in_child() -> Measured:
    """From a process with the environment of an engine. Raises CalledProcessError, TimeoutExpired."""
    command = [sys.executable, "-m", "benchmarks.cpu_targets.measure"]
    run = subprocess.run(command, stdout=subprocess.PIPE, timeout=LIMIT_S, check=True, env=engine_environment(None))
    return msgspec.json.decode(run.stdout, type=Measured)


def part_rows(measured: Measured) -> list[list[str]]:
    """Microseconds of a step's parts, the longest first: a column for each format and batch size."""
    timings = [timing for sizes in measured.decode.values() for timing in sizes.values()]
    names = {
        name: max(timing.parts.get(name, 0.0) for timing in timings) for timing in timings for name in timing.parts
    }
    ordered = sorted(names, key=lambda name: -names[name])
    rows = [[name, *(f"{timing.parts.get(name, 0.0) * 1e6:,.0f}" for timing in timings)] for name in ordered]
    others = [sum(seconds for name, seconds in timing.parts.items() if name != FORWARD) for timing in timings]
    rows.append([f"all but the {FORWARD}", *(f"{seconds * 1e6:,.0f}" for seconds in others)])
    rows.append(["step", *(f"{timing.seconds * 1e6:,.0f}" for timing in timings)])
    return rows


def main(argv: list[str] | None = None) -> int:
    """0; 1 where the measurement fails."""
    parser = Parser(prog="python -m benchmarks.cpu_targets", description=__doc__)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the whole result")
    args = parser.parse_args(argv)
    report = Report(title="CPU targets", environment=environment())
    try:
        measured = measure_in_child()
    except (subprocess.SubprocessError, OSError) as error:
        Console(stderr=True).print(f"the measurement failed: {error}", markup=False)
        return 1
    found = list(verdicts(measured))
    report.ceilings = msgspec.to_builtins(measured.ceilings)
    report.config = {"repeats": REPEATS, "prompt": PROMPT_LEN, "output": OUTPUT_LEN, "prefill": PREFILL_LEN}
    report.metrics = {"targets": [dataclasses.asdict(one) | {"holds": one.holds} for one in found]}
    report.raw = msgspec.to_builtins(measured)
    report.show_table(
        ["ceiling", "value", "unit"], ceiling_rows(measured.ceilings), title="Ceilings, medians of the run"
    )
    columns = [f"{kind}, {size}" for kind, sizes in measured.decode.items() for size in sizes]
    report.show_table(["microseconds", *columns], part_rows(measured), title="A decode step, by format and batch size")
    report.show_table(["id", "what", "target", "measured", ""], [one.cells() for one in found])
    report.show_environment()
    if args.json:
        report.write_json(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
