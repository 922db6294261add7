"""`Source`, a row of `SOURCES`: files with addresses and checksums, their reader, and the filters of the paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from manymax.study.data.sources.columns import Columns


class Filters(NamedTuple):
    """The filters of a preset: drop ratings below `min_rating`, then keep the `k_core`; None means no such filter."""

    min_rating: float | None = None
    k_core: int | None = None


@dataclass(frozen=True)
class File:
    """A published file.

    Args:
        url: its address.
        name: its name in the cache.
        checksum: "md5:...", "sha256:..." or "git:..." (the id that git gives to the content). None if no reliable one
            is known: the checksum of the first download is then noted, and later downloads are compared with it.
    """

    url: str
    name: str
    checksum: str | None = None


@dataclass(frozen=True)
class Source:
    """A data set that has a name.

    Args:
        name, aliases: its names.
        title: one line that describes it.
        files: the files that `manymax data get` downloads, in the order in which `read` takes their paths; empty for
            planted data.
        read: from the paths of the files to columns; None for planted data.
        presets: the filters that the paper used, by the name of the preset.
        terms: what its publisher permits.
        citation: the publications to cite.
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
        """The paths of the files after a download into `folder`."""
        return [folder / self.name / file.name for file in self.files]
