"""`pageturner bench`: the door to the three benchmarks."""

import sys
from collections.abc import Sequence
from importlib import import_module

BENCHMARKS = {
    "serve": "load on a running OpenAI-compatible server",
    "kernels": "attention and matrix products of this device's backend, against the machine's ceilings",
    "kv-cache": "the block allocator, the prefix cache, and how much KV memory lies waste",
}


def main(argv: Sequence[str]) -> int:
    """argv: the benchmark's name and its own flags; --help behind the name lists them."""
    if argv and argv[0] in BENCHMARKS:
        module = import_module(f"server.bench.{argv[0].replace('-', '_')}")
        return int(module.main(list(argv[1:])))
    lines = [f"  {name:<10}{purpose}" for name, purpose in BENCHMARKS.items()]
    wants_help = bool(argv) and argv[0] in {"-h", "--help"}
    stream = sys.stdout if wants_help else sys.stderr
    if argv and not wants_help:
        stream.write(f"error: there is no benchmark {argv[0]!r}; choose one of these\n\n")
    stream.write("\n".join(["usage: pageturner bench BENCHMARK [FLAGS]", "", *lines]) + "\n")
    return 0 if wants_help else 2
