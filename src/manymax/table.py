"""`Table`: a registry of named rows. `FAMILY`, `SAMPLERS` and the tables of `study` are tables of this kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeVar

from manymax.errors import ArgumentError, unknown_name


class Row(Protocol):
    """A row of a table: any object with a name and aliases, which may be empty."""

    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]: ...


RowT = TypeVar("RowT", bound=Row)


class Table(Mapping[str, RowT]):
    """An ordered mapping from names to rows, in which a row is also found by its aliases.

    Iteration gives the names, without aliases, in the order of the rows. An unknown name raises an error that suggests
    the nearest known one. `version` grows whenever the rows change, so that what was computed from the table can be
    recognised as out of date.

    Args:
        kind: what a row is, for messages: "loss", "sampler".
        rows: the first rows.
    """

    def __init__(self, kind: str, *rows: RowT) -> None:
        self.kind, self.version = kind, 0
        self._rows: dict[str, RowT] = {}
        self._names: dict[str, str] = {}
        for row in rows:
            self.add(row)

    def add(self, row: RowT) -> None:
        """Add a row at the end; raises if its name or one of its aliases is in the table already."""
        names = (row.name, *row.aliases)
        for name in names:
            if name in self._names:
                raise ArgumentError(
                    f"{self.kind} {name!r} is in the table already, as {self._names[name]!r}: choose another name."
                )
        self._rows[row.name] = row
        self._names |= dict.fromkeys(names, row.name)
        self.version += 1

    @contextmanager
    def extended(self, *rows: RowT) -> Iterator[None]:
        """Context in which the table has more rows; afterwards it is as it was before."""
        before = self._rows.copy(), self._names.copy()
        try:
            for row in rows:
                self.add(row)
            yield
        finally:
            self._rows, self._names = before
            self.version += 1

    def __getitem__(self, name: str) -> RowT:
        if name not in self._names:
            raise unknown_name(self.kind, name, self._names)
        return self._rows[self._names[name]]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<{self.kind} table: {', '.join(self)}>"
