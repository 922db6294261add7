"""LightGCN: matrix factorisation whose vectors are averaged over the neighbours in the graph of interactions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from manymax.study.backbones.base import LAYERS, Backbone, BackboneEntry, Settings, Vectors, draw_weights
from manymax.study.data.batches import Batch
from manymax.study.data.interactions import Lists, Split


class Propagation(torch.autograd.Function):
    """X -> f(X) for the linear, symmetric f of a `Graph`.

    The gradient with respect to X is f(gradient of the output), so nothing of the forward pass need be kept. Autograd
    through the rounds would keep one (U + C, d) matrix per round.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, graph: Graph) -> Tensor:
        ctx.graph = graph
        return graph.mean_of_rounds(vectors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Propagation.apply(grad, ctx.graph), None


class Graph(nn.Module):
    """The bipartite graph of interactions; its nodes are the users, then the items.

        A = D^-1/2 B D^-1/2,  f(X) = (X + A X + ... + A^L X) / (L + 1)

    B is the 0/1 adjacency matrix and D the diagonal matrix of degrees. A is symmetric, and so is f. A row of A X is a
    weighted sum over neighbours, computed by `embedding_bag`, which is several times faster than torch's product with a
    sparse matrix.

    Args:
        train: one list of items per user; repeated items count once.
        num_items: C.
        layers: L.
    """

    neighbours: Tensor
    offsets: Tensor
    weights: Tensor

    def __init__(self, train: Lists, num_items: int, layers: int) -> None:
        super().__init__()
        self.layers = layers
        pairs = (train.users() * num_items + train.items).unique()  # sorted by user
        users, items = pairs // num_items, pairs % num_items
        by_item = items.argsort(stable=True)
        degrees = torch.cat([users.bincount(minlength=len(train)), items.bincount(minlength=num_items)])
        neighbours = torch.cat([items + len(train), users[by_item]])
        # An isolated node has scale 1 / sqrt(0) = inf, which is never used, because the node has no neighbours.
        scale = degrees.double().rsqrt()
        weights = scale.repeat_interleave(degrees) * scale[neighbours]
        # Not saved in checkpoints, because they follow from the data. int32 halves the bytes that a product reads.
        self.register_buffer("neighbours", neighbours.int(), persistent=False)
        self.register_buffer("offsets", nn.functional.pad(degrees.cumsum(0), (1, 0)).int(), persistent=False)
        self.register_buffer("weights", weights.float(), persistent=False)

    def forward(self, vectors: Tensor) -> Tensor:
        """f(X), (U + C, d)."""
        result: Tensor = Propagation.apply(vectors, self)
        return result

    def mean_of_rounds(self, vectors: Tensor) -> Tensor:
        """f(X), without recording gradients."""
        total, power = vectors.clone(), vectors
        for _ in range(self.layers):
            power = self.product(power)  # A^l X
            total += power
        return total.div_(self.layers + 1)

    def product(self, vectors: Tensor) -> Tensor:
        """A X."""
        weights = self.weights.to(vectors.dtype)
        return nn.functional.embedding_bag(
            self.neighbours,
            vectors,
            self.offsets,
            mode="sum",
            per_sample_weights=weights,
            include_last_offset=True,
        )


class LightGCN(Backbone):
    """s_uj = <p_u, q_j>, where the rows of f(X) are the user vectors p and the item vectors q (see `Graph`).

    Args:
        train: one list of items per user.
        num_items: C.
        dim: d.
        layers: number of rounds L; 0 gives matrix factorisation.

    References: He, Deng, Wang, Li, Zhang, Wang, "LightGCN", SIGIR 2020, equations 3 to 8.
    """

    def __init__(self, train: Lists, num_items: int, dim: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.users = nn.Embedding(len(train), dim)
        self.items = nn.Embedding(num_items, dim)
        self.graph = Graph(train, num_items, layers)

    def vectors(self) -> Vectors:
        """The user and item vectors of f(X)."""
        both = self.graph(torch.cat([self.users.weight, self.items.weight]))
        users, items = both.split([self.users.num_embeddings, self.items.num_embeddings])
        return Vectors(items, users)

    def queries(self, batch: Batch, vectors: Vectors) -> Tensor:
        """The propagated vectors of the users, (B, d)."""
        assert vectors.users is not None
        return nn.functional.embedding(batch.users, vectors.users)


def make(split: Split, settings: Settings, generator: torch.Generator) -> LightGCN:
    """LightGCN on the graph of the training part."""
    backbone = LightGCN(split.train, split.num_items, settings.dim, settings.layers)
    draw_weights(backbone, settings, generator)
    return backbone


ENTRY = BackboneEntry(
    name="lightgcn",
    title="LightGCN",
    make=make,
    citation="He et al., SIGIR 2020",
    settings=(LAYERS,),
)
