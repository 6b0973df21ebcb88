import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("paging", "kernels", "server")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def loaded_after(statement: str) -> set[str]:
    """Top-level modules in sys.modules of a fresh interpreter that ran the statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_contracts_hold():
    """An import against the drawn direction, indirect ones included."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-logo"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_room_is_under_a_contract():
    """A new room joins the tree and no contract speaks of it."""
    spoken_of = set(re.findall(r"\b(?:server|kernels|paging)(?:\.\w+)?", (ROOT / ".importlinter").read_text()))
    rooms = {f"server.{path.parent.name}" for path in (ROOT / "server").glob("*/__init__.py")}
    assert rooms <= spoken_of


def test_package_list_is_complete():
    """A package that works from the checkout and is missing from the wheel."""
    found = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for package in PRODUCT
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_every_folder_with_code_is_a_package():
    """A folder without __init__.py imports by luck here, and not once installed."""
    folders = {path.parent for package in PRODUCT for path in (ROOT / package).rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def imported_externals() -> dict[str, str]:
    """Top-level name of each third-party module the product imports -> one file that does."""
    names: dict[str, str] = {}
    for path in (path for package in PRODUCT for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module or ""]
            else:
                continue
            names |= {module.split(".")[0]: str(path.relative_to(ROOT)) for module in modules}
    return {n: p for n, p in names.items() if n not in sys.stdlib_module_names and n not in PRODUCT}


def test_every_import_is_a_declared_dependency():
    """The product leans on a package that only the development tools bring along."""
    project = PROJECT["project"]
    requirements = [
        *project["dependencies"],
        *(r for extra in project["optional-dependencies"].values() for r in extra),
    ]
    declared = {re.split(r"[<>=!~;\[ ]", requirement)[0].lower().replace("_", "-") for requirement in requirements}
    distributions = packages_distributions()
    undeclared = {
        module: path
        for module, path in imported_externals().items()
        if not {name.lower().replace("_", "-") for name in distributions.get(module, [module])} & declared
    }
    # starlette is FastAPI's own foundation and re-exported by it
    assert {m: p for m, p in undeclared.items() if m != "starlette"} == {}


@pytest.mark.parametrize("package", ["kernels", "paging", "server", "server.protocol", "server.scheduler"])
def test_importing_stays_light(package):
    """`import kernels` pulls in torch: transformers probes a package of that name, the API process never wants it."""
    assert not loaded_after(f"import {package}") & {"torch", "triton", "transformers", "fastapi"}
