"""The GPU benchmark without a GPU: its grammar, and that every section runs to its end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.batches import parse

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("q5", [(5, 5)]),
        ("2q1s4k", [(1, 4096)] * 2),
        ("1q2k_3q1s1k", [(2048, 2048), (1, 1024), (1, 1024), (1, 1024)]),
    ],
)
def test_batch_grammar(text: str, pairs: list[tuple[int, int]]) -> None:
    """A benchmark that measures another batch than its label says."""
    assert parse(text) == pairs


@pytest.mark.parametrize("text", ["", "8q", "s4k", "1q4s2", "1q1s1m", "1q1__1q1"])
def test_batch_grammar_refuses(text: str) -> None:
    """A typing error that silently measures something else."""
    with pytest.raises(ValueError, match=r"is not of the form|more new tokens"):
        parse(text)


def test_every_section_runs(tmp_path: Path) -> None:
    """A script that nobody can run until there is a GPU, and that then fails after twenty minutes."""
    files = {"--json": tmp_path / "gpu.json", "--markdown": tmp_path / "gpu.md"}
    outputs = [str(part) for pair in files.items() for part in pair]
    command = [sys.executable, "-m", "benchmarks.gpu.run", "--dry", *outputs]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(files["--json"].read_text())
    assert {"K1", "K2", "K3", "K4", "K5", "K6", "K7", "K8", "K9", "K12"} <= {row["target"] for row in result["raw"]}
    assert "dry run" in files["--markdown"].read_text()
