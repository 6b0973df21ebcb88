"""Counts of what we want less of, held against the last recorded figures. The numbers may only go down.

    python tests/architecture/ratchets.py             fails where a figure has grown
    python tests/architecture/ratchets.py --update    records figures that have shrunk

Limits come from the house rules: a file 350 lines, never more than 500; a function 50, never more than 80 (a Triton
kernel 150). `HARD` figures are 0 for good; the others are recorded in ratchets.json.
"""

import argparse
import ast
import io
import json
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("ratchets.json")
PRODUCT = ("paging", "kernels", "server")

FILE_SOFT, FILE_HARD = 350, 500
FUNCTION_SOFT, FUNCTION_HARD, TRITON_HARD = 50, 80, 150

HARD = frozenset(
    {
        f"files over {FILE_HARD} lines",
        f"functions over {FUNCTION_HARD} lines (a Triton kernel {TRITON_HARD})",
        "global statements",
        "environment reads outside server/config.py",
        "print calls",
        "bare excepts",
        "TODO comments",
        "triton imports outside kernels/triton",
    }
)
RULES = (
    f"files over {FILE_SOFT} lines",
    f"files over {FILE_HARD} lines",
    f"functions over {FUNCTION_SOFT} lines",
    f"functions over {FUNCTION_HARD} lines (a Triton kernel {TRITON_HARD})",
    "global statements",
    "environment reads outside server/config.py",
    "print calls",
    "bare excepts",
    "TODO comments",
    "triton imports outside kernels/triton",
    "type: ignore comments",
    "noqa comments",
)
ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb", "putenv"})
Finding = tuple[str, str]
"""(rule, "path:line what")."""


def is_triton_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Decorated with triton.jit, alone or under autotune, heuristics and the like."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def examine_function(function: ast.FunctionDef | ast.AsyncFunctionDef, where: str) -> Iterator[Finding]:
    length = (function.end_lineno or function.lineno) - function.lineno + 1
    kernel = is_triton_kernel(function)
    note = f"{where}:{function.lineno} {function.name}: {length} lines"
    if length > (TRITON_HARD if kernel else FUNCTION_HARD):
        yield RULES[3], note
    elif length > FUNCTION_SOFT and not kernel:
        yield RULES[2], note


def examine_node(node: ast.AST, where: str) -> Iterator[Finding]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from examine_function(node, where)
        case ast.Global():
            yield "global statements", f"{where}:{node.lineno} global {', '.join(node.names)}"
        case ast.Call(func=ast.Name(id="print")):
            yield "print calls", f"{where}:{node.lineno}"
        case ast.ExceptHandler(type=None):
            yield "bare excepts", f"{where}:{node.lineno}"
        case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in ENVIRONMENT:
            yield "environment reads outside server/config.py", f"{where}:{node.lineno} os.{name}"
        case ast.ImportFrom(module="os", names=names) if any(alias.name in ENVIRONMENT for alias in names):
            yield "environment reads outside server/config.py", f"{where}:{node.lineno} from os"
        case ast.Import(names=names) if any(alias.name.split(".")[0] == "triton" for alias in names):
            yield "triton imports outside kernels/triton", f"{where}:{node.lineno}"
        case ast.ImportFrom(module=str(module), level=0) if module.split(".")[0] == "triton":
            yield "triton imports outside kernels/triton", f"{where}:{node.lineno}"


def examine_comments(source: str, where: str) -> Iterator[Finding]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        note = f"{where}:{token.start[0]}"
        if any(word in token.string for word in ("TODO", "FIXME", "XXX", "HACK")):
            yield "TODO comments", note
        if "type: ignore" in token.string:
            yield "type: ignore comments", note
        if "noqa" in token.string:
            yield "noqa comments", note


def examine(path: Path, root: Path) -> Iterator[Finding]:
    """Every finding of one Python or C file."""
    where = path.relative_to(root).as_posix()
    source = path.read_text(encoding="utf-8")
    num_lines = source.count("\n") + (not source.endswith("\n"))
    if num_lines > FILE_HARD:
        yield RULES[1], f"{where}: {num_lines} lines"
    elif num_lines > FILE_SOFT:
        yield RULES[0], f"{where}: {num_lines} lines"
    if path.suffix != ".py":
        return
    allowed = set()
    if where == "server/config.py":
        allowed.add("environment reads outside server/config.py")
    if where.startswith("kernels/triton/"):
        allowed.add("triton imports outside kernels/triton")
    for node in ast.walk(ast.parse(source, filename=where)):
        yield from (finding for finding in examine_node(node, where) if finding[0] not in allowed)
    yield from examine_comments(source, where)


def collect(root: Path) -> dict[str, list[str]]:
    """Rule -> where it is broken, over the whole product under root."""
    findings: dict[str, list[str]] = {rule: [] for rule in RULES}
    for package in PRODUCT:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in {".py", ".c", ".h", ".cpp", ".cu"}:
                for rule, note in examine(path, root):
                    findings[rule].append(note)
    return findings


def compare(findings: dict[str, list[str]], golden: dict[str, int]) -> tuple[list[str], list[str]]:
    """(what has grown, each with where; what has shrunk)."""
    counts = Counter({rule: len(notes) for rule, notes in findings.items()})
    grown, shrunk = [], []
    for rule in RULES:
        limit = 0 if rule in HARD else golden.get(rule, 0)
        if counts[rule] > limit:
            grown.append("\n".join([f"{rule}: {counts[rule]}, allowed {limit}", *(f"    {n}" for n in findings[rule])]))
        elif counts[rule] < limit:
            shrunk.append(f"{rule}: {counts[rule]}, recorded {limit}")
    return grown, shrunk


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fail where a recorded figure has grown.")
    parser.add_argument("--update", action="store_true", help="record figures that have shrunk")
    parser.add_argument("--list", action="store_true", help="print where each soft limit is passed")
    args = parser.parse_args(argv)
    golden: dict[str, int] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    findings = collect(ROOT)
    if args.list:
        print("\n".join(f"{rule}: {note}" for rule, notes in findings.items() for note in notes))
    grown, shrunk = compare(findings, golden)
    if args.update:
        recorded = {r: min(len(findings[r]), golden.get(r, len(findings[r]))) for r in RULES if r not in HARD}
        GOLDEN.write_text(json.dumps(recorded, indent=2) + "\n")
    elif shrunk:
        print("Better than recorded; keep it so with `python tests/architecture/ratchets.py --update`:")
        print("\n".join(f"  {line}" for line in shrunk))
    if grown:
        print("\n".join(grown))
        return 1
    print(f"{len(RULES)} ratchets hold")
    return 0


if __name__ == "__main__":
    sys.exit(main())
