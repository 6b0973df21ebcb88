"""The form of a benchmark's result: tables for people, {environment, ceilings, config, metrics, raw} as JSON."""

import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
BUSY_LOAD = 0.5
"""One-minute load average from which on a measurement shares the machine with somebody."""


def _first_match(path: str, key: str) -> str:
    """The value behind the first "key : value" line of a /proc file; empty where there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")


def _versions(*distributions: str) -> dict[str, str]:
    found = {}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """Short hash of the checkout's commit, with "+" where files differ from it; empty outside a checkout."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, timeout=10, check=True)
        diff = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return head.stdout.decode().strip() + ("+" if diff.returncode else "")


def environment() -> dict[str, Any]:
    """What a reader needs to judge whether two results may be compared."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _first_match("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": _first_match("/proc/meminfo", "MemTotal"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": _versions("pageturner", "torch", "triton", "numpy", "uvloop"),
        "commit": _commit(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _console() -> Console:
    """On a terminal its own width; in a file or pipe wide enough for every table."""
    return Console(width=None if sys.stdout.isatty() else 180)


@dataclass(slots=True)
class Report:
    """One benchmark run. Written by: the benchmark that owns it."""

    title: str
    environment: dict[str, Any]
    ceilings: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    raw: Any = None

    def show_table(self, columns: list[str], rows: list[list[str]], *, title: str | None = None) -> None:
        table = Table()
        for i, column in enumerate(columns):
            table.add_column(column, justify="right" if i else "left")
        for row in rows:
            table.add_row(*row)
        _console().print(title or self.title, style="bold")
        _console().print(table)

    def show_environment(self) -> None:
        """One line below the tables, and a second one where the machine wasn't ours alone."""
        where = self.environment
        _console().print(
            f"{where['cpu']}, {where['cores']} cores; commit {where['commit'] or 'unknown'}; {where['date']}"
        )
        if where["load_before"] > BUSY_LOAD:
            _console().print(f"The machine was busy before the run (load {where['load_before']}).", style="yellow")

    def write_json(self, path: Path) -> None:
        """Replaces the file."""
        parts = ("environment", "ceilings", "config", "metrics", "raw")
        content = {"title": self.title} | {part: getattr(self, part) for part in parts}
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
