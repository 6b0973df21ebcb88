"""Measures the Triton kernels on a GPU, in at most 25 minutes, against ceilings measured in the same run.

    python -m benchmarks.gpu.run --json out/gpu.json --markdown out/gpu.md
    python -m benchmarks.gpu.run --dry          tiny shapes on Triton's interpreter: shows that the script runs

Exits with 1 if a kernel is wrong on the device, or if a target is missed and --strict is given.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

SECTIONS = ("attention", "others", "steps", "engine")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="no GPU: run every section on the interpreter, tiny")
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {','.join(SECTIONS)} [all]")
    parser.add_argument("--minutes", type=float, default=25.0, help="start no section after this long [%(default)s]")
    parser.add_argument("--strict", action="store_true", help="a missed target is a failure")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # read once, when triton is imported
    return measure(args)


def measure(args: argparse.Namespace) -> int:
    import torch

    from benchmarks.gpu import attention, correctness, engine, others, steps
    from benchmarks.gpu.bench import Bench, measure_ceilings
    from kernels.triton.ops import TritonOps

    if not args.dry and not torch.cuda.is_available():
        print("no GPU: --dry runs the script on the interpreter", file=sys.stderr)
        return 2
    device = torch.device("cpu" if args.dry else "cuda")
    bench = Bench(device, torch.float32 if args.dry else torch.bfloat16, args.dry, TritonOps(device))
    begin = time.monotonic()
    torch.manual_seed(0)
    measure_ceilings(bench)
    correct = correctness.check(bench)
    modules = {"attention": attention, "others": others, "steps": steps, "engine": engine}
    skipped = []
    for name in args.sections.split(","):
        if time.monotonic() - begin > 60 * args.minutes:
            skipped.append(name)
            continue
        modules[name].run(bench)
    print(f"{(time.monotonic() - begin) / 60:.1f} minutes; sections left out for time: {', '.join(skipped) or 'none'}")
    write(args, bench)
    missed = [result for result in bench.results if result.met is False]
    return 0 if correct and not (args.strict and missed) else 1


def write(args: argparse.Namespace, bench: Any) -> None:
    import msgspec

    from benchmarks.gpu.report import document, markdown

    result = document(bench)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    if args.markdown:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(markdown(result))


if __name__ == "__main__":
    sys.exit(main())
