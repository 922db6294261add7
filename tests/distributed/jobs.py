"""What the ranks do in the tests: the sharded head next to the head on one machine, value and every gradient."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import manymax
from manymax.distributed import ShardedHead
from manymax.heads.modules import LinearHead
from manymax.samplers import SAMPLERS
from tests.heads.plain import Problem, agree, class_weights, make_problem, make_target, upstream

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def uneven(num_classes: int, ranks: int) -> list[int]:
    """Half of what is left for every rank but the last, which gets the rest."""
    sizes: list[int] = []
    for _ in range(ranks - 1):
        sizes.append((num_classes - sum(sizes)) // 2)
    return [*sizes, num_classes - sum(sizes)]


def make_head(name: str, problem: Problem, **options: Any) -> LinearHead:
    """A head on one machine with the class vectors of the problem."""
    dtype, (num_classes, dim) = problem.linear_weight.dtype, problem.linear_weight.shape
    bias = problem.linear_bias is not None
    if name in ("SampledSoftmax", "NCE"):
        sampler = options.pop("sampler", {"name": "uniform"})
        counts = 1.0 + torch.arange(num_classes) % 7
        made = SAMPLERS[sampler["name"]].make(num_classes, counts, **sampler.get("options", {}))
        options = {"num_negatives": 7, "sampler": made, "generator": torch.Generator().manual_seed(5), **options}
    head = getattr(manymax, f"Linear{name}Loss")(dim, num_classes, bias=bias, dtype=dtype, **options)
    with torch.no_grad():
        head.linear.weight.copy_(problem.linear_weight)
        if bias:
            head.linear.bias.copy_(problem.linear_bias)
    return head


def gradients(head: Any, input: Tensor, target: Any) -> dict[str, Tensor]:
    """The loss and its gradients in the queries and in every parameter, dense."""
    value = head(input, target)
    names, parameters = zip(*head.named_parameters(), strict=True)
    grads = torch.autograd.grad(value, [input, *parameters], upstream(value))
    found = {"value": value.detach(), "input": grads[0]}
    return found | {name: grad.to_dense() for name, grad in zip(names, grads[1:], strict=True)}


def compare(
    group: dist.ProcessGroup,
    name: str,
    problem: Problem,
    target: Any,
    sizes: list[int] | None = None,
    **options: Any,
) -> None:
    """Hold the sharded head to the head on one machine."""
    dtype = problem.linear_weight.dtype
    whole = make_head(name, problem, **options)
    sharded = ShardedHead(make_head(name, problem, **options), sizes=sizes, group=group)
    input = problem.input.clone().requires_grad_()
    expected = gradients(whole, input, target)
    actual = gradients(sharded, input, target)
    start, stop = sharded.span.tolist()
    for key in ("linear.weight", "linear.bias"):
        if key in expected:
            expected[key] = expected[key][start:stop]
    actual = {key.removeprefix("head."): grad for key, grad in actual.items()}
    assert list(actual) == list(expected)
    unit = max([1.0, *problem.input.abs().flatten().tolist()])
    note = (name, options, sizes, dist.get_rank(group))
    for key in expected:
        agree([actual[key]], [expected[key]], TOLERANCE[dtype], (key, note), unit)
    same_everywhere(actual["value"], group)
    same_everywhere(actual["input"], group)


def same_everywhere(value: Tensor, group: dist.ProcessGroup) -> None:
    """Bit for bit."""
    gathered = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, value.contiguous(), group=group)
    assert all(torch.equal(value, other) for other in gathered)


def exact_options(name: str) -> Iterator[dict[str, Any]]:
    """Every reduction, multilabel mode, smoothing and class weight with every other."""
    smoothing = (0.0,) if name == "Rankmax" else (0.0, 0.25)
    for reduction, multilabel, share, weighted in itertools.product(
        ("mean", "sum", "none"), ("sum", "normalized"), smoothing, (False, True)
    ):
        yield {"reduction": reduction, "multilabel": multilabel, "label_smoothing": share, "weighted": weighted}


def every_option(group: dist.ProcessGroup, name: str, kind: str, setting: Mapping[str, Any]) -> int:
    """All combinations, for masked classes, ignored rows, batch dimensions, uneven shards, blocks of 5 rows."""
    num_classes, tried = 67, 0
    problem = make_problem(3, 4, num_classes=num_classes, masked=True)
    target = make_target(kind, 3, 4, num_classes=num_classes)
    sizes = uneven(num_classes, dist.get_world_size(group))
    for options in exact_options(name):
        weight = class_weights(num_classes) if options.pop("weighted") else None
        blocks = {"block_rows": 5}
        compare(group, name, problem, target, sizes, weight=weight, options=blocks, **options, **setting)
        tried += 1
    return tried


def supports(group: dist.ProcessGroup, name: str, setting: Mapping[str, Any]) -> None:
    """Wide, thin and mixed supports of many classes, with and without bias, float64 and float32, sparse gradients."""
    for regime, (dtype, bias, sparse) in itertools.product(
        ("wide", "near", "thin", "mixed"),
        ((torch.float64, True, False), (torch.float32, False, False), (torch.float64, False, True)),
    ):
        problem = make_problem(13, num_classes=1203, regime=regime, bias=bias)
        problem = Problem(*(None if part is None else part.to(dtype) for part in problem_parts(problem)))
        target = make_target("ids", 13, num_classes=1203)
        compare(group, name, problem, target, options={"block_rows": 6, "sparse_grad": sparse}, **setting)


def problem_parts(problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    return problem.input, problem.linear_weight, problem.linear_bias


def one_rank_has_it_all(group: dist.ProcessGroup, name: str, setting: Mapping[str, Any]) -> None:
    """All classes of a row's support and its positive on one rank, whichever it is; all others far below."""
    num_classes = 90
    for top in (2, 44, 87):
        problem = make_problem(6, num_classes=num_classes, regime="near")
        bias = torch.where((torch.arange(num_classes) - top).abs() < 3, 0.0, -40.0).double()
        problem = Problem(problem.input, problem.linear_weight, bias)
        target = torch.tensor([top, top + 1, top - 1, top, -100, 5 if top > 9 else 80])
        compare(group, name, problem, target, **setting)


def grouped_and_empty(group: dist.ProcessGroup, name: str, setting: Mapping[str, Any]) -> None:
    """Grouped pairs, no rows at all, nothing but ignored rows, one class per rank."""
    _, pairs = manymax.group_pairs(torch.tensor([7, 3, 7, 7, 5]), torch.tensor([0, 2, 1, 1, 19]))
    compare(group, name, make_problem(3, num_classes=20), pairs, **setting)
    compare(group, name, make_problem(0, num_classes=20), torch.zeros(0, dtype=torch.long), **setting)
    compare(group, name, make_problem(4, num_classes=20), torch.full((4,), -100), **setting)
    ranks = dist.get_world_size(group)
    compare(group, name, make_problem(5, num_classes=ranks), torch.arange(5) % ranks, **setting)


def learned_alpha(group: dist.ProcessGroup) -> None:
    """The gradient of alpha, with and without Omega in the loss."""
    for alpha, multilabel, kind, reduction in itertools.product(
        (1.1, 1.5, 2.0), ("sum", "normalized"), ("ids", "float rows"), ("mean", "none")
    ):
        problem, target = make_problem(8, num_classes=60), make_target(kind, 8, num_classes=60)
        options = {"multilabel": multilabel, "reduction": reduction, "label_smoothing": 0.1}
        compare(group, "Entmax", problem, target, alpha=alpha, learnable=True, **options)


# Sampled -----------------------------------------------------------------------------------------


def every_sampler(group: dist.ProcessGroup, name: str, settings: Mapping[str, Any]) -> None:
    """All samplers, per row and shared, dense and sparse, ids and several positives."""
    for entry in SAMPLERS.values():
        if entry.name == "midx":  # follows all class vectors: has a test of its own
            continue
        for options, shared, (kind, sparse) in itertools.product(
            entry.settings, (False, True), (("ids", False), ("padded ids", True), ("bool rows", False))
        ):
            problem, target = make_problem(9, num_classes=40), make_target(kind, 9, num_classes=40)
            sampler = {"name": entry.name, "options": options}
            k = 3 if entry.needs_scores or entry.name == "in_batch" else 7
            compare(
                group, name, problem, target, sampler=sampler, shared=shared, sparse=sparse, num_negatives=k, **settings
            )


def sampled_options(group: dist.ProcessGroup, name: str, settings: Mapping[str, Any]) -> None:
    """Reductions, multilabel modes, class weights, hit policies; hits are frequent with few classes."""
    for reduction, multilabel, weighted, hit_policy in itertools.product(
        ("mean", "sum", "none"), ("sum", "normalized"), (False, True), ("keep", "mask")
    ):
        problem, target = make_problem(2, 5, num_classes=9), make_target("padded ids", 2, 5, num_classes=9)
        weight = class_weights(9) if weighted else None
        options = {"reduction": reduction, "multilabel": multilabel, "weight": weight, "hit_policy": hit_policy}
        for sampler in ("uniform", "popularity"):
            compare(group, name, problem, target, sampler={"name": sampler}, **{**settings, **options})


def large_offset(group: dist.ProcessGroup, name: str) -> None:
    """In float32 an offset of the scores must not cost the digits of log q."""
    problem = make_problem(9, num_classes=40, bias=True)
    offset = Problem(problem.input.float(), problem.linear_weight.float(), problem.linear_bias.float() + 4096)
    target = make_target("ids", 9, num_classes=40)
    options = {"sampler": {"name": "popularity"}} if name == "SampledSoftmax" else {}
    near = make_head(name, Problem(*(p.double() for p in problem_parts(offset))), **copy.deepcopy(options))
    sharded = ShardedHead(make_head(name, offset, **options), group=group)
    expected, actual = near(offset.input.double(), target), sharded(offset.input, target)
    assert abs(float(expected.detach() - actual.detach())) < 1e-5 * max(1.0, abs(float(expected.detach())))
