"""Computations: the ways in which the head of a run can compute an exact loss.

`COMPUTATIONS` is the table of those that the study has itself. `blocks` is the usual one; it does not enter the hash of
a run's settings. Any installed package can add others through entry points of the group "manymax.computations", in its
pyproject.toml:

    [project.entry-points."manymax.computations"]
    mine = "my_package.my_module:MINE"

where `MINE` is a `Computation` with the name "mine". The name alone makes it a choice on the command line. Its module
is imported when a run asks for it, in whatever process that is: workers need no further notice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from manymax.engine.member import Member
from manymax.errors import ManymaxError, unknown_name
from manymax.heads import LinearHead
from manymax.heads.build import head_class
from manymax.table import Table

USUAL = "blocks"
ENTRY_POINT_GROUP = "manymax.computations"


@dataclass(frozen=True)
class Computation:
    """One way to compute the loss of a member whose `kind` is "exact".

    takes: whether it can compute the loss of such a member.
    build: (member, num_items) to a head for the vectors of a backbone; None for the head of the member itself.
    options: the `options` keyword of that head.
    defaults_only: whether it knows only the default settings of the member, one positive per row and no smoothing.
    """

    name: str
    takes: Callable[[Member], bool]
    build: Callable[[Member, int], LinearHead] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    defaults_only: bool = False
    aliases: tuple[str, ...] = ()


COMPUTATIONS: Table[Computation] = Table(
    "computation",
    Computation(USUAL, takes=lambda member: True),
    Computation("compiled", takes=lambda member: member.native, options={"backend": "native"}),
)


def has_native_code(member: Member) -> bool:
    """Whether the native back end can do something for the head of a member, on a machine that has it.

    Exact heads share the products with class vectors, heads that draw negatives the code that gathers some of them.
    """
    return "backend" in head_class(member).honours


def computation_names() -> tuple[str, ...]:
    """The names of all computations, those of other packages too; no module of theirs is imported.

    >>> set(computation_names()) >= {"blocks", "compiled"}
    True
    """
    return tuple(dict.fromkeys((*COMPUTATIONS, *(entry.name for entry in _entries()))))


def find_computation(name: str) -> Computation:
    """The computation of a name; that of another package is imported when it is first asked for.

    Args:
        name: one of `computation_names()`, or an alias of a row of `COMPUTATIONS`.
    """
    if name in COMPUTATIONS:
        return COMPUTATIONS[name]
    # A package that is installed twice, say in a folder of sources and by its wheel, has equal entries.
    entries = {entry.value: entry for entry in _entries() if entry.name == name}
    if not entries:
        raise unknown_name(COMPUTATIONS.kind, name, computation_names())
    if len(entries) > 1:
        raise ManymaxError(f"computation {name!r} is offered twice, as {' and as '.join(entries)}: uninstall one.")
    return _load(*entries.values())


def _entries() -> tuple[EntryPoint, ...]:
    return _entries_along(tuple(sys.path))


@cache  # reading the metadata of all packages takes milliseconds, and a grid makes thousands of configs
def _entries_along(search_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


@cache
def _load(entry: EntryPoint) -> Computation:
    try:
        found = entry.load()
    except (ImportError, AttributeError) as error:
        raise ManymaxError(f"computation {entry.name!r} cannot be loaded from {entry.value}: {error}.") from None
    if not isinstance(found, Computation) or found.name != entry.name:
        raise ManymaxError(f"{entry.value} must be a `Computation` with the name {entry.name!r}; it is {found!r}.")
    return found
