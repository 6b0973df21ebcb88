"""Two results of the same benchmark side by side: each figure, before and after, and their ratio.

python benchmarks/compare.py before.json after.json [--only output_tokens_per_s]
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from server.bench.arguments import Parser

MUST_MATCH = ("cpu", "cores", "python")
CEILING_DRIFT = 0.1


def figures(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number below `value`, by its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from figures(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def warnings(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Why these two may not be comparable."""
    found = [
        f"{key} differs: {before['environment'].get(key)} and {after['environment'].get(key)}"
        for key in MUST_MATCH
        if before["environment"].get(key) != after["environment"].get(key)
    ]
    if before["config"] != after["config"]:
        keys = {k for k in before["config"] | after["config"] if before["config"].get(k) != after["config"].get(k)}
        found.append(f"configurations differ in {', '.join(sorted(keys))}")
    ceilings = dict(figures(before.get("ceilings") or {})), dict(figures(after.get("ceilings") or {}))
    for name in sorted(ceilings[0].keys() & ceilings[1].keys()):
        ratio = ceilings[1][name] / ceilings[0][name] if ceilings[0][name] else 1.0
        if abs(ratio - 1) > CEILING_DRIFT:
            found.append(f"the machine itself changed: {name} is now {ratio:.2f} x")
    return found


def result(text: str) -> dict[str, Any]:
    """A benchmark's JSON file."""
    try:
        content = json.loads(Path(text).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} can't be read as JSON: {error}") from None
    if not isinstance(content, dict) or not {"title", "environment", "config", "metrics"} <= content.keys():
        raise argparse.ArgumentTypeError(f"{text!r} is no benchmark's result; write one with --json")
    return content


def main(argv: list[str] | None = None) -> int:
    """0; 2 where the files are no results of one benchmark."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=result)
    parser.add_argument("after", type=result)
    parser.add_argument("--only", default="", metavar="TEXT", help="figures whose path contains this")
    args = parser.parse_args(argv)
    before, after = args.before, args.after
    console = Console(width=None if sys.stdout.isatty() else 160)
    if before["title"] != after["title"]:
        console.print(f"These are results of different benchmarks: {before['title']!r} and {after['title']!r}")
        return 2
    table = Table("figure", *(f"{r['environment']['commit'] or '?'}" for r in (before, after)), "ratio")
    old, new = dict(figures(before["metrics"])), dict(figures(after["metrics"]))
    for name in [name for name in old if name in new and args.only in name]:
        ratio = f"{new[name] / old[name]:.3f}" if old[name] else "-"
        table.add_row(name, f"{old[name]:.4g}", f"{new[name]:.4g}", ratio)
    console.print(table)
    for warning in warnings(before, after):
        console.print(f"Careful: {warning}", style="yellow")
    return 0


if __name__ == "__main__":
    sys.exit(main())
