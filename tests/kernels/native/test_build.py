"""The cache of compiled kernels is code that we load: whose it is, and what happens where none can be had."""

import logging
import os
import stat
import tempfile
from pathlib import Path

import pytest

from kernels import backend
from kernels.cpu import CpuOps, build, native_lib


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if build.find_compiler() is None:
        pytest.skip("no compiler here")
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int pt_one() { return 1; }\n')
    monkeypatch.setattr(build, "SOURCES", sources)
    return sources


def test_builds_once_and_anew_when_the_source_changes(small_source: Path, tmp_path: Path) -> None:
    """Guards the cache key, and that a build leaves nothing but the library behind."""
    cache = tmp_path / "cache"
    first = build.library(cache)
    made = first.stat().st_mtime_ns
    assert build.library(cache) == first
    assert first.stat().st_mtime_ns == made
    (small_source / "one.cpp").write_text('extern "C" int pt_one() { return 2; }\n')
    second = build.library(cache)
    assert second != first
    assert sorted(path.name for path in cache.iterdir()) == sorted([first.name, second.name])
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_a_failing_compiler_is_reported_and_leaves_no_library(small_source: Path, tmp_path: Path) -> None:
    """Guards against loading half a build."""
    (small_source / "two.cpp").write_text("this is no C++\n")
    with pytest.raises(build.NativeBuildError, match="can't build"):
        build.library(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("what", ["folder", "file", "link"])
def test_what_others_could_have_written_is_refused(small_source: Path, tmp_path: Path, what: str) -> None:
    """Guards against running somebody else's code from a shared folder."""
    cache = tmp_path / "cache"
    built = build.library(cache)
    if what == "folder":
        cache.chmod(0o777)
    elif what == "file":
        built.chmod(0o722)
    else:
        built.rename(tmp_path / "elsewhere.so")
        built.symlink_to(tmp_path / "elsewhere.so")
    with pytest.raises(build.NativeBuildError, match="not loading code"):
        build.library(cache)


def test_a_cache_that_is_no_folder_is_an_error_we_know(small_source: Path, tmp_path: Path) -> None:
    """Guards the fallback: an odd home folder must not stop the server."""
    (tmp_path / "cache").write_text("")
    with pytest.raises(build.NativeBuildError):
        build.library(tmp_path / "cache")


def test_a_library_without_its_compiler_still_serves(
    small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards images that are built in one stage and run in another."""
    built = build.library(tmp_path / "cache")
    monkeypatch.setattr(build, "COMPILERS", ())
    assert build.library(tmp_path / "cache") == built


@pytest.mark.parametrize("home", ["missing", "unknown"])
def test_a_user_without_a_home_builds_in_a_private_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    """Guards containers that run as a user nobody gave a home, or one that may not be written."""

    def no_home() -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.setattr(build.Path, "home", no_home if home == "unknown" else lambda: tmp_path / "missing")
    monkeypatch.setattr(build.os, "access", lambda *_: False)
    folder = build.cache_folder()
    assert folder.parent == Path(tempfile.gettempdir())
    assert str(os.getuid()) in folder.name


def test_without_a_compiler_the_torch_kernels_serve_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards a start on a machine without a compiler: slower, told once, not broken."""
    monkeypatch.setattr(build, "COMPILERS", ())
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path / "cache")
    native_lib.load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            ops = backend.resolve("cpu", "cpu")
    finally:
        native_lib.load.cache_clear()
    assert type(ops) is CpuOps
    assert "no C++ compiler" in caplog.text
    assert len(caplog.records) == 1


def test_the_backend_prefers_the_compiled_kernels(native: object) -> None:
    """Guards the wiring: a machine with a compiler must not run the slow path."""
    assert type(backend.resolve("auto", "cpu")) is type(native)
