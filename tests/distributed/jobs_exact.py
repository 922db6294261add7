"""What the ranks do in the tests of exact members and RG: comparisons with the head on one machine."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import manymax
from manymax.distributed import ShardedHead
from manymax.engine import native_library
from tests.distributed.compare import compare, make_head, uneven
from tests.heads.plain import Problem, agree, class_weights, make_problem, make_target
from tests.heads.products import backward, leaf, products_of

# Jobs take these in turn. "auto" is the native kernel, if there is one and if it serves.
BACK_ENDS = ("torch", "auto") if native_library.available() else ("torch",)


def exact_options(name: str) -> list[dict[str, Any]]:
    """All combinations of reduction, multilabel mode, smoothing and class weights."""
    takes = getattr(manymax.heads, f"Linear{name}Loss").member.takes
    smoothing = (0.0, 0.25) if takes.smoothing else (0.0,)
    choices = itertools.product(("sum", "normalized"), smoothing, (False, True), ("mean", "sum", "none"))
    names = ("multilabel", "label_smoothing", "weighted", "reduction")
    return [dict(zip(names, choice, strict=True)) for choice in choices]


def every_option(group: dist.ProcessGroup, name: str, kind: str, setting: Mapping[str, Any], part: int) -> int:
    """A quarter of all combinations, with masked classes, ignored rows, two batch dimensions and uneven shards."""
    num_classes = 67
    problem = make_problem(3, 4, num_classes=num_classes, masked=True)
    target = make_target(kind, 3, 4, num_classes=num_classes)
    sizes = uneven(num_classes, dist.get_world_size(group))
    chosen = exact_options(name)[part::4]
    for index, options in enumerate(chosen):
        options["options"] = {"backend": BACK_ENDS[(index + part) % len(BACK_ENDS)]}
        weight = class_weights(num_classes) if options.pop("weighted") else None
        compare(group, name, problem, target, sizes, weight=weight, **options, **setting)
    return len(chosen)


def supports(group: dist.ProcessGroup, name: str, setting: Mapping[str, Any]) -> None:
    """Wide, thin and mixed supports of many classes, with and without bias, float64 and float32, sparse gradients."""
    for regime, (dtype, bias, sparse) in itertools.product(
        ("wide", "near", "thin", "mixed"),
        ((torch.float64, True, False), (torch.float32, False, False), (torch.float64, False, True)),
    ):
        problem = make_problem(13, num_classes=1203, regime=regime, bias=bias)
        problem = Problem(*(None if part is None else part.to(dtype) for part in problem_parts(problem)))
        target = make_target("ids", 13, num_classes=1203)
        options = {"block_rows": 6, "sparse_grad": sparse}
        for backend in BACK_ENDS:
            compare(group, name, problem, target, options={**options, "backend": backend}, **setting)


def back_ends(group: dist.ProcessGroup, name: str, setting: Mapping[str, Any], choice: Sequence[str]) -> None:
    """Ranks whose back ends are the choice in turn, as on machines of which some have no native library.

    Rows of small and of large support in a block, up to 40 positives in a row, masked classes and class weights.
    """
    random = torch.Generator().manual_seed(0)
    ids = torch.rand(13, 701, generator=random).argsort(1)[:, :40]
    target = torch.where((torch.rand(13, 40, generator=random) < 0.2) | (ids % 5 == 3), -100, ids)
    target[1::3, 2:] = -100
    options = {"weight": class_weights(701), "options": {"block_rows": 6}, **setting}
    before = os.environ.get(native_library.VARIABLE)
    os.environ[native_library.VARIABLE] = choice[dist.get_rank(group) % len(choice)]
    try:
        for regime, dtype in (("mixed", torch.float64), ("near", torch.float64), ("mixed", torch.float32)):
            problem = make_problem(13, num_classes=701, regime=regime, masked=True)
            problem = Problem(*(None if part is None else part.to(dtype) for part in problem_parts(problem)))
            options["weight"] = options["weight"].to(dtype)
            compare(group, name, problem, target, uneven(701, dist.get_world_size(group)), **options)
            compare(group, name, problem, problem.scores().argmax(1), reduction="none", **setting)
    finally:
        os.environ.pop(native_library.VARIABLE)
        if before is not None:
            os.environ[native_library.VARIABLE] = before


def problem_parts(problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    return problem.input, problem.linear_weight, problem.linear_bias


def one_rank_has_it_all(group: dist.ProcessGroup, name: str, setting: Mapping[str, Any]) -> None:
    """The support of each row and its positive are on one rank; all other classes score far lower or are masked."""
    num_classes = 90
    for top, floor in itertools.product((2, 44, 87), (-40.0, -torch.inf)):
        problem = make_problem(6, num_classes=num_classes, regime="near")
        bias = torch.where((torch.arange(num_classes) - top).abs() < 3, 0.0, floor).double()
        problem = Problem(problem.input, problem.linear_weight, bias)
        far = top if floor == -torch.inf else (top + 45) % num_classes
        target = torch.tensor([top, top + 1, top - 1, top, -100, far])
        for backend in BACK_ENDS:
            compare(group, name, problem, target, options={"backend": backend}, **setting)


def grouped_and_empty(group: dist.ProcessGroup, name: str, setting: Mapping[str, Any]) -> None:
    """Grouped pairs, no rows at all, nothing but ignored rows, one class per rank."""
    _, pairs = manymax.group_pairs(torch.tensor([7, 3, 7, 7, 5]), torch.tensor([0, 2, 1, 1, 19]))
    ranks = dist.get_world_size(group)
    for backend in BACK_ENDS:
        options = {"options": {"backend": backend}, **setting}
        compare(group, name, make_problem(3, num_classes=20), pairs, **options)
        compare(group, name, make_problem(0, num_classes=20), torch.zeros(0, dtype=torch.long), **options)
        compare(group, name, make_problem(4, num_classes=20), torch.full((4,), -100), **options)
        compare(group, name, make_problem(5, num_classes=ranks), torch.arange(5) % ranks, **options)


def learned_alpha(group: dist.ProcessGroup) -> None:
    """The gradient of alpha, with and without Omega in the loss."""
    for alpha, multilabel, (kind, reduction), backend in itertools.product(
        (1.1, 1.5, 1.9), ("sum", "normalized"), (("ids", "mean"), ("float rows", "none")), BACK_ENDS
    ):
        problem, target = make_problem(8, num_classes=60), make_target(kind, 8, num_classes=60)
        options = {"multilabel": multilabel, "reduction": reduction, "label_smoothing": 0.1}
        given = {"backend": backend}
        compare(group, "Entmax", problem, target, alpha=alpha, learnable=True, options=given, **options)


def twice(group: dist.ProcessGroup) -> None:
    """RG can be differentiated twice: a penalty on the gradient of the queries."""
    problem, target = make_problem(5, num_classes=30, regime="near"), make_target("ids", 5, num_classes=30)
    found = []
    for head in (make_head("RG", problem), ShardedHead(make_head("RG", problem), group=group)):
        input = problem.input.clone().requires_grad_()
        (slope,) = torch.autograd.grad(head(input, target), input, create_graph=True)
        parameters = list(head.parameters())
        found.append(torch.autograd.grad(slope.square().sum(), [input, *parameters]))
    start, stop = head.span.tolist()
    agree(list(found[1]), [found[0][0], *(grad[start:stop] for grad in found[0][1:])], 1e-10)


def wanted_products(group: dist.ProcessGroup, name: str, setting: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Products of this rank and rows in them, for every choice of what is frozen, with three of four rows ignored."""
    problem = make_problem(12, num_classes=2 * 203, regime="wide", bias=False)
    target = torch.where(torch.arange(12) % 4 == 2, problem.scores().argmax(1), -100)
    sharded, found = ShardedHead(make_head(name, problem, **setting), group=group), []
    sharded.head.reduction = "sum"
    for queries, vectors in itertools.product((True, False), repeat=2):
        sharded.requires_grad_(vectors)
        counted = products_of(lambda: backward(sharded(leaf(problem.input, queries), target)), 203)  # noqa: B023
        found.append((counted.count, counted.rows))
    return found


def masked_rows(group: dist.ProcessGroup, name: str, setting: Mapping[str, Any]) -> int:
    """Rows in the products of the backward of a masked sum of losses; the mask of each rank leaves out another row."""
    problem = make_problem(12, num_classes=2 * 203, regime="wide", bias=False)
    sharded = ShardedHead(make_head(name, problem, reduction="none", **setting), group=group)
    value = sharded(problem.input, problem.scores().argmax(1))
    factors = (torch.arange(12) < 4).double()
    factors[dist.get_rank(group)] = 0  # no caller should do this; the ranks must not wait for each other even so
    return products_of(lambda: backward(value, factors), 203).rows
