"""Values of the benchmarks' flags, refused before any work where they make no sense: one sentence and exit status 2."""

import argparse
import math
import resource
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

SPARE_FILES = 64
"""Open files of a load generator that are no connections."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in a line, without the page of usage that would push it off the screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message.removeprefix('argument ')}\n")


Value = Callable[[str], float]


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """Reads whole numbers from low to high; None: without an end."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number; give one {_range(low, high)}") from None
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{text} is out of range; give a whole number {_range(low, high)}")
        return value

    return read


def real(low: float, high: float | None = None) -> Value:
    """Reads numbers from low to high; None: without an end, but finite."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number; give one {_range(low, high)}") from None
        if not math.isfinite(value) or value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{text} is out of range; give a number {_range(low, high)}")
        return value

    return read


def _range(low: float, high: float | None) -> str:
    return f"from {low:,} up" if high is None else f"from {low:,} to {high:,}"


def several(read: Value) -> Callable[[str], list[float]]:
    """Comma-separated values. None may be there twice: each is a row of its own in the result."""

    def read_all(text: str) -> list[float]:
        values = [read(part.strip()) for part in text.split(",")]
        for value in values:
            if values.count(value) > 1:
                raise argparse.ArgumentTypeError(f"{value:g} is listed twice; list each value once, like 1,8,32")
        return values

    return read_all


def word(text: str) -> str:
    """Something that is sent in a header: visible ASCII, not empty."""
    if not text or not all("!" <= character <= "~" for character in text):
        raise argparse.ArgumentTypeError(
            "it is empty or holds blanks or other characters that no header may have; quote it"
        )
    return text


def output_file(text: str) -> Path:
    """A file that can be written: it is there and ours, or it can be made in a folder that is there."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}; make it first")
    try:
        if not path.exists():
            _try_to_write(path.parent)
        elif path.is_file():  # opening a pipe would wait for its reader
            path.open("ab").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} can't be written ({error.strerror}); name another file") from None
    return path


def output_folder(text: str) -> Path:
    """A folder that is there and writable, or that can be made in one that is."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a file; name a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}; make it first")
    try:
        _try_to_write(path if path.is_dir() else path.parent)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} can't be written ({error.strerror}); name another folder") from None
    return path


def _try_to_write(folder: Path) -> None:
    """Access bits lie on read-only file systems and for root. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder):
        pass


def connections_left() -> int:
    """How many connections this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, soft - SPARE_FILES) if soft != resource.RLIM_INFINITY else 1 << 20


def limits(names: Sequence[str]) -> Callable[[str], dict[str, float]]:
    """ "ttft=500,tpot=50" -> milliseconds by name, of these names."""
    form = ",".join(f"{name}=MS" for name in names)

    def read(text: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            if name not in names or not value or name in found:
                raise argparse.ArgumentTypeError(f"{part!r} is no limit; write {form}, each at most once")
            found[name] = real(0.001)(value)
        return found

    return read
