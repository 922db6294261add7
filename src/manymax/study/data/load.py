"""Loading of data: find what a name or a path stands for, and read it."""

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
from manymax.study.data.planted import DEFAULT_SIZE, SIZES, PlantedLaw, Size, parse_size, plant
from manymax.study.data.sources import RAW_FORMATS, SOURCES, Columns, Filters, RawFormat, Source
from manymax.study.data.sources import table as own_table
from manymax.study.data.sources.table import TableOptions

# Names of planted data, with or without a size. A file of such a name must be given with a folder: ./planted
PLANTED_NAME = re.compile(r"planted(-[\w-]+)?")


@dataclass(frozen=True)
class Loaded:
    """Data as it was read, before any filter.

    Args:
        interactions: all interactions.
        truth: p(item | user) of planted data; None for other data.
    """

    interactions: Interactions
    truth: PlantedLaw | None = None

    def filters(self, preset: str | None) -> Filters:
        """The filters that `preset` stands for with this data set; no filters if `preset` is None."""
        if preset is None:
            return Filters()
        name = self.interactions.name
        presets = SOURCES[name].presets if name in SOURCES else {}
        if not presets:
            known = ", ".join(source for source, row in SOURCES.items() if row.presets)
            raise ArgumentError(
                f"`preset` {preset!r} stands for the filters that the paper used on its own data sets ({known}); "
                f"{name!r} is not one of them. Set `min_rating` and `k_core` instead. If the file holds one of these "
                "sets, say which one with `name`."
            )
        if preset not in presets:
            raise unknown_name(f"preset of {name}", preset, presets)
        return presets[preset]


def cache() -> Path:
    """The folder for downloads: $MANYMAX_CACHE, or else the cache folder of this operating system."""
    return Path(os.environ.get("MANYMAX_CACHE") or platformdirs.user_cache_dir("manymax", appauthor=False))


def load(
    data: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    encoding: str | None = None,
    date_format: str | None = None,
    drop_missing: bool = False,
    seed: int = 0,
    size: str | None = None,
    name: str | None = None,
    folder: str | Path | None = None,
) -> Loaded:
    """Read all interactions of a data set.

    Args: those of `prepare` with the same names.
    """
    options = TableOptions(columns, encoding, date_format)
    if name is not None and (not name or set(name) & {"/", "\\"} or name in (".", "..")):
        raise ArgumentError(f"`name` becomes part of file names, so it must not contain / or \\; got {name!r}.")
    if isinstance(data, str) and PLANTED_NAME.fullmatch(data):
        _only_for_tables(options, data)
        return _planted(data, size, seed)
    if size is not None:
        raise ArgumentError(
            f"`size` has a meaning for planted data only; got {size!r} with {str(data)!r}. Leave it out."
        )
    if isinstance(data, str) and data in SOURCES:
        _only_for_tables(options, data)
        return Loaded(_named(SOURCES[data], Path(folder) if folder else cache(), drop_missing))
    return Loaded(_file(_expand_home(Path(data)), options, name, drop_missing))


def changed_files(data: str, files: Mapping[str, str], options: TableOptions = TableOptions()) -> list[str]:  # noqa: B008
    """The names of those files of `data` whose content has changed; files that do not exist any more do not count.

    Args:
        data: a name or a path, as for `load`.
        files: {name: sha256} of the files when `data` was read.
        options: how its table is read.
    """
    if PLANTED_NAME.fullmatch(data):
        return []
    if data in SOURCES:
        paths = SOURCES[data].paths(cache())
    else:
        found = _find_format(_expand_home(Path(data)), options)
        paths = [] if found is None else found[1]
    return [path.name for path in paths if path.name in files and path.is_file() and _sha256(path) != files[path.name]]


def _sha256(path: Path) -> str:
    """The checksum of a file, computed once per process and version of the file: a study asks for it once per run."""
    status = path.stat()
    return _sha256_of(path, status.st_size, status.st_mtime_ns)


@lru_cache
def _sha256_of(path: Path, size: int, changed_at: int) -> str:
    # `size` and `changed_at` are not used: they make the cache forget a file that has changed.
    return digest(path, "sha256")


def _expand_home(path: Path) -> Path:
    """The path with ~ replaced by the home folder."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ArgumentError(f"{path} does not exist: {error}") from None


def _planted(data: str, size: str | None, seed: int) -> Loaded:
    """Planted data with the name "planted" or "planted-SIZE"."""
    planted_size(data, size)  # an error, if the size is wrong
    return Loaded(*plant(size or _size_in_name(data) or DEFAULT_SIZE, seed))


def _size_in_name(data: str) -> str:
    return data.removeprefix("planted").removeprefix("-")


def planted_size(data: str, size: str | None) -> Size | None:
    """The size of planted data with the name "planted" or "planted-SIZE"; None for other data.

    Raises:
        ManymaxError: there is no such size.
    """
    if not PLANTED_NAME.fullmatch(data):
        return None
    in_name = _size_in_name(data)
    if in_name and size is not None and size != in_name:
        raise ArgumentError(f"`size` {size!r} is not the size in the name {data!r}. Give one of them.")
    try:
        return parse_size(size or in_name or DEFAULT_SIZE)
    except ManymaxError as error:
        # A misspelt name of a size ("planted-smal") is an unknown data set; of "planted-5x3x2" the size is wrong.
        if size is None and "x" not in in_name:
            raise unknown_name("data set", data, [*SOURCES, *(f"planted-{each}" for each in SIZES)]) from error
        raise


def _named(source: Source, folder: Path, drop_missing: bool) -> Interactions:
    """Read a named data set from the files in `folder`."""
    paths = source.paths(folder)
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise ArgumentError(
            f"{source.name} has not been downloaded ({missing[0]} is missing). Fetch it with `manymax data get "
            f"{source.name}`, or give the path of a file that you have."
        )
    assert source.read is not None
    return _finish(source.read(paths), source.name, paths, drop_missing)


def _file(path: Path, options: TableOptions, name: str | None, drop_missing: bool) -> Interactions:
    """Read a file or folder, in whatever format it has."""
    if not path.exists():
        # With a suffix or a folder it is meant as a path; otherwise it may be a misspelt name of a data set.
        if path.suffix or path.parent != Path():
            raise ArgumentError(f"{path} does not exist.")
        raise ArgumentError(f"{unknown_name('data set', str(path), SOURCES)} There is no file of that name either.")
    known = _find_format(path, options)
    if known is None:
        suffixes = ", ".join(own_table.TABLE_SUFFIXES)
        raise ArgumentError(
            f"{path} has no known format: expected a table ({suffixes}), or MovieLens, Gowalla or Amazon reviews as "
            "they are published."
        )
    file_format, paths = known
    if file_format.read is own_table.read:
        found = own_table.read(paths, options)
    else:
        _only_for_tables(options, str(path))
        found = file_format.read(paths)
    return _finish(found, name or data_name(path), paths, drop_missing)


def _find_format(path: Path, options: TableOptions) -> tuple[RawFormat, list[Path]] | None:
    """The format of the data at `path`, and its files; None if the format is not known."""
    for file_format in RAW_FORMATS:
        # A caller who says how to read it means a table: "ratings_mine.csv" is then not taken for Amazon's ratings.
        if options.given and file_format.read is not own_table.read and own_table.find(path):
            continue
        if (paths := file_format.find(path)) is not None:
            return file_format, paths
    return None


def _only_for_tables(options: TableOptions, data: str) -> None:
    for name in options.given:
        raise ArgumentError(f"`{name}` is for tables of your own; how {data} is read is known already. Leave it out.")


def data_name(path: Path) -> str:
    """The name of the data in a file: that of the set with such a file, else the file's name without suffixes."""
    for source in SOURCES.values():
        if [path.name] == [file.name for file in source.files]:
            return source.name
    name = path.resolve().name
    while Path(name).suffix in (".gz", ".zip", ".dat", *own_table.TABLE_SUFFIXES):
        name = Path(name).stem
    return SOURCES[name].name if name in SOURCES else name


def _finish(columns: Columns, name: str, paths: Iterable[Path], drop_missing: bool) -> Interactions:
    """Interactions with the first step on their card: the name of the data and the checksums of its files."""
    name = SOURCES[name].name if name in SOURCES else name
    files = {path.name: digest(path, "sha256") for path in paths}
    return columns.interactions(name, drop_missing=drop_missing, data=name, files=files)
