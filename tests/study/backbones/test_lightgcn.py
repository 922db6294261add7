"""LightGCN: propagation equals the product with the dense matrix of its formula, forwards and backwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from manymax.study.backbones.lightgcn import Graph, LightGCN
from manymax.study.data.batches import Batch
from manymax.study.data.interactions import Lists

ROWS = [[0, 2, 2], [2], [], [1, 0, 4]]  # a repeated pair, a user and an item (3) without neighbours
U, C = len(ROWS), 5


@pytest.fixture
def lists() -> Lists:
    users = torch.tensor([user for user, items in enumerate(ROWS) for _ in items])
    return Lists.from_pairs(users, torch.tensor([item for items in ROWS for item in items]), U)


def dense(layers: int) -> Tensor:
    """(I + A + ... + A^L) / (L + 1), from the definition."""
    adjacency = torch.zeros(U + C, U + C, dtype=torch.float64)
    for user, items in enumerate(ROWS):
        for item in items:
            adjacency[user, U + item] = adjacency[U + item, user] = 1
    degrees = adjacency.sum(1)
    scale = torch.where(degrees > 0, degrees.clamp(min=1) ** -0.5, 0)
    step = scale[:, None] * adjacency * scale
    return sum((torch.linalg.matrix_power(step, power) for power in range(layers + 1)), torch.zeros(())) / (layers + 1)


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_propagation_is_the_mean_of_powers(layers: int, lists: Lists, seed: int) -> None:
    graph, vectors = Graph(lists, C, layers), torch.randn(U + C, 4, dtype=torch.float64)
    torch.testing.assert_close(graph(vectors), dense(layers) @ vectors, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(graph(vectors.float()), (dense(layers) @ vectors).float())


def test_gradients(lists: Lists, seed: int) -> None:
    graph = Graph(lists, C, 2)
    vectors = torch.randn(U + C, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(graph, (vectors,))
    assert torch.autograd.gradgradcheck(graph, (vectors,))
    graph(vectors).sum().backward()  # an expanded gradient
    torch.testing.assert_close(vectors.grad, dense(2).sum(0)[:, None].expand(-1, 3), rtol=1e-6, atol=1e-6)


def test_vectors_are_propagated_once_a_step_with_gradients_through_all_items(lists: Lists, seed: int) -> None:
    backbone = LightGCN(lists, C, 4, layers=2)
    vectors = backbone.vectors()
    expected = dense(2).float() @ torch.cat([backbone.users.weight, backbone.items.weight])
    assert vectors.users is not None
    torch.testing.assert_close(torch.cat([vectors.users, vectors.items]), expected)
    queries = backbone.queries(Batch(torch.tensor([3, 0])), vectors)
    assert torch.equal(queries, vectors.users[[3, 0]])
    (queries @ vectors.items.T).square().sum().backward()
    assert backbone.items.weight.grad is not None
    assert (backbone.items.weight.grad != 0).any(1).all()


def test_without_layers_it_is_matrix_factorisation(lists: Lists) -> None:
    backbone = LightGCN(lists, C, 4, layers=0)
    assert torch.equal(backbone.vectors().items, backbone.items.weight)


def test_the_graph_is_not_saved_and_is_moved_along(lists: Lists) -> None:
    backbone = LightGCN(lists, C, 4)
    assert set(backbone.state_dict()) == {"users.weight", "items.weight"}
    assert backbone.to(torch.float64).vectors().items.dtype == torch.float64
