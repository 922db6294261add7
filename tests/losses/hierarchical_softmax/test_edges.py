"""Hierarchical softmax at the edges: one class, large scores, half precision, wrong arguments, function transforms."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from manymax.errors import ArgumentError, ArgumentTypeError, ManymaxError
from manymax.members.hierarchical_softmax.loss import (
    HierarchicalSoftmaxLoss,
    hierarchical_softmax_log_prob,
    hierarchical_softmax_loss,
)
from manymax.ops.tree import ClassTree
from tests.losses.hierarchical_softmax.trees import DIM, TREES, make, problem

# ---- edges


def test_one_class_costs_nothing() -> None:
    loss = make(TREES["one"])
    input = torch.randn(3, DIM, dtype=torch.double, requires_grad=True)
    value = loss(input, torch.zeros(3, dtype=torch.long))
    value.backward()
    assert value.item() == 0
    assert not input.grad.any()
    assert loss.node_vectors.grad.shape == (0, DIM)
    values, ids = loss.topk(input, 1)
    assert not values.any()
    assert not ids.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_scores_stay_finite(tree: ClassTree, dtype: torch.dtype) -> None:
    input, vectors, _ = (t.to(dtype).requires_grad_() for t in problem(tree, scale=100.0))
    for target in (torch.zeros(4, dtype=torch.long), torch.ones(4, tree.num_classes, dtype=torch.bool)):
        loss = hierarchical_softmax_loss(input, vectors, target, tree)
        for gradient in torch.autograd.grad(loss, (input, vectors)):
            assert gradient.isfinite().all()
        assert loss.isfinite()
    log_probs = hierarchical_softmax_log_prob(input, vectors, tree)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(4, dtype=dtype), rtol=0, atol=1e-5)


def test_rows_without_a_positive_cost_nothing(tree: ClassTree, route: str) -> None:
    input, vectors, bias = (t.requires_grad_() for t in problem(tree))
    targets = [torch.full((4,), -100), torch.full((4, 2), -100), torch.zeros(4, tree.num_classes, dtype=torch.bool)]
    for target, reduction in product(targets, ("mean", "sum")):
        loss = hierarchical_softmax_loss(input, vectors, target, tree, node_bias=bias, reduction=reduction)
        assert loss.item() == 0
        assert not any(g.any() for g in torch.autograd.grad(loss, (input, vectors, bias)))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_float32_inside(tree: ClassTree, half: torch.dtype) -> None:
    input, vectors, bias = (t.to(half) for t in problem(tree))
    ids = torch.arange(4) % tree.num_classes
    expected = hierarchical_softmax_loss(input.double(), vectors.double(), ids, tree, node_bias=bias.double())
    loss = hierarchical_softmax_loss(input, vectors, ids, tree, node_bias=bias)
    assert loss.dtype == half
    torch.testing.assert_close(loss, expected.to(half), rtol=torch.finfo(half).eps, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        loss = hierarchical_softmax_loss(input, vectors.float(), ids, tree, node_bias=bias.float())
        log_probs = hierarchical_softmax_log_prob(input, vectors, tree, node_bias=bias)
    assert loss.dtype == log_probs.dtype == torch.float32
    torch.testing.assert_close(loss, expected.float(), rtol=1e-5, atol=1e-6)


def test_gradients_of_half_vectors_are_summed_in_float32() -> None:
    input, ids = torch.ones(3000, 1, dtype=torch.bfloat16), torch.ones(3000, dtype=torch.long)
    for value in torch.linspace(-3, 3, 40).bfloat16():
        vectors = value.view(1, 1).requires_grad_()
        loss = hierarchical_softmax_loss(input, vectors, ids, TREES["two"], reduction="sum")
        gradient = torch.autograd.grad(loss, vectors)[0].item()
        # rounded once, not row by row
        assert gradient == (-3000 * torch.sigmoid(-value.double())).bfloat16().item()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_numbers_are_refused(tree: ClassTree, bad: float) -> None:
    if tree.num_nodes == 0:
        return
    loss, input = make(tree), problem(tree)[0]
    input[2, 0] = bad
    ids = torch.zeros(4, dtype=torch.long)
    calls: list[Callable[[], object]] = [
        lambda: loss(input, ids),
        lambda: loss.log_prob(input),
        lambda: loss.log_prob(input, ids),
        lambda: loss.topk(input, 1),
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match="`input` and the node vectors must be finite; got a node score"):
            call()


def call(**changes: object) -> Callable[[], object]:
    arguments = {
        "input": torch.zeros(4, DIM),
        "node_vectors": torch.zeros(7, DIM),
        "target": torch.zeros(4, dtype=torch.long),
        "tree": TREES["huffman"],
    }
    return lambda: hierarchical_softmax_loss(**arguments | changes)


@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        (call(input=torch.zeros(4, 5)), ArgumentError, r"`node_vectors` must be \(7, 5\).*got shape \(7, 3\)"),
        (call(node_vectors=torch.zeros(8, DIM)), ArgumentError, r"`node_vectors` must be \(7, 3\).*got shape \(8, 3\)"),
        (call(node_bias=torch.zeros(8)), ArgumentError, r"`node_bias` must have shape \(7,\); got \(8,\)"),
        (call(input=torch.zeros(4, DIM, dtype=torch.long)), ArgumentTypeError, "`input` must be a float tensor"),
        (call(input=[1.0]), ArgumentTypeError, "`input` must be a tensor; got list"),
        (call(tree=[1, 2, 3]), ArgumentTypeError, r"`tree` must be.*`HuffmanTree\(counts\)`.*got list"),
        (call(target=torch.full((4,), 8)), ArgumentError, r"`target` ids must be in \[0, 8\).*got 8"),
        (call(target=torch.zeros(5, dtype=torch.long)), ArgumentError, r"`target`.*got shape \(5,\)"),
        (
            call(target=torch.full((4, 8), 0.2)),
            ArgumentError,
            "`target` as float rows must be non-negative and sum to 1",
        ),
        (call(weight=torch.ones(7)), ArgumentError, r"`weight` must have shape \(8,\)"),
        (call(reduction="avg"), ArgumentError, "`reduction` must be one of"),
        (call(multilabel="max"), ArgumentError, "`multilabel` must be one of"),
        (call(label_smoothing=2.0), ArgumentError, r"`label_smoothing` must be in \[0, 1\]; got 2.0"),
        (lambda: make([1, 2]), ArgumentTypeError, "`tree` must be a tree over the classes.*got list"),
        (lambda: HierarchicalSoftmaxLoss(0, TREES["two"]), ArgumentError, "`in_features` must be a positive integer"),
        (
            lambda: make(TREES["two"]).topk(torch.zeros(DIM), 3),
            ArgumentError,
            r"`k` must be an integer in \[1, 2\].*got 3",
        ),
        (lambda: make(TREES["two"]).topk(torch.zeros(DIM), 0), ArgumentError, "got 0"),
        (
            lambda: make(TREES["two"]).topk(torch.zeros(2, DIM), 1, exclude=torch.zeros(3, 1, dtype=torch.long)),
            ArgumentError,
            r"`exclude` must have shape \(2, 'X'\); got \(3, 1\)",
        ),
        (
            lambda: make(TREES["two"]).topk(torch.zeros(DIM), 1, exclude=torch.tensor([5])),
            ArgumentError,
            r"`exclude` ids must be in \[0, 2\) or equal `ignore_index` \(-100\); got 5",
        ),
        (
            lambda: make(TREES["two"]).topk(torch.zeros(DIM), 1, exclude=torch.tensor([True, False])),
            ArgumentTypeError,
            "`exclude` must hold integer ids; got torch.bool",
        ),
        (
            lambda: make(TREES["two"]).log_prob(torch.zeros(2, DIM), torch.tensor([0, 1, 0])),
            ArgumentError,
            r"`target` must have shape \(2,\) or \(2, 'P'\); got shape \(3,\)",
        ),
        (
            lambda: make(TREES["two"]).log_prob(torch.zeros(2, DIM), torch.tensor([0, 2])),
            ArgumentError,
            r"`target` ids must be in \[0, 2\)",
        ),
    ],
)
def test_bad_arguments(act: Callable[[], object], kind: type[ManymaxError], message: str) -> None:
    with pytest.raises(kind, match=message):
        act()


# ---- transforms


def test_gradients_of_single_rows(tree: ClassTree) -> None:
    input, vectors, bias = problem(tree)
    ids = torch.arange(4) % tree.num_classes
    targets = {
        "ids": ids,
        "padded": torch.stack([ids, ids.flip(0)], -1),
        "rows": torch.ones(4, tree.num_classes).bool(),
    }
    for target in targets.values():

        def loss(vectors: Tensor, row: Tensor, target: Tensor) -> Tensor:
            return hierarchical_softmax_loss(row, vectors, target, tree, node_bias=bias, reduction="sum")

        single = vmap(grad(loss), in_dims=(None, 0, 0))(vectors, input, target)
        looped = torch.stack([grad(loss)(vectors, *pair) for pair in zip(input, target, strict=True)])
        torch.testing.assert_close(single, looped, rtol=0, atol=1e-12)
    log_probs = vmap(lambda row: hierarchical_softmax_log_prob(row, vectors, tree, node_bias=bias))(input)
    torch.testing.assert_close(log_probs, hierarchical_softmax_log_prob(input, vectors, tree, node_bias=bias))


@pytest.mark.slow
def test_compiles_into_one_graph() -> None:
    tree = TREES["huffman"]
    loss, input = make(tree), problem(tree)[0]
    ids = torch.arange(4)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    value = compiled(input, ids)
    torch.testing.assert_close(value, loss(input, ids), rtol=0, atol=1e-14)
    gradients = (torch.autograd.grad(v, loss.node_vectors)[0] for v in (value, loss(input, ids)))
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-14)


def test_functional_call() -> None:
    loss, input = make(TREES["huffman"]), problem(TREES["huffman"])[0]
    zeros = {name: torch.zeros_like(p) for name, p in loss.named_parameters()}
    value = functional_call(loss, zeros, (input, torch.tensor([0, 1, 2, 6])))
    assert value.item() == pytest.approx(math.log(2) * loss.tree.lengths[[0, 1, 2, 6]].double().mean().item())
