"""What a training loop asks of a backbone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor, nn

from manymax.study.data.batches import Batch


class Vectors(NamedTuple):
    """What one step computes once for everybody: (C, d) item vectors, and (U, d) user vectors where there are any."""

    items: Tensor
    users: Tensor | None = None


class Backbone(nn.Module, ABC):
    """A model that turns a batch into queries; scores are inner products of queries and item vectors.

    A step is

        vectors = backbone.vectors()
        queries = backbone.queries(batch, vectors)
        loss = head(queries, batch.target, vectors.items)
    """

    @abstractmethod
    def vectors(self) -> Vectors:
        """Item vectors (C, d), and user vectors if there are any; a graph backbone propagates here, once a step."""

    @abstractmethod
    def queries(self, batch: Batch, vectors: Vectors) -> Tensor:
        """(B, d): one query a row; or (B, T, d), one for each position, when the target has positions."""
