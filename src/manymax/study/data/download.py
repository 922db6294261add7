"""Download of published files. An interrupted download is resumed, checksums are checked, and files appear complete.

A file NAME is received as NAME.part, with NAME.part.tag beside it, which says which version of the file the part is of.
A process that is killed leaves these two, and the next download appends to the part. NAME itself appears only when all
bytes have arrived and the checksum is right.

A server may lie, and other users of the machine may write to the folder: no redirect leads to a local file, no body is
longer than `LARGEST_DOWNLOAD`, no link is followed when a part is written, and one process downloads into a folder at a
time.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from manymax.errors import ManymaxError
from manymax.study.data.sources.base import File, Source
from manymax.study.files import locked, read_json, write_json

DOWNLOAD_CHUNK = 1 << 20  # bytes that are read at a time
TIMEOUT = 60  # seconds without a byte
LARGEST_DOWNLOAD = 8 << 30  # of a file; the largest that is published here has 0.5 GB
FIRST_SEEN = "checksums.json"  # checksums of the first download, for files whose publisher gives none

Progress = Callable[[str, int, int | None], None]  # name of the file, bytes so far, bytes in all or None


class DownloadError(ManymaxError, OSError):
    """A file could not be fetched; the bytes that have arrived are kept, and the next attempt continues from there."""


def get(source: Source, folder: Path, progress: Progress = lambda *_: None) -> list[str]:
    """Download all files of a source into `folder`/NAME; files that exist already are only checked.

    Returns:
        One line per file that says what was done.
    """
    target = folder / source.name
    try:
        target.mkdir(parents=True, exist_ok=True)
        # No lock where nothing is missing: the folder may be one that this user cannot write to.
        complete = all((target / file.name).is_file() for file in source.files)
        with contextlib.nullcontext() if complete else locked(target):
            return [fetch(file, target, progress) for file in source.files]
    except DownloadError:
        raise
    except OSError as error:  # a full disk, a folder that cannot be written to
        raise DownloadError(f"{target} cannot be written to: {error.strerror or error}.") from None


def fetch(file: File, folder: Path, progress: Progress = lambda *_: None) -> str:
    """Download one file into `folder`.

    Returns:
        A line that says what was done and how the content was checked.

    Raises:
        DownloadError: the connection failed or broke off (the bytes that have arrived are kept), or the checksum is
            wrong (they are deleted; a file that existed before stays).
    """
    path, partial = folder / file.name, folder / f"{file.name}.part"
    expected = file.checksum or _first_seen(folder).get(file.name)
    if path.is_file() and (expected is None or _matches(path, expected)):
        return f"{file.name}: exists already; {_describe_check(file, folder, path)}"
    _receive(file.url, partial, progress)
    if expected is not None and not _matches(partial, expected):
        kind = expected.partition(":")[0]
        got = f"{kind}:{digest(partial, kind)}"
        _remove_part(partial)
        whose = "the publisher's" if file.checksum else "that of the first download"
        raise DownloadError(
            f"{file.url}: the checksum is {got}, but {whose} is {expected}. The file was damaged on the way, or its "
            "publisher has changed it; nothing was kept."
        )
    # Content on the disk first, then the name: after a power failure a file under its name is complete.
    with partial.open("rb") as stream:
        os.fsync(stream.fileno())
    partial.replace(path)
    _remove_part(partial)  # its tag; a kill before this line leaves a tag that the next download overwrites
    return f"{file.name}: {path.stat().st_size:,} bytes; {_describe_check(file, folder, path)}"


def _describe_check(file: File, folder: Path, path: Path) -> str:
    """How the content of a downloaded file was checked; notes the checksum of a first download without one."""
    if file.checksum:
        return f"the checksum is right ({file.checksum})"
    seen = _first_seen(folder)
    if file.name in seen:
        return f"the same as at the first download ({seen[file.name]})"
    checksum = f"sha256:{digest(path, 'sha256')}"
    write_json(folder / FIRST_SEEN, seen | {file.name: checksum})
    return f"its publisher gives no checksum; {checksum} was noted, and later downloads are compared with it"


def _first_seen(folder: Path) -> dict[str, str]:
    """The checksums of first downloads, by the names of the files."""
    path = folder / FIRST_SEEN
    return dict(read_json(path)) if path.is_file() else {}


def _receive(url: str, partial: Path, progress: Progress) -> None:
    """Append to `partial` the bytes of `url` that it lacks; if the server cannot send a part, receive all again."""
    tag = _read_tag(partial)
    # Without a tag it is not known which version of the file the part is of, so it is not used.
    have = partial.stat().st_size if tag and partial.is_file() and not partial.is_symlink() else 0
    headers = {"User-Agent": "manymax", "Accept-Encoding": "identity"}
    if have:
        # If-Range: if the file has changed since, the server sends all of the new one (200) and not a part (206).
        headers |= {"Range": f"bytes={have}-", "If-Range": tag}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as response:
            resumed = response.status == 206 and _first_byte(response) == have
            if response.status == 206 and not resumed:
                raise DownloadError(f"{url}: the server sent another part than the one asked for. Try again.")
            if not resumed:
                # Before the new tag: a kill between the two lines must not leave the tag of a new version beside the
                # bytes of an old one, to which the next download would append.
                partial.unlink(missing_ok=True)
            if _tag_file(partial).is_symlink():
                _tag_file(partial).unlink()
            _write_tag(partial, response)
            _write(response, partial, have if resumed else 0, progress)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # no bytes after `have`: the part was complete, or longer than the file
            _remove_part(partial)
            return _receive(url, partial, progress)
        raise DownloadError(f"{url}: the server answers {error.code} {error.reason}. Try again later.") from None
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
        raise _broken(url, partial, getattr(error, "reason", None) or error) from None
    return None


def _write(response: Any, partial: Path, have: int, progress: Progress) -> None:
    """Write the body of a response after the first `have` bytes of `partial`."""
    length = response.headers.get("Content-Length")
    total = have + int(length) if length and length.isdigit() else None
    done = have
    with _open_own(partial, os.O_APPEND if have else os.O_TRUNC) as stream:
        while chunk := response.read(DOWNLOAD_CHUNK):
            done += len(chunk)
            if done > LARGEST_DOWNLOAD:
                _remove_part(partial)
                raise DownloadError(
                    f"{response.url}: the server sends more than {LARGEST_DOWNLOAD:,} bytes, which no data set here"
                    " has; nothing was kept."
                )
            stream.write(chunk)
            progress(partial.stem, done, total)
    if total is not None and done < total:
        raise _broken(response.url, partial, f"{done:,} of {total:,} bytes arrived")


def _open_own(path: Path, how: int) -> BinaryIO:
    """Open a file to write to it; one that is a link is not followed, as it may lead to another file of this user."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | how, 0o644), "wb")


def _broken(url: str, partial: Path, reason: object) -> DownloadError:
    kept = partial.stat().st_size if partial.is_file() else 0
    advice = f"{kept:,} bytes are kept; the same command continues from there" if kept else "Try again later"
    return DownloadError(f"{url}: the connection failed ({reason}). {advice}.")


def _first_byte(response: Any) -> int | None:
    """The position of the first byte of a partial response: 100 if Content-Range is "bytes 100-199/200"."""
    start = (response.headers.get("Content-Range") or "").removeprefix("bytes ").partition("-")[0]
    return int(start) if start.isdigit() else None


def _write_tag(partial: Path, response: Any) -> None:
    """Keep what identifies the version of the file: bytes may only be appended to a part of the same version."""
    tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
    usable = tag is not None and not tag.startswith("W/")  # a weak tag does not promise equal bytes
    with _open_own(_tag_file(partial), os.O_TRUNC) as stream:
        stream.write(json.dumps(tag if usable else None).encode())


def _read_tag(partial: Path) -> str:
    """The tag beside a part; empty if there is none that can be used."""
    try:
        return str(json.loads(_tag_file(partial).read_text(encoding="utf-8")) or "")
    except (OSError, ValueError):
        return ""


def _tag_file(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.tag")


def _remove_part(partial: Path) -> None:
    """Delete a part and its tag."""
    partial.unlink(missing_ok=True)
    _tag_file(partial).unlink(missing_ok=True)


def _matches(path: Path, checksum: str) -> bool:
    kind, _, wanted = checksum.partition(":")
    return digest(path, kind) == wanted


def digest(path: Path, kind: str) -> str:
    """The checksum of a file as hex digits; `kind` is "sha256", "md5", or "git", the id that git gives to the content.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "empty"
    >>> path.touch()
    >>> digest(path, "git")  # what `git hash-object` says
    'e69de29bb2d1d6434b8b29ae775ad8c2e48c5391'
    """
    # MD5 and SHA-1 are good enough to notice damage, and they are what publishers give.
    checksum = hashlib.new("sha1" if kind == "git" else kind, usedforsecurity=False)
    if kind == "git":
        checksum.update(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as stream:
        while chunk := stream.read(DOWNLOAD_CHUNK):
            checksum.update(chunk)
    return checksum.hexdigest()
