"""Runs tests/kernels/triton/interpreted in a process whose Triton interprets kernels on the CPU."""

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


OLD_INTERPRETER = int(triton.__version__.split(".")[1]) < 7 and np.lib.NumpyVersion(np.__version__) >= "2.4.0"


@pytest.mark.skipif(OLD_INTERPRETER, reason="the interpreter of this triton needs numpy < 2.4")
@pytest.mark.timeout(600)
def test_interpreted_kernels_pass(tmp_path: Path) -> None:
    """A kernel that is wrong on the CPU's interpreter, or a suite that quietly collects next to nothing."""
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", str(SUITE), "-q", "-x", "--tb=short", f"--junitxml={report}"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, cwd=SUITE.parents[3], capture_output=True, text=True, timeout=580)
    assert run.returncode == 0, f"{run.stdout[-6000:]}\n{run.stderr[-2000:]}"
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    assert counts["failures"] == counts["errors"] == 0
    assert counts["tests"] - counts["skipped"] >= LEAST_CASES, counts
