"""One run as JSON and as a Markdown table."""

from dataclasses import asdict
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from server.bench.report import environment


def document(bench: Bench) -> dict[str, Any]:
    gpu = "none: a dry run, its figures mean nothing" if bench.dry else torch.cuda.get_device_name(bench.device)
    return {
        "environment": environment() | {"gpu": gpu, "arch": bench.target.arch, "sms": bench.target.num_sms},
        "ceilings": asdict(bench.ceilings),
        "config": {"dtype": str(bench.dtype), "dry": bench.dry},
        "metrics": {f"{r.target} {r.name}".strip(): r.value for r in bench.results},
        "raw": bench.raw(),
    }


def markdown(result: dict[str, Any]) -> str:
    """The table, headed by the card and the date."""
    about, packages = result["environment"], result["environment"]["packages"]
    lines = [
        f"# Triton kernels on {about['gpu']}",
        "",
        f"{about['date']}, commit {about['commit']}, torch {packages.get('torch')}, triton {packages.get('triton')}",
        "",
        "| target | what | measured | goal | met |",
        "|---|---|---|---|---|",
    ]
    for row in result["raw"]:
        met = {None: "", True: "yes", False: "no"}[row["met"]]
        lines.append(f"| {row['target']} | {row['name']} | {row['value']:.3g} {row['unit']} | {row['goal']} | {met} |")
    return "\n".join(lines) + "\n"
