"""Fetch a publisher's files: resumed where it broke off, checked, and there whole or not at all."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manymax.errors import ManymaxError
from manymax.study.data.sources.base import File, Source
from manymax.study.files import read_json, write_json

CHUNK = 1 << 20  # bytes
TIMEOUT = 60  # seconds without a byte
FIRST_SEEN = "checksums.json"  # of files whose publisher gives none: what the first download had

Progress = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all where that is known


class DownloadError(ManymaxError, OSError):
    """A file could not be fetched; what has arrived is kept and the next attempt goes on from there."""


def get(source: Source, folder: Path, progress: Progress = lambda *_: None) -> list[str]:
    """Fetch all files of a source into `folder`/NAME; what is there already is only checked.

    Returns:
        a sentence on each file.
    """
    target = folder / source.name
    try:
        target.mkdir(parents=True, exist_ok=True)
        return [fetch(file, target, progress) for file in source.files]
    except DownloadError:
        raise
    except OSError as error:  # a full disk, a folder that cannot be written to
        raise DownloadError(f"{target} cannot be written to: {error.strerror or error}.") from None


def fetch(file: File, folder: Path, progress: Progress = lambda *_: None) -> str:
    """Fetch one file into `folder`.

    Returns:
        a sentence on what was done and how far it can be trusted.

    Raises:
        DownloadError: the connection failed or broke off (what came is kept), or the checksum is wrong (nothing is
            kept, and a file that was there before stays).
    """
    path, partial = folder / file.name, folder / f"{file.name}.part"
    expected = file.checksum or _first_seen(folder).get(file.name)
    if path.is_file() and (expected is None or _matches(path, expected)):
        return f"{file.name}: was there already; {_trust(file, folder, path)}"
    _receive(file.url, partial, progress)
    if expected is not None and not _matches(partial, expected):
        kind = expected.partition(":")[0]
        got = f"{kind}:{digest(partial, kind)}"
        _forget(partial)
        whose = "the publisher's" if file.checksum else "that of the first download"
        raise DownloadError(
            f"{file.url}: the checksum is {got}, {whose} is {expected}. The file was damaged on its way, or it is "
            "another one now; nothing was kept."
        )
    with partial.open("rb") as stream:
        os.fsync(stream.fileno())
    partial.replace(path)
    _forget(partial)
    return f"{file.name}: {path.stat().st_size:,} bytes; {_trust(file, folder, path)}"


def _trust(file: File, folder: Path, path: Path) -> str:
    if file.checksum:
        return f"checksum right ({file.checksum})"
    seen = _first_seen(folder)
    if file.name in seen:
        return f"the same as at the first download ({seen[file.name]})"
    checksum = f"sha256:{digest(path, 'sha256')}"
    write_json(folder / FIRST_SEEN, seen | {file.name: checksum})
    return f"its publisher gives no checksum; recorded {checksum} to hold later downloads to it"


def _first_seen(folder: Path) -> dict[str, str]:
    path = folder / FIRST_SEEN
    return dict(read_json(path)) if path.is_file() else {}


def _receive(url: str, partial: Path, progress: Progress) -> None:
    """Append to `partial` what is missing of `url`; a server that cannot do that sends it all again."""
    tag = _tag(partial)
    have = partial.stat().st_size if tag and partial.is_file() else 0
    headers = {"User-Agent": "manymax", "Accept-Encoding": "identity"}
    if have:
        # If-Range: should the file have changed since, the server sends the whole new one.
        headers |= {"Range": f"bytes={have}-", "If-Range": tag}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as response:
            resumed = response.status == 206 and _start(response) == have
            if response.status == 206 and not resumed:
                raise DownloadError(f"{url}: the server sent another part than the one asked for. Try again.")
            _remember(partial, response)
            _write(response, partial, have if resumed else 0, progress)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing after `have`: it was complete, or never fitted
            _forget(partial)
            return _receive(url, partial, progress)
        raise DownloadError(f"{url}: the server answers {error.code} {error.reason}. Try again later.") from None
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
        raise _broken(url, partial, getattr(error, "reason", None) or error) from None
    return None


def _write(response: Any, partial: Path, have: int, progress: Progress) -> None:
    length = response.headers.get("Content-Length")
    total = have + int(length) if length and length.isdigit() else None
    done = have
    with partial.open("ab" if have else "wb") as stream:
        while chunk := response.read(CHUNK):
            stream.write(chunk)
            done += len(chunk)
            progress(partial.stem, done, total)
    if total is not None and done < total:
        raise _broken(response.url, partial, f"{done:,} of {total:,} bytes arrived")


def _broken(url: str, partial: Path, reason: object) -> DownloadError:
    kept = partial.stat().st_size if partial.is_file() else 0
    advice = f"{kept:,} bytes are kept; the same command goes on from there" if kept else "Try again later"
    return DownloadError(f"{url}: the connection failed ({reason}). {advice}.")


def _start(response: Any) -> int | None:
    """The first byte that a partial answer holds: 100 of "bytes 100-199/200"."""
    start = (response.headers.get("Content-Range") or "").removeprefix("bytes ").partition("-")[0]
    return int(start) if start.isdigit() else None


def _remember(partial: Path, response: Any) -> None:
    """Keep what identifies the version of the file, without which it is not safe to append to it."""
    tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
    usable = tag is not None and not tag.startswith("W/")  # a weak tag is no promise of equal bytes
    _tag_file(partial).write_text(json.dumps(tag if usable else None), encoding="utf-8")


def _tag(partial: Path) -> str:
    try:
        return str(json.loads(_tag_file(partial).read_text(encoding="utf-8")) or "")
    except (OSError, ValueError):
        return ""


def _tag_file(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.tag")


def _forget(partial: Path) -> None:
    partial.unlink(missing_ok=True)
    _tag_file(partial).unlink(missing_ok=True)


def _matches(path: Path, checksum: str) -> bool:
    kind, _, wanted = checksum.partition(":")
    return digest(path, kind) == wanted


def digest(path: Path, kind: str) -> str:
    """The checksum of a file: "sha256", "md5", or "git", which is how git names the content.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "empty"
    >>> path.touch()
    >>> digest(path, "git")  # what `git hash-object` says
    'e69de29bb2d1d6434b8b29ae775ad8c2e48c5391'
    """
    # md5 and sha1 tell damage from a whole file; they are what publishers give.
    summed = hashlib.new("sha1" if kind == "git" else kind, usedforsecurity=False)
    if kind == "git":
        summed.update(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            summed.update(chunk)
    return summed.hexdigest()
