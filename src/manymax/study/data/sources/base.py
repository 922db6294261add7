"""What a source is: files with an address and a checksum, a reader, and the filters that the paper used on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from manymax.study.data.sources.columns import Columns


class Filters(NamedTuple):
    """What is left out: interactions rated below `min_rating`, then what is not in the `k_core`."""

    min_rating: float | None = None
    k_core: int | None = None


@dataclass(frozen=True)
class File:
    """A file of a publisher.

    Args:
        url: where it is.
        name: what it is called in the cache.
        checksum: "md5:...", "sha256:..." or "git:..." (the id that git gives to the content); None where none is known
            for certain: the first download is then recorded, and later ones are held to it.
    """

    url: str
    name: str
    checksum: str | None = None


@dataclass(frozen=True)
class Source:
    """A data set by name.

    Args:
        name, aliases: what it is called.
        title: one line.
        files: what `manymax data get` fetches, in the order in which `read` wants their paths; empty for planted data.
        read: from the paths of the files to columns.
        presets: the paper's filters by name.
        terms: what its publisher allows.
        reference: what to cite.
    """

    name: str
    title: str
    files: tuple[File, ...] = ()
    read: Callable[..., Columns] | None = None
    presets: Mapping[str, Filters] = field(default_factory=dict)
    terms: str = ""
    citation: str = ""
    aliases: tuple[str, ...] = ()

    def paths(self, folder: Path) -> list[Path]:
        """Where the files are once they have been fetched into `folder`."""
        return [folder / self.name / file.name for file in self.files]
