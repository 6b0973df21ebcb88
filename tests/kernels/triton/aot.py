"""Compiles every shipped variant for every target without a GPU or a driver, and reads off what it needs.

Run as a program, it rewrites the golden report: `python -m tests.kernels.triton.aot`.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from tests.kernels.triton.recording import Launch
from tests.kernels.triton.variants import TARGETS, shipped

GOLDEN = Path(__file__).parent / "resources.json"

_MATRIX_UNITS = ("wgmma", "tcgen05.mma", "mma.sync", "v_mfma")
_WIDE_LOADS = {
    "cuda": r"ld\.global\S*\.v4\.b32|cp\.async\.cg\.shared\.global",
    "hip": r"(?:global|buffer)_load_dwordx4",
}


def compile_for(launch: Launch, arch: str) -> dict[str, Any]:
    """registers and spill_bytes a thread, shared bytes a program, the matrix units used, whether 16-byte loads are."""
    is_cuda = arch.startswith("sm_")
    target = GPUTarget("cuda", int(arch[3:]), 32) if is_cuda else GPUTarget("hip", arch, 64)
    kernel = triton.compile(launch.source(), target=target, options=dict(launch.options))
    text = kernel.asm["ptx" if is_cuda else "amdgcn"]
    registers, spill_bytes = _cubin_resources(kernel) if is_cuda else _hsaco_resources(text)
    return {
        "registers": registers,
        "spill_bytes": spill_bytes,
        "shared_bytes": kernel.metadata.shared,
        "matrix_unit": next((unit for unit in _MATRIX_UNITS if unit in text), ""),
        "wide_loads": re.search(_WIDE_LOADS[target.backend], text) is not None,
    }


def _cubin_resources(kernel: CompiledKernel) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    # What doesn't fit into registers goes to the thread's stack: Triton code has no other use for one.
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match, usage
    return int(match[1]), int(match[2])


def _hsaco_resources(text: str) -> tuple[int, int]:
    figures = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s*(\d+)", text))
    return int(figures["vgpr_count"]), 4 * int(figures["vgpr_spill_count"])


def main() -> None:
    sections = []
    for arch, target in TARGETS.items():
        lines = [f'"{name}": {json.dumps(compile_for(launch, arch))}' for name, launch in shipped(target)]
        sections.append(f'"{arch}": {{\n' + ",\n".join(lines) + "\n}")
    GOLDEN.write_text(f'{{"triton": "{triton.__version__}", "targets": {{\n' + ",\n".join(sections) + "\n}}\n")


if __name__ == "__main__":
    main()
