"""Compiles kernels/cpu/native for this machine, once, into a per-user cache. By hand: `python -m kernels.cpu.build`.

A library is named after the sources, the processor and the compiler, so a change of any of them builds anew. It is
loaded as code: a cache folder or file that somebody else owns or may write to is refused.
"""

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-pthread", "-fno-exceptions", "-fno-rtti"),
    *("-fno-math-errno", "-fno-trapping-math"),  # and no more: NaN and infinity mean something here
    *("-Wall", "-Wextra", "-Wno-psabi"),
    *("-Wno-maybe-uninitialized", "-Wno-uninitialized"),  # raised by the compiler's own AVX-512 header
)
TUNING = ("-march=native", "-mcpu=native")
"""Tried in this order: which one a compiler takes depends on the architecture."""
TIMEOUT_S = 300

_log = logging.getLogger(__name__)


class NativeBuildError(OSError):
    """The compiled kernels can't be had here. The message says why."""


def library(folder: Path | None = None) -> Path:
    """Path of the shared library for this machine, built now if it is not in the cache (seconds, once).

    folder: the cache; None: the user's. Raises NativeBuildError.
    """
    if os.name != "posix":
        raise NativeBuildError(f"not supported on {platform.system()}")
    folder = cache_folder() if folder is None else folder
    with _os_errors(f"the kernel cache {folder}"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_shared(folder)
    compiler = find_compiler()
    prefix = f"kernels-{_digest(_source_bytes(), _processor())}"
    if compiler is None:
        # An image may carry the library and not the compiler that made it.
        built = sorted(folder.glob(f"{prefix}-*.so"))
        if not built:
            raise NativeBuildError(f"no C++ compiler found (looked for {', '.join(COMPILERS)})")
        target = built[-1]
    else:
        target = folder / f"{prefix}-{_digest(_identity(compiler), ' '.join(FLAGS).encode())}.so"
        if not target.exists():
            _build(compiler, target)
    _refuse_shared(target)
    return target


def cache_folder() -> Path:
    """The user's cache, or a private folder under the temporary one where there is no home to write to."""
    with contextlib.suppress(RuntimeError):  # a user without a home, as containers have them
        home = Path.home()
        base = home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache"
        existing = next((path for path in (base, *base.parents) if path.exists()), home)
        if os.access(existing, os.W_OK):
            return base / "pageturner" / "kernels"
    return Path(tempfile.gettempdir()) / f"pageturner-kernels-{os.getuid()}"


def find_compiler() -> Path | None:
    """The system's C++ compiler, or None."""
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    return Path(found).resolve() if found else None


def _build(compiler: Path, target: Path) -> None:
    started = time.monotonic()
    with _os_errors("the kernel build"), tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        failures = []
        for tuning in TUNING:
            failure = _compile(compiler, [*FLAGS, tuning], Path(scratch), made)
            if failure is None:
                os.chmod(made, 0o700)
                os.replace(made, target)  # whole or not at all, whoever else builds at the same time
                _log.info("built the CPU kernels with %s in %.1f s: %s", compiler, time.monotonic() - started, target)
                return
            failures.append(failure)
    raise NativeBuildError(f"{compiler} can't build the CPU kernels: {failures[0]}")


def _compile(compiler: Path, flags: Sequence[str], scratch: Path, made: Path) -> str | None:
    """Compiles the sources side by side and links them. Returns the first error, None when all went well."""
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [str(scratch / f"{source.stem}.o") for source in sources]
    running = [
        subprocess.Popen([compiler, *flags, "-c", source, "-o", out], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for source, out in zip(sources, objects, strict=True)
    ]
    errors = []
    try:
        for process in running:
            _, stderr = process.communicate(timeout=TIMEOUT_S)
            if process.returncode:
                errors.append(stderr.decode(errors="replace").strip()[:2000])
    except subprocess.TimeoutExpired:
        errors.append(f"took longer than {TIMEOUT_S} s")
    finally:
        for process in running:
            process.kill()
            process.wait()
    if errors:
        return errors[0]
    link = [str(compiler), "-shared", "-pthread", *objects, "-o", str(made)]
    linked = subprocess.run(link, capture_output=True, timeout=TIMEOUT_S, check=False)
    return linked.stderr.decode(errors="replace").strip()[:2000] if linked.returncode else None


def _source_bytes() -> bytes:
    files = sorted(path for path in SOURCES.iterdir() if path.suffix in {".cpp", ".h"})
    return b"".join(path.name.encode() + b"\0" + path.read_bytes() for path in files)


def _processor() -> bytes:
    """What -march=native depends on."""
    names = {"flags", "Features", "cpu family", "model", "CPU part"}
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.version()}".encode()
    return "\n".join(line for line in lines if line.partition(":")[0].strip() in names).encode()


def _identity(compiler: Path) -> bytes:
    status = compiler.stat()
    return f"{compiler} {status.st_size} {status.st_mtime_ns}".encode()


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _refuse_shared(path: Path) -> None:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) or status.st_uid not in {os.getuid(), 0}:
        raise NativeBuildError(f"{path} is a link or belongs to somebody else: not loading code from it")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NativeBuildError(f"{path} may be written by others: not loading code from it (chmod go-w mends it)")


@contextlib.contextmanager
def _os_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        if isinstance(error, NativeBuildError):
            raise
        raise NativeBuildError(f"{what}: {error}") from error


def main() -> int:
    """Builds ahead of the first start. Having no compiler is no failure: the torch-only kernels serve then."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        _log.info("CPU kernels: %s", library())
    except NativeBuildError as error:
        _log.warning("compiled CPU kernels are not available, torch-only ones will serve: %s", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
