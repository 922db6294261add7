"""Reading of packed files, which strangers may have made: no more is unpacked than a data set can hold."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from manymax.errors import ArgumentError

UNREADABLE = (OSError, EOFError, zlib.error)  # errors for a file that is damaged, cut off or cannot be opened
# Tables and reviews become smaller by 3 to 30 times; a file made to fill memory by up to 1,030 times.
MOST_GROWTH = 100
ALWAYS_ALLOWED = 1 << 28  # bytes that any file may unpack to


def check_size(name: str, packed: int, unpacked: int) -> None:
    """Raise if a file of `packed` bytes unpacks to more than any table does."""
    most = max(ALWAYS_ALLOWED, MOST_GROWTH * packed)
    if unpacked > most:
        raise ArgumentError(
            f"{name} has {packed:,} bytes and unpacks to more than {most:,}: that is no table. If you know that it is,"
            " unpack it yourself and pass what comes out."
        )


class _Bounded(io.RawIOBase):
    """An unpacked stream that ends with an error where it has become too long; without one if it is `quiet`."""

    def __init__(self, path: Path, quiet: bool = False) -> None:
        self.name, self.packed, self.done, self.quiet = path.name, path.stat().st_size, 0, quiet
        self.stream = gzip.GzipFile(path, "rb")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self.stream.readinto(buffer)
        self.done += count
        try:
            self.check()
        except ArgumentError:
            if not self.quiet:
                raise
            return 0
        return count

    def check(self) -> None:
        """Raise if it has become too long."""
        check_size(self.name, self.packed, self.done)

    def close(self) -> None:
        self.stream.close()
        super().close()


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading; a file whose name ends in .gz is decompressed."""
    return io.BufferedReader(_Bounded(path), 1 << 20) if path.suffix == ".gz" else path.open("rb")


@contextmanager
def arrow_stream(path: Path) -> Iterator[Any]:
    """`open_bytes` for pyarrow, which has a faster way to files that are not packed."""
    if path.suffix != ".gz":
        with pa.input_stream(str(path)) as stream:
            yield stream
        return
    # pyarrow reads in threads of its own. An error of ours that is raised in one of them may end the process when that
    # thread lets go of it: a stream that is too long ends instead, and the error is raised here.
    unpacked = _Bounded(path, quiet=True)
    with pa.PythonFile(io.BufferedReader(unpacked, 1 << 20), "r") as stream:
        yield stream
    unpacked.check()
