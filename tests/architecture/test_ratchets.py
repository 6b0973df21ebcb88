import pytest

from tests.architecture import ratchets


def test_no_recorded_figure_has_grown():
    """A file or function over its limit, a global, a print or a new type: ignore slips in unseen."""
    golden = ratchets.json.loads(ratchets.GOLDEN.read_text())
    grown, _ = ratchets.compare(ratchets.collect(ratchets.ROOT), golden)
    assert not grown, "\n".join(grown)


def test_recorded_figures_are_soft_ones_only():
    """Someone records a figure for a rule that has to stay at zero."""
    golden = ratchets.json.loads(ratchets.GOLDEN.read_text())
    assert set(golden) == set(ratchets.RULES) - ratchets.HARD


LONG = "\n".join(f"    x = {i}" for i in range(60))


@pytest.mark.parametrize(
    ("path", "source", "rule"),
    [
        ("server/a.py", "x = 1\n" * 351, "files over 350 lines"),
        ("kernels/cpu/a.c", "int x;\n" * 501, "files over 500 lines"),
        ("paging/a.py", f"def f():\n{LONG}\n", "functions over 50 lines"),
        ("paging/a.py", f"def f():\n{LONG}\n{LONG}\n", ratchets.RULES[3]),
        ("kernels/triton/a.py", f"@triton.jit\ndef f():\n{LONG}\n{LONG}\n{LONG}\n", ratchets.RULES[3]),
        ("server/a.py", "def f():\n    global x\n    x = 1\n", "global statements"),
        ("server/a.py", "import os\nx = os.environ['A']\n", "environment reads outside server/config.py"),
        ("server/a.py", "from os import getenv\n", "environment reads outside server/config.py"),
        ("kernels/a.py", "print(1)\n", "print calls"),
        ("server/a.py", "try:\n    x = 1\nexcept:\n    pass\n", "bare excepts"),
        ("server/a.py", "x = 1  # TODO: y\n", "TODO comments"),
        ("server/a.py", "def f():\n    import triton.language as tl\n", "triton imports outside kernels/triton"),
        ("server/a.py", "from triton import jit\n", "triton imports outside kernels/triton"),
        ("server/a.py", "x = y  # type: ignore[name-defined]\n", "type: ignore comments"),
        ("server/a.py", "x = y  # noqa: F821\n", "noqa comments"),
    ],
)
def test_each_rule_bites(tmp_path, path, source, rule):
    """A rule that stopped matching: every ratchet would hold for ever."""
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    found = {name for name, notes in ratchets.collect(tmp_path).items() if notes}
    assert found == {rule}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("server/config.py", "import os\nx = os.environ\n"),
        ("kernels/triton/a.py", "import triton\n"),
        ("kernels/triton/a.py", f"@triton.jit\ndef f():\n{LONG}\n{LONG}\n"),
        ("server/a.py", "x = 'print(1)  # TODO'\n"),
        ("server/a.py", "import os\nx = os.path\n"),
    ],
)
def test_what_is_allowed_is_not_counted(tmp_path, path, source):
    """The counting cries wolf, and people learn to raise the figures."""
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert not any(ratchets.collect(tmp_path).values())


def test_growth_names_the_place_and_shrinking_is_no_failure():
    """A failing ratchet that doesn't say where, or one that punishes an improvement."""
    findings = {rule: [] for rule in ratchets.RULES}
    findings["noqa comments"] = ["server/a.py:3", "server/b.py:9"]
    grown, shrunk = ratchets.compare(findings, {"noqa comments": 1, "type: ignore comments": 2})
    assert len(grown) == 1
    assert "server/b.py:9" in grown[0]
    assert shrunk == ["type: ignore comments: 0, recorded 2"]
