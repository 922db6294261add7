"""How the native library is found, chosen and refused. Its values are the business of the tests of the heads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from manymax.engine import native_library
from manymax.engine.native_levels import fingerprint, levels_of
from manymax.errors import ManymaxError
from tests.heads.plain import needs_library

ROOT = Path(__file__).parents[2]


def forget() -> None:
    """Let the next question about the library be answered anew."""
    for function in ("_resolve", "_load", "_function", "features", "_warn_if_stale"):
        getattr(native_library, function).cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in the place of the one with the libraries, with no library loaded."""
    monkeypatch.setattr(native_library, "LIBRARIES", tmp_path)
    monkeypatch.delenv(native_library.VARIABLE, raising=False)
    forget()
    yield tmp_path
    forget()


def test_without_a_library_it_says_so(folder: Path) -> None:
    assert native_library.levels_here() == ()
    assert native_library.resolve("auto") is None
    with pytest.raises(ManymaxError, match=r"Install a compiler .* run `make native`"):
        native_library.resolve("native")
    with pytest.raises(ManymaxError, match=r"`options.backend` is 'native-plain', which cannot be had"):
        native_library.resolve("native-plain")
    with pytest.raises(ManymaxError, match=r"`options.backend`.*native-avx2.*got 'avx2'"):
        native_library.resolve("avx2")


def test_a_file_that_is_no_library_is_named(folder: Path) -> None:
    (folder / "manymax_plain.so").write_bytes(b"nothing")
    with pytest.raises(ManymaxError, match=r"cannot be loaded: .*manymax_plain"):
        native_library.resolve("native")


@needs_library
def test_a_library_older_than_its_sources_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for path in (native_library.PACKAGE / native_library.FOLDER).iterdir():
        shutil.copy(path, folder)
    monkeypatch.setattr(native_library, "fingerprint", lambda package: "another text")
    with pytest.warns(RuntimeWarning, match="older than its sources: run `make native`"):
        assert native_library.resolve("auto") is None
    with pytest.raises(ManymaxError, match="run `make native`"):
        native_library.resolve("native")
    # A wheel has no sources to compare with.
    forget()
    monkeypatch.setattr(native_library, "sources", lambda package: [])
    assert native_library.resolve("native") is not None


def test_the_fingerprint_is_of_every_file(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    seen = [fingerprint(tmp_path)]
    for path, text in (("a.cpp", "1"), ("deep/b.h", "2"), ("deep/b.h", "3")):
        (tmp_path / path).write_text(text, encoding="utf-8")
        seen.append(fingerprint(tmp_path))
    (tmp_path / "a.cpp").rename(tmp_path / "c.cpp")
    seen.append(fingerprint(tmp_path))
    assert len(set(seen)) == 5


@needs_library
def test_what_the_processor_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.setattr(native_library, "features", lambda: frozenset(["avx2"]))
    monkeypatch.setattr(native_library.platform, "machine", lambda: "x86_64")
    try:
        with pytest.raises(ManymaxError, match="this processor has no fma"):
            native_library.resolve("native-avx2")
        with pytest.raises(ManymaxError, match="this processor has no fma, avx512f, avx512bw"):
            native_library.resolve("native-avx512")
    finally:
        native_library._resolve.cache_clear()


@needs_library
def test_auto_takes_the_best_level_that_was_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    here, untested = native_library.levels_here(), set[str]()

    def rows(machine: str) -> tuple[native_library.Level, ...]:
        table = levels_of(machine)
        return tuple(level._replace(tested=()) if level.name in untested else level for level in table)

    monkeypatch.setattr(native_library, "levels_of", rows)
    monkeypatch.delenv(native_library.VARIABLE, raising=False)
    try:
        for best in reversed(here):
            native_library._resolve.cache_clear()
            assert native_library.resolve("auto") == native_library.resolve("native") == best
            untested.add(best)
        native_library._resolve.cache_clear()
        assert native_library.resolve("auto") is None
        assert native_library.resolved_name("auto") == "torch"
        assert native_library.resolve("native") == here[-1]  # demanded: the best there is
        assert native_library.resolve("native-plain") == "plain"
    finally:
        native_library._resolve.cache_clear()


@needs_library
def test_the_environment_says_what_auto_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYMAX_BACKEND", "native-plain")
    assert native_library.resolved_name("auto") == "native-plain"
    assert native_library.resolve("torch") is None  # an option wins
    monkeypatch.setenv("MANYMAX_BACKEND", "fast")
    with pytest.raises(ManymaxError, match=r"\$MANYMAX_BACKEND.*got 'fast'"):
        native_library.resolve("auto")


@needs_library
def test_only_the_folder_of_the_package_is_looked_at(tmp_path: Path) -> None:
    """Neither the current folder, the cache of the account nor LD_LIBRARY_PATH can put another library in its place."""
    for name in (level.file for level in native_library.NATIVE_LEVELS):
        (tmp_path / name).write_bytes(b"somebody else's")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        **dict.fromkeys(("XDG_CACHE_HOME", "LD_LIBRARY_PATH", "HOME"), str(tmp_path)),
    }
    code = (
        "from manymax.engine.native_library import *; resolve('native')\n"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'manymax_' in line})"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=True)
    if os.path.exists("/proc/self/maps"):
        found = {Path(name).parent for name in result.stdout.split()}
        assert found == {native_library.PACKAGE / native_library.FOLDER}


def test_a_function_that_is_not_there_is_named() -> None:
    if not native_library.available():
        pytest.skip("no native library")
    with pytest.raises(ManymaxError, match="no function nonsense_float32: it must be defined with NATIVE"):
        native_library._function("plain", "nonsense_float32")
