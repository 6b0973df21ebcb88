"""The list of dependencies that people audit."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_dependency_is_on_the_list():
    """A package that comes in without anyone having said why, or under which license."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["triton"]]
    names = {re.match(r"[\w-]+", entry)[0].replace("_", "-") for entry in wanted}
    rows = re.findall(r"^\| ([\w-]+) \|", (ROOT / "docs/dependencies.md").read_text(), flags=re.MULTILINE)
    assert set(rows) - {"package"} == names
