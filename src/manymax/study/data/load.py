"""Find what a name or a path stands for, and read it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import platformdirs

from manymax.errors import ArgumentError, ManymaxError, unknown_name
from manymax.study.data.download import digest
from manymax.study.data.interactions import Interactions
from manymax.study.data.planted import DEFAULT, SIZES, PlantedLaw, plant
from manymax.study.data.sources import FORMATS, SOURCES, Columns, Filters, Format, Source
from manymax.study.data.sources import table as own_table

PLANTED_NAME = re.compile(r"planted(-[\w-]+)?")  # a name, also where a file is called so: ./planted is that file


@dataclass(frozen=True)
class Loaded:
    """Data as it was found.

    Args:
        interactions: all of them.
        truth: p(item | user), of planted data.
    """

    interactions: Interactions
    truth: PlantedLaw | None = None

    def filters(self, preset: str | None) -> Filters:
        """The filters that `preset` means for this set."""
        if preset is None:
            return Filters()
        name = self.interactions.name
        presets = SOURCES[name].presets if name in SOURCES else {}
        if not presets:
            known = ", ".join(source for source, row in SOURCES.items() if row.presets)
            raise ArgumentError(
                f"`preset` {preset!r} is what the paper did to its own sets ({known}); {name!r} is none of them. Say "
                "what to filter with `min_rating` and `k_core`, or, if the file holds one of these sets, which one "
                "with `name`."
            )
        if preset not in presets:
            raise unknown_name(f"preset of {name}", preset, presets)
        return presets[preset]


def cache() -> Path:
    """The folder for downloads: $MANYMAX_CACHE, or what is usual on this system."""
    return Path(os.environ.get("MANYMAX_CACHE") or platformdirs.user_cache_dir("manymax", appauthor=False))


def load(
    data: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    seed: int = 0,
    size: str | None = None,
    name: str | None = None,
    folder: str | Path | None = None,
) -> Loaded:
    """Read all interactions of a data set. Args: as of `prepare`."""
    if name is not None and (not name or set(name) & {"/", "\\"} or name in (".", "..")):
        raise ArgumentError(f"`name` becomes part of file names, so it must hold no / or \\; got {name!r}.")
    if isinstance(data, str) and PLANTED_NAME.fullmatch(data):
        _only_for_tables(columns, data)
        return _planted(data, size, seed)
    if size is not None:
        raise ArgumentError(f"`size` is of planted data; got {size!r} with {str(data)!r}. Leave it out.")
    if isinstance(data, str) and data in SOURCES:
        _only_for_tables(columns, data)
        return Loaded(_named(SOURCES[data], Path(folder) if folder else cache()))
    return Loaded(_file(_at_home(Path(data)), columns, name))


def changed_files(data: str, files: Mapping[str, str], columns: Mapping[str, str] | None = None) -> list[str]:
    """Which of the files {name: sha256} that `data` was read from have other content now; those gone do not count."""
    if PLANTED_NAME.fullmatch(data):
        return []
    if data in SOURCES:
        paths = SOURCES[data].paths(cache())
    else:
        found = _form(_at_home(Path(data)), columns)
        paths = [] if found is None else found[1]
    return [path.name for path in paths if path.name in files and path.is_file() and _sha256(path) != files[path.name]]


def _sha256(path: Path) -> str:
    status = path.stat()
    return _sha256_of(path, status.st_size, status.st_mtime_ns)


@lru_cache
def _sha256_of(path: Path, size: int, changed_at: int) -> str:
    return digest(path, "sha256")


def _at_home(path: Path) -> Path:
    """The path, with ~ put in full."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ArgumentError(f"{path} does not exist: {error}") from None


def _planted(data: str, size: str | None, seed: int) -> Loaded:
    """`planted`, or `planted-SIZE`."""
    of_name = data.removeprefix("planted").removeprefix("-")
    if of_name and size is not None and size != of_name:
        raise ArgumentError(f"`size` {size!r} is not that of {data!r}. Give one of them.")
    try:
        interactions, truth = plant(size or of_name or DEFAULT, seed)
    except ManymaxError as error:
        if size is None and "x" not in of_name:
            raise unknown_name("data set", data, [*SOURCES, *(f"planted-{each}" for each in SIZES)]) from error
        raise
    return Loaded(interactions, truth)


def _named(source: Source, folder: Path) -> Interactions:
    paths = source.paths(folder)
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise ArgumentError(
            f"{source.name} is not there ({missing[0]} is missing). Fetch it with `manymax data get {source.name}`, or "
            "name a file that you have in place of it."
        )
    assert source.read is not None
    return _finish(source.read(paths), source.name, paths)


def _file(path: Path, columns: Mapping[str, str] | None, name: str | None) -> Interactions:
    if not path.exists():
        if path.suffix or path.parent != Path():
            raise ArgumentError(f"{path} does not exist.")
        raise ArgumentError(f"{unknown_name('data set', str(path), SOURCES)} There is no file of that name either.")
    known = _form(path, columns)
    if known is None:
        suffixes = ", ".join(own_table.SUFFIXES)
        raise ArgumentError(
            f"{path} is of no known format: expected a table ({suffixes}), or MovieLens, Gowalla or Amazon reviews as "
            "they are published."
        )
    form, paths = known
    if form.read is own_table.read:
        found = own_table.read(paths, columns)
    else:
        _only_for_tables(columns, str(path))
        found = form.read(paths)
    return _finish(found, name or _name(path), paths)


def _form(path: Path, columns: Mapping[str, str] | None) -> tuple[Format, list[Path]] | None:
    """The format of what is at `path`, and its files."""
    for form in FORMATS:
        if columns and form.read is not own_table.read and own_table.find(path):
            continue  # whoever names columns says that it is a table
        if (paths := form.find(path)) is not None:
            return form, paths
    return None


def _only_for_tables(columns: Mapping[str, str] | None, data: str) -> None:
    if columns:
        raise ArgumentError(f"`columns` is for own tables; {data} has columns that are known. Leave it out.")


def _name(path: Path) -> str:
    """What the data in a file is called: the set with such a file, or the name of the file without its suffixes."""
    for source in SOURCES.values():
        if [path.name] == [file.name for file in source.files]:
            return source.name
    name = path.resolve().name
    while Path(name).suffix in (".gz", ".zip", ".json", ".jsonl", ".dat", *own_table.SUFFIXES):
        name = Path(name).stem
    return SOURCES[name].name if name in SOURCES else name


def _finish(columns: Columns, name: str, paths: Iterable[Path]) -> Interactions:
    name = SOURCES[name].name if name in SOURCES else name
    interactions = columns.interactions(name)
    figures = {"data": name, "files": {path.name: digest(path, "sha256") for path in paths}}
    notes = {"note": "; ".join(columns.notes)} if columns.notes else {}
    return interactions.with_step("raw", **figures, **notes)
