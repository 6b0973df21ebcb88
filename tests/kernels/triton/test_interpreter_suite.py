"""Runs tests/kernels/triton/interpreted in processes whose Triton interprets kernels on the CPU."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import triton

SUITE = Path(__file__).parent / "interpreted"
LEAST_CASES = 400
LIMIT_S = 1100
"""For a busy machine: on two idle cores it takes a minute and a half."""
FIRST_HALF = ("test_attention.py", "test_engine.py", "test_mutations.py")
"""Takes about as long as the rest: one process each."""


OLD_INTERPRETER = int(triton.__version__.split(".")[1]) < 7 and np.lib.NumpyVersion(np.__version__) >= "2.4.0"


@pytest.mark.skipif(OLD_INTERPRETER, reason="the interpreter of this triton needs numpy < 2.4")
@pytest.mark.timeout(1200)
def test_interpreted_kernels_pass(tmp_path: Path) -> None:
    """A kernel that is wrong on the CPU's interpreter, or a suite that quietly collects next to nothing."""
    first = [str(SUITE / name) for name in FIRST_HALF]
    halves = [first, [str(SUITE), *(f"--ignore={path}" for path in first)]]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    reports = [tmp_path / f"{half}.xml" for half in range(2)]
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "pytest", *paths, "-q", "-x", "--tb=short", f"--junitxml={report}"],
            env=environment, cwd=SUITE.parents[3], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for paths, report in zip(halves, reports, strict=True)
    ]  # fmt: skip
    try:
        for run in runs:
            output, _ = run.communicate(timeout=LIMIT_S)
            assert run.returncode == 0, output[-6000:]
    finally:
        for run in runs:
            run.kill()
    suites = [ElementTree.parse(report).getroot().find("testsuite") for report in reports]
    counts = {
        name: sum(int(suite.attrib[name]) for suite in suites if suite is not None)
        for name in ("tests", "failures", "errors", "skipped")
    }
    assert counts["failures"] == counts["errors"] == 0
    assert counts["tests"] - counts["skipped"] >= LEAST_CASES, counts
