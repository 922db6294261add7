"""A named table: what `FAMILY`, `SAMPLERS` and the study's tables are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeVar

from manymax.errors import ArgumentError, unknown_name


class Row(Protocol):
    """What a table holds: anything with a name and, if it likes, other names for itself."""

    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]: ...


RowT = TypeVar("RowT", bound=Row)


class Table(Mapping[str, RowT]):
    """An ordered mapping from canonical names to rows that also answers to aliases.

    Iteration gives the canonical names in the order of the rows; an unknown name raises an
    error with the nearest known one. `version` grows whenever the rows change.
    """

    def __init__(self, kind: str, *rows: RowT) -> None:
        self.kind, self.version = kind, 0
        self._rows: dict[str, RowT] = {}
        self._names: dict[str, str] = {}
        for row in rows:
            self.add(row)

    def add(self, row: RowT) -> None:
        """Put another row at the end; whoever reads the table from now on knows it by its name and its aliases.

        An error if one of these names is taken.
        """
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
        """The table with more rows while the block lasts; afterwards it is as it was."""
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
