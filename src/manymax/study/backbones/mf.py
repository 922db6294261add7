"""Matrix factorisation: one vector per user and per item; scores are their inner products."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manymax.study.backbones.base import Backbone, BackboneEntry, Settings, Vectors, draw_weights
from manymax.study.data.batches import Batch
from manymax.study.data.interactions import Split


class MF(Backbone):
    """s_uj = <p_u, q_j>.

    Args:
        num_users, num_items: U, C.
        dim: d.
    """

    def __init__(self, num_users: int, num_items: int, dim: int = 64) -> None:
        super().__init__()
        self.users = nn.Embedding(num_users, dim)
        self.items = nn.Embedding(num_items, dim)

    def vectors(self) -> Vectors:
        """The weights of the two embeddings."""
        return Vectors(self.items.weight, self.users.weight)

    def queries(self, batch: Batch, vectors: Vectors) -> Tensor:
        """The vectors of the users, (B, d)."""
        return self.users(batch.users)


def make(split: Split, settings: Settings, generator: torch.Generator) -> MF:
    """Matrix factorisation for the users and items of a split."""
    backbone = MF(split.num_users, split.num_items, settings.dim)
    draw_weights(backbone, settings, generator)
    return backbone


ENTRY = BackboneEntry(
    name="mf",
    title="MF",
    make=make,
    citation="Koren, Bell, Volinsky, Computer 42(8), 2009",
    aliases=("matrix_factorization",),
    factors=True,
)
