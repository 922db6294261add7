"""Files that appear whole or not at all, and folders that one process works in at a time."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manymax.errors import ManymaxError

try:
    import fcntl
except ImportError:  # no advisory locks there; one process at a time is then up to the user
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"


class Busy(ManymaxError):
    """Another process is at work in a folder."""


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends well, and vanishes when it does not.

    The content is on the disk before the name is: after a crash at any moment there is the old file or the new one.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with whole(folder / "a.txt") as partial:
    ...     _ = partial.write_text("all of it", encoding="utf-8")
    >>> [path.name for path in folder.iterdir()]
    ['a.txt']
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        _sync(partial)
        partial.replace(path)
        _sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # a folder cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_partial(path: Path) -> bool:
    """Whether it is a file that is being written, or what a process left of one when it was killed."""
    return path.match(".*.partial")


def remove_partial(folder: Path) -> None:
    """Delete what a killed process left behind in `folder`; call it under the folder's lock."""
    for path in folder.glob(".*.partial"):
        path.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write `content` whole; what JSON does not know (nan, infinity) must have become None before."""
    with whole(path) as partial:
        partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """The content of a JSON file; an error that names it where it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ManymaxError(f"{path} cannot be read: {error}. Remove it to begin again.") from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder`, made if it is not there, against other processes; the lock ends with the process in any case."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ManymaxError(f"{folder} cannot be written to: {error.strerror}. Choose another folder.") from None
    try:
        if fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise Busy(f"another process is at work in {folder}: wait for it, or choose another folder.") from None
        yield
    finally:
        os.close(descriptor)
