"""Gradients of a sparse member that are kept as entries, for code that sums them up class by class later."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manymax.engine import native
from manymax.engine.blocks import Dense, Listed, Mixed, Sparse
from manymax.engine.gradients import Gradients


@dataclass
class KeptEntries(Gradients):
    """Keeps every entry of the gradient in the scores instead of adding them up: 12 bytes each."""

    def add(self, start: int, part: Dense | Sparse | Mixed | Listed, capped: Tensor | None = None) -> None:
        """Keep a part of the gradient of the block that begins at row `start`; `capped` as in `Scoring.chain`."""
        if isinstance(part, Listed):
            for each in part.apart():
                self.add(start, each)
            return
        if not self.scoring.plain:
            part = self.scoring.chain(part, capped)
        for each in self._listed(part):
            if len(each.rows):
                # As int32, half of the memory: there are fewer than 2^31 rows, and classes are numbers of rows too.
                rows, classes = (each.rows + start).int(), each.classes.int()
                self.entries.append(Sparse(rows, classes, each.values))

    def _listed(self, part: Dense | Sparse | Mixed) -> list[Sparse]:
        """A part as entries; wide rows become entries too, those that are not zero."""
        if isinstance(part, Sparse):
            return [part]
        if isinstance(part, Dense):
            rows, classes = part.table[:, : self.num_classes].nonzero(as_tuple=True)
            values = part.table[rows, classes] * part.coefficient[rows].to(part.table.dtype)
            return [Sparse(rows if part.rows is None else part.rows[rows], classes, values)]
        found = [native.list_entries(part)]
        if len(wide := (part.count < 0).nonzero().squeeze(1)):
            found += self._listed(Dense(part.table[wide], part.scale[wide], wide))
        return found

    def all_entries(self) -> Sparse:
        """All entries, in the order of the rows: rows and classes as int32."""
        if not self.entries:
            none = torch.empty(0, dtype=torch.int32, device=self.input.device)
            return Sparse(none, none, self.input.new_empty(0))
        kept = Sparse(
            *(torch.cat([getattr(each, name) for each in self.entries]) for name in ("rows", "classes", "values"))
        )
        self.entries.clear()
        return kept
