"""How the head of a run computes its loss: a table that other rooms may add rows to.

`blocks` is the usual way and tells no runs apart. The rows of `PROVIDERS` are added when somebody first asks for the
table, in whatever process that is, so that a worker knows the computations that its study names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from manymax.engine.member import Member
from manymax.heads import LinearHead
from manymax.table import Table

USUAL = "blocks"
PROVIDERS = ["manymax.paper.whole_table"]  # modules that add rows when they are imported


@dataclass(frozen=True)
class Computation:
    """One row of the table.

    takes: whether it can compute the loss of a member.
    build: (member, num_items) to a head for the vectors of a backbone; None for the head of the member itself.
    options: what that head is told about its computation.
    defaults_only: whether it knows the member at its default settings alone, one positive a row and no smoothing.
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
    Computation("compiled", takes=lambda member: member.native, options={"compiled": True}),
)


def computations() -> Table[Computation]:
    """The table with the rows of all providers."""
    for module in PROVIDERS:
        importlib.import_module(module)
    return COMPUTATIONS
