"""The measurements behind targets C1 to C6, as JSON on standard output: a process with the engine's environment."""

import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.cpu_targets.engine import FORWARD, Engine, Step, decode_steps, typical, write_q8_0
from benchmarks.kernels.cpu import Bench, Row
from server.bench import ceilings
from server.bench.ceilings import Ceilings
from server.config import ModelConfig
from server.weights.locate import locate

BF16, Q8_0, Q4_1 = "bf16", "Q8_0", "Q4_1"
BATCHES = {BF16: (1, 8, 16), Q8_0: (1,), Q4_1: (1, 8, 32)}
"""Decode steps of which sizes are wanted in which format."""
PROMPT_LEN, OUTPUT_LEN, PREFILL_LEN = 128, 64, 512
ATTENTION = ((32, 1, 1000), (1, 1, 16384))
REPEATS = 5


class Timing(msgspec.Struct, frozen=True):
    """One kind of step. seconds, parts: medians of the runs' medians; runs: each run's median."""

    seconds: float
    runs: list[float]
    parts: dict[str, float]

    @property
    def overhead(self) -> float:
        """The share that is not the forward pass."""
        return 1 - self.parts[FORWARD] / self.seconds


class Measured(msgspec.Struct, frozen=True):
    """decode: by format and batch size. prefill: PREFILL_LEN tokens, by format. rows: benchmarks/kernels/cpu.py's."""

    ceilings: Ceilings
    decode: dict[str, dict[int, Timing]]
    prefill: dict[str, Timing]
    rows: list[Row]
    all_ceilings: list[Ceilings]


def timing(steps: list[Step]) -> Timing:
    """Of one typical step a run."""
    one = typical(steps)
    return Timing(one.seconds, [step.seconds for step in steps], one.parts)


def medians(found: list[Ceilings]) -> Ceilings:
    """Field by field."""
    names = Ceilings.__struct_fields__
    return Ceilings(**{name: statistics.median(getattr(one, name) for one in found) for name in names})


def engines(folder: Path) -> dict[str, Engine]:
    """The default model in the three formats."""
    eight = folder / "q8_0.gguf"
    write_q8_0(locate("").path, eight)
    return {
        BF16: Engine(ModelConfig(quantization="none")),
        Q8_0: Engine(ModelConfig(model=str(eight))),
        Q4_1: Engine(ModelConfig()),
    }


def measure(progress: Progress) -> Measured:
    """Formats and sizes take turns, so that a machine that drifts drifts for all of them."""
    task = progress.add_task("loading", total=REPEATS + 6)

    def tell(what: str, advance: int = 1) -> None:
        progress.update(task, description=what, advance=advance)
        progress.refresh()

    tell("loading", 0)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        models = engines(Path(folder))
    decode: dict[str, dict[int, list[Step]]] = {kind: {n: [] for n in sizes} for kind, sizes in BATCHES.items()}
    prefill: dict[str, list[Step]] = {kind: [] for kind in BATCHES}
    limits = []
    for repeat in range(REPEATS):
        tell(f"steps of the model, {repeat + 1} of {REPEATS}")
        limits.append(ceilings.measure())
        for kind, model in models.items():
            for size, found in decode[kind].items():
                steps = model.run(size, prompt_len=PROMPT_LEN, output_len=OUTPUT_LEN)
                found.append(typical(decode_steps(steps, size)))
            steps = model.run(1, prompt_len=PREFILL_LEN, output_len=2)
            prefill[kind] += [step for step in steps if step.num_tokens == PREFILL_LEN]
    del models
    return Measured(
        medians(limits),
        {kind: {n: timing(steps) for n, steps in sizes.items()} for kind, sizes in decode.items()},
        {kind: timing(steps) for kind, steps in prefill.items()},
        kernel_rows(medians(limits), tell),
        limits,
    )


def kernel_rows(limits: Ceilings, tell: Callable[[str], None]) -> list[Row]:
    """The linear layers of the whole model, and paged attention, each alone."""
    bench = Bench(limits, repeats=REPEATS)
    with torch.inference_mode():
        for kind in BATCHES:
            tell(f"linear layers, {kind}")
            bench.layers(kind, (1, PREFILL_LEN))
        for sizes in ATTENTION:
            tell("attention")
            bench.attention(*sizes)
    return bench.rows


def main() -> int:
    # auto_refresh would draw from a thread of its own, on a core that the kernels want
    with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        measured = measure(progress)
    sys.stdout.write(msgspec.json.encode(measured).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
