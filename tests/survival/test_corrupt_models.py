"""Broken model files end in a StartupError: never in another exception, a crash or an endless allocation."""

import json
import os
import random
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.corruption import Broken, break_gguf, break_json, break_safetensors
from kernels.backend import resolve
from server.errors import StartupError
from server.models.registry import read_spec
from server.tokenizer import ChatTemplate, load_tokenizer
from server.weights.gguf_metadata import read_gguf_header
from server.weights.load import load_model
from server.weights.locate import locate

ROOM_BYTES = 2 << 30


def start_up(model: Path) -> None:
    """What a server reads of a model, by both of its processes."""
    files = locate(str(model), offline=True)
    if files.chat_template:
        ChatTemplate(files.chat_template)
    if files.kind == "gguf" or files.tokenizer_file:
        load_tokenizer(files)
    spec = read_spec(files)
    ops = resolve("reference", "cpu")
    load_model(files, spec, ops, dtype=torch.float32, device=torch.device("cpu"))


def outcome(model: Path) -> str:
    try:
        start_up(model)
    except StartupError as error:
        return f"refused: {error}"
    return "accepted"


@pytest.fixture(scope="module")
def variants(
    gguf_file: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], tuple[Path, Broken]]:
    """(kind, seed) -> a broken model's path, and what was done to it beside it."""
    folder = tmp_path_factory.mktemp("broken")
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    header = read_gguf_header(gguf_file)
    whole = gguf_file.read_bytes()

    def make(kind: str, seed: int) -> tuple[Path, Broken]:
        rng = random.Random(f"{kind} {seed}")
        if kind == "gguf":
            broken = break_gguf(whole[: header.data_offset], len(whole), rng)
            target = model = folder / "model.gguf"
        else:
            name = "model.safetensors" if kind == "safetensors" else "config.json"
            intact = (checkpoint / name).read_bytes()
            broken = break_safetensors(intact, rng) if kind == "safetensors" else break_json(intact, rng)
            model, target = folder, folder / name
            for other in ("model.safetensors", "config.json"):
                (folder / other).write_bytes((checkpoint / other).read_bytes())
        with target.open("wb") as file:
            file.write(broken.head)
            file.truncate(broken.size)
        return model, broken

    return make


@pytest.mark.parametrize("kind", ["gguf", "safetensors", "config"])
def test_a_broken_model_is_refused(variants: Callable[[str, int], tuple[Path, Broken]], kind: str) -> None:
    """Regression: a traceback, a crash or gigabytes allocated on the word of a broken header."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_refused = 0
    for seed in range(200):
        model, broken = variants(kind, seed)
        said = outcome(model)
        num_refused += said != "accepted"
        assert said != "accepted" or not broken.must_fail, f"seed {seed} ({broken.what}) was loaded"
        assert len(said) < 20_000, f"seed {seed} ({broken.what}): a message of {len(said)} characters"
    assert num_refused > 100
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < ROOM_BYTES


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_a_broken_model_is_refused_within_its_room(
    variants: Callable[[str, int], tuple[Path, Broken]], kind: str
) -> None:
    """Regression: an allocation that is only claimed, never touched, and so not seen in the resident size."""
    for seed in range(1000, 1012):
        model, broken = variants(kind, seed)
        child = os.fork()
        if child == 0:
            status = 3
            try:
                used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES,) * 2)
                signal.alarm(30)
                status = 0 if outcome(model) != "accepted" else 1
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        allowed = (0,) if broken.must_fail else (0, 1)
        assert os.waitstatus_to_exitcode(status) in allowed, f"seed {seed} ({broken.what})"


@pytest.mark.parametrize("text", ['{"version": "1.0"', "[]", "", '{"model": {"type": "BPE", "vocab": {"a": -1}}}'])
def test_a_broken_tokenizer_is_refused(checkpoint: Path, tmp_path: Path, text: str) -> None:
    """Regression: the tokenizer library's own exceptions, which are plain Exceptions, as a traceback at start."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text(text)
    assert outcome(tmp_path).startswith("refused: ")


@pytest.mark.parametrize("value", [[], "llama", 1, {"a": "b"}, None])
def test_a_broken_index_is_refused(checkpoint: Path, tmp_path: Path, value: object) -> None:
    """Regression: an index whose weight_map is of another kind, or names files that are not there."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": value}))
    assert outcome(tmp_path).startswith("refused: ")
