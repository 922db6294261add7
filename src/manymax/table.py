"""A named table: what `FAMILY`, `SAMPLERS` and the study's tables are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, TypeVar

from manymax.errors import unknown_name


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
    error with the nearest known one.
    """

    def __init__(self, kind: str, *rows: RowT) -> None:
        self.kind = kind
        self._rows = {row.name: row for row in rows}
        self._names = {name: row.name for row in rows for name in (row.name, *row.aliases)}

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
