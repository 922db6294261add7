"""Files appear complete or not at all; a folder belongs to one process at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from manymax.errors import ManymaxError
from manymax.study.files import atomic_write, locked, read_json, remove_partial, write_json


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})

    def fail() -> None:
        with atomic_write(path) as partial:
            partial.write_text("half", encoding="utf-8")
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        fail()
    assert read_json(path) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_values_that_json_does_not_have_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"value": float("nan")})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{", "\udce9"])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ManymaxError, match=r"a\.json cannot be read.*Remove it"):
        read_json(path)


def test_files_left_by_a_killed_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".a.json.1.abc.partial").write_text("half", encoding="utf-8")
    write_json(tmp_path / "a.json", 1)
    remove_partial(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


HOLD = """
import sys, pathlib
from manymax.study.files import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_and_a_killed_one_releases_the_lock(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ManymaxError, match="another process is working in"), locked(tmp_path):
            pass
        holder.kill()
        holder.wait()
        with locked(tmp_path):
            pass


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(json.dumps(1), encoding="utf-8")
    with pytest.raises(ManymaxError, match="cannot be written to"), locked(tmp_path / "file" / "run"):
        pass
