"""Documentation that people act on: what it names must exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TOP = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    """A page is moved, and whoever follows the link to it gives up."""
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_quoted_paths_exist(page):
    """ "Add a line in server/foo.py", and there is no such file any more."""
    quoted = re.findall(r"`([\w./-]+)`", page.read_text())
    paths = [path for path in quoted if "/" in path and path.split("/")[0] in TOP]
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


def test_make_targets_exist():
    """The first command that a visitor types is not known to make."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {
        name
        for page in PAGES
        for name in re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", page.read_text(), re.MULTILINE)
    }
    assert {a or b for a, b in named} <= targets
    assert {"install", "serve", "test", "check"} <= targets


def test_flags_exist():
    """A flag in the documentation that the command line refuses."""
    known = set()
    for command in (["serve"], ["chat"], ["bench", "serve"]):
        run = subprocess.run(
            [sys.executable, "-m", "server.cli", *command, "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        known |= set(re.findall(r"--[a-z][a-z-]+", run.stdout))
    ours = known | {"--help", "--list", "--update", "--build", "--build-arg", "--profile", "--gpus", "--rm"}
    for page in (ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "docs/deployment.md", ROOT / "docs/architecture.md"):
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text())) <= ours, page


def test_commands_exist():
    """`pageturner something` in the README, which was renamed."""
    run = subprocess.run(
        [sys.executable, "-m", "server.cli", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    named = {name for page in PAGES for name in re.findall(r"(?:`|/|\$ )pageturner ([a-z]+)", page.read_text())}
    assert named
    assert all(re.search(rf"^ +{name}\b", run.stdout, re.MULTILINE) for name in named)


def test_decisions_are_numbered_once():
    """Two decisions under one number: every reference to it is ambiguous."""
    numbers = [path.name[:4] for path in (ROOT / "docs/adr").glob("*.md")]
    assert len(numbers) == len(set(numbers))
    for path in (ROOT / "docs/adr").glob("*.md"):
        assert path.read_text().startswith(f"# {int(path.name[:4])}. ")
