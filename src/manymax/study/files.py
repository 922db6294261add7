"""Files that appear complete or not at all, and folders that one process works in at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from manymax.errors import ManymaxError

try:
    import fcntl
except ImportError:  # Windows has no advisory locks: there the caller must start one process at a time
    fcntl = None  # type: ignore[assignment]

CHECKSUM = "checksum"  # the entry of a JSON object that holds the checksum of the others
LOCK = ".lock"  # name of the file in a folder that `locked` locks; it is never deleted


class FolderBusy(ManymaxError):
    """Another process holds the lock of a folder."""


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Write to a temporary path beside `path`, which replaces `path` when the block ends without an error.

    After a crash at any moment `path` holds either the old content or the new content, never a part of it. If the
    block raises an error, the temporary file is deleted and `path` is left as it was.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with atomic_write(folder / "a.txt") as partial:
    ...     _ = partial.write_text("all of it", encoding="utf-8")
    >>> [path.name for path in folder.iterdir()]
    ['a.txt']
    """
    # The temporary file is in the same folder, because a rename is atomic within one file system only. Process id and
    # random digits keep two writers of one file apart. The leading dot and the suffix let `remove_partial` find it.
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        # This order matters. Content first: a file system may otherwise write the new name before the bytes, and a
        # power failure between the two leaves an empty file under `path`. The folder last: it holds the new name.
        _sync(partial)
        partial.replace(path)
        _sync(path.parent)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        # A write that fails, as on a full disk, does not say in which file.
        raise type(error)(error.errno, os.strerror(error.errno), str(path)) from error
    finally:
        # After the rename there is nothing to delete. A process killed by SIGKILL does not come here: its temporary
        # file stays behind until the next run in the folder calls `remove_partial`.
        partial.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Wait until the content of a file, or the list of names in a folder, is on the disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open a folder
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_partial(path: Path) -> bool:
    """Whether `path` is a temporary file of `atomic_write`: one in use, or one that a killed process left behind."""
    return path.match(".*.partial")


def remove_partial(folder: Path) -> None:
    """Delete the temporary files that a killed process left in `folder`.

    Call it while holding the folder's lock: without the lock it could delete a file that another process is writing.
    """
    for path in folder.glob(".*.partial"):
        path.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON, atomically; replace nan and infinity by None before, because JSON has neither."""
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """The content of a JSON file; a `ManymaxError` that names the file if it cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ManymaxError(f"{path} cannot be read: {error}. Remove it to begin again.") from None


def file_checksum(path: Path) -> str:
    """SHA-256 of the content of a file, in hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _seal(content: Mapping[str, Any]) -> str:
    """SHA-256 of what a JSON object says, however it is laid out."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with a checksum of itself, as the last of its entries."""
    read_again = json.loads(json.dumps(content, allow_nan=False))  # as a reader will see it
    write_json(path, {**read_again, CHECKSUM: _seal(read_again)})


def read_sealed(path: Path) -> dict[str, Any]:
    """The content of a file of `write_sealed`, or of a JSON object of version 0.1.0, which has no checksum.

    Raises:
        ManymaxError: the file is no JSON object, or not what was written.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ManymaxError(f"{path} cannot be read: it holds no JSON object. Remove it to begin again.")
    checksum = content.pop(CHECKSUM, None)
    if checksum is not None and checksum != _seal(content):
        raise ManymaxError(
            f"{path} is damaged: its checksum does not match its content. Get it back from a copy, or remove it to"
            " begin again."
        )
    return content


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder` while the block runs; the folder is created if it does not exist.

    Raises:
        FolderBusy: another process holds the lock. There is no waiting.
        ManymaxError: the folder cannot be created or written to.
    """
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
                raise FolderBusy(
                    f"another process is working in {folder}: wait for it to end, or choose another folder."
                ) from None
        yield
    finally:
        # Closing the descriptor releases the lock. The operating system does the same when the process is killed, so
        # no stale lock can keep a run from being resumed. The file itself stays: if it were deleted, two processes
        # could each hold a lock on a different file of this name.
        os.close(descriptor)
