"""soak.py --corrupt: broken variants of the default model and of a small safetensors checkpoint, each in a process.

A process that has imported everything forks a child for each file, so that the figures are the loader's alone.
"""

import json
import os
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from corruption import Broken, break_gguf, break_json, break_safetensors
from rich.progress import track
from safetensors.torch import save_file

from kernels.backend import resolve
from server.errors import StartupError
from server.models.registry import read_spec
from server.tokenizer import ChatTemplate, load_tokenizer
from server.weights.gguf_metadata import read_gguf_header
from server.weights.load import expected_shapes, load_model
from server.weights.locate import locate

LIMIT_S, ROOM_BYTES = 5.0, 2 << 30
_KILL_AFTER_S = 30
_REFUSED, _ACCEPTED, _CRASHED = 0, 1, 2
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}


class Rows(Protocol):
    def add(self, what: str, measured: object, wanted: str, good: bool | None = None) -> None: ...

    def conclude(self, path: str | None) -> int: ...


def start_up(model: Path) -> None:
    """What a server reads of a model, by both of its processes."""
    files = locate(str(model), offline=True)
    if files.chat_template:
        ChatTemplate(files.chat_template)
    if files.kind == "gguf" or files.tokenizer_file:
        load_tokenizer(files)
    spec = read_spec(files)
    load_model(files, spec, resolve("reference", "cpu"), dtype=torch.bfloat16, device=torch.device("cpu"))


def in_a_child(model: Path) -> tuple[int, str, float, int]:
    """(outcome, message, seconds, most bytes resident beyond the parent's)."""
    reader, writer = os.pipe()
    begin = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.close(reader)
        status = _CRASHED
        try:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES,) * 2)
            resource.setrlimit(resource.RLIMIT_CPU, (_KILL_AFTER_S,) * 2)
            start_up(model)
            status = _ACCEPTED
        except StartupError as error:
            os.write(writer, str(error)[:2000].encode())
            status = _REFUSED
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}"[:2000].encode())
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read().decode(errors="replace")
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return (
        code if code in (_REFUSED, _ACCEPTED) else _CRASHED,
        message,
        time.perf_counter() - begin,
        usage.ru_maxrss << 10,
    )


def write(path: Path, broken: Broken) -> None:
    with path.open("wb") as file:
        file.write(broken.head)
        file.truncate(broken.size)


def makers(folder: Path) -> list[Callable[[random.Random], tuple[Path, Broken]]]:
    """Functions that write one broken model each, and say what was done to it."""
    intact = locate("").path
    header = read_gguf_header(intact)
    with intact.open("rb") as file:
        head = file.read(header.data_offset)
    plain, configured = folder / "tensors", folder / "config"
    for place in (plain, configured):
        place.mkdir()
        (place / "config.json").write_text(json.dumps(_CONFIG))
        spec = read_spec_of(_CONFIG)
        save_file(
            {name: torch.zeros(shape) for name, shape in expected_shapes(spec).items()}, place / "model.safetensors"
        )
    tensors, config = (plain / "model.safetensors").read_bytes(), (configured / "config.json").read_bytes()

    def gguf(rng: random.Random) -> tuple[Path, Broken]:
        broken = break_gguf(head, header.file_size, rng)
        write(folder / "model.gguf", broken)
        return folder / "model.gguf", broken

    def safetensors(rng: random.Random) -> tuple[Path, Broken]:
        broken = break_safetensors(tensors, rng)
        write(plain / "model.safetensors", broken)
        return plain, broken

    def configuration(rng: random.Random) -> tuple[Path, Broken]:
        broken = break_json(config, rng)
        write(configured / "config.json", broken)
        return configured, broken

    return [gguf, safetensors, configuration]


def read_spec_of(config: dict[str, Any]) -> Any:
    from server.weights.locate import ModelFiles

    return read_spec(ModelFiles(name="", kind="hf", path=Path(), config=config))


def run(number: int, rows: Rows, json_path: str | None) -> int:
    """Goes on until so many files were ones that no loader may accept, or were refused anyway."""
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    slowest, largest, seed = 0.0, 0, 0
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        make = makers(Path(name))
        for _ in track(range(number), "breaking models", transient=True):
            while True:
                seed += 1
                kind = make[seed % 5 % 3]
                model, broken = kind(random.Random(seed))
                outcome, message, seconds, peak = in_a_child(model)
                if outcome == _ACCEPTED and not broken.must_fail:
                    outcomes["harmless: loads as ever"] += 1
                    continue
                break
            if outcome == _REFUSED and message:
                outcomes[f"{kind.__name__}: refused"] += 1
            else:
                wrong.append(f"seed {seed}, {kind.__name__}, {broken.what}: {message or 'accepted'}")
            slowest, largest = max(slowest, seconds), max(largest, peak)
    for what, count in sorted(outcomes.items()):
        rows.add(what, count, "")
    refused = number - len(wrong)
    rows.add("clear errors", refused, str(number), refused == number)
    for what in wrong[:10]:
        rows.add("not so", what, "")
    rows.add("slowest", f"{slowest:.2f} s", f"<= {LIMIT_S:.0f} s", slowest <= LIMIT_S)
    rows.add("most memory", f"{largest / 2**20:.0f} MiB", f"<= {ROOM_BYTES >> 20} MiB", largest <= ROOM_BYTES)
    return rows.conclude(json_path)
