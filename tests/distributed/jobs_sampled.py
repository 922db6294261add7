"""What the ranks do in the tests of sampled members: comparisons with the head on one machine, and draws."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from manymax import ArgumentError
from manymax.distributed import ShardedHead
from manymax.samplers import SAMPLERS, Draw, Sampler
from tests.distributed.compare import compare, gradients, make_head, same_everywhere, uneven
from tests.heads.plain import Problem, agree, class_weights, make_problem, make_target


def every_sampler(group: dist.ProcessGroup, name: str, settings: Mapping[str, Any]) -> None:
    """All samplers, per row and shared, dense and sparse, ids and several positives."""
    for entry in SAMPLERS.values():
        if entry.name == "midx":  # it needs all class vectors at hand: `quantised` tests it
            continue
        for options, shared, (kind, sparse) in itertools.product(
            entry.examples, (False, True), (("ids", False), ("padded ids", True), ("bool rows", False))
        ):
            problem, target = make_problem(9, num_classes=40), make_target(kind, 9, num_classes=40)
            sampler = {"name": entry.name, "options": options}
            k = 3 if entry.needs_scores or entry.name == "in_batch" else 7
            compare(
                group,
                name,
                problem,
                target,
                sampler=sampler,
                shared=shared,
                sparse_grad=sparse,
                num_negatives=k,
                **settings,
            )


def sampled_options(group: dist.ProcessGroup, name: str, settings: Mapping[str, Any], part: int) -> None:
    """Half of the reductions, multilabel modes, class weights and hit policies; hits are frequent with few classes."""
    choices = itertools.product(("mean", "sum", "none"), ("sum", "normalized"), (False, True), ("keep", "mask"))
    for index, (reduction, multilabel, weighted, hit_policy) in enumerate(choices):
        if sum(divmod(index, 4)) % 2 != part:
            continue
        problem, target = make_problem(2, 5, num_classes=9), make_target("padded ids", 2, 5, num_classes=9)
        weight = class_weights(9) if weighted else None
        options = {"reduction": reduction, "multilabel": multilabel, "weight": weight}
        if name in ("SampledSoftmax", "NCE") and settings.get("correction") != "corrected_logq":
            options["hit_policy"] = hit_policy
        sampler = {"name": "popularity" if index % 3 else "uniform"}
        sizes = uneven(9, dist.get_world_size(group))
        compare(group, name, problem, target, sizes, sampler=sampler, **{**settings, **options})


def touched_rows(group: dist.ProcessGroup) -> None:
    """A row-sparse gradient has the rows of this rank that the head on one machine has."""
    random = torch.Generator().manual_seed(2)
    problem = Problem(*(9.0 * torch.randn(size, 6, generator=random) for size in (9, 1203)))
    target = problem.scores().topk(2).indices[:, 1]  # few classes are near it
    for name, options in (
        ("Sparsemax", {"options": {"sparse_grad": True}}),
        ("Rankmax", {"options": {"sparse_grad": True}}),
        ("SampledSoftmax", {"sparse": True}),
        ("NCE", {"sparse": True, "shared": True}),
    ):
        whole, sharded = make_head(name, problem, **options), make_head(name, problem, **options)
        sharded = ShardedHead(sharded, group=group)
        whole(problem.input, target).backward()
        sharded(problem.input, target).backward()
        expected, own = (head.weight.grad.coalesce().indices()[0] for head in (whole.linear, sharded.head.linear))
        start, stop = sharded.span.tolist()
        assert 0 < len(expected) < 1203
        assert torch.equal(own + start, expected[(expected >= start) & (expected < stop)]), name


def large_offset(group: dist.ProcessGroup, name: str) -> None:
    """In float32 an offset of the scores, which are exact all the same, must not cost the digits of log q."""
    problem = make_problem(9, num_classes=40, regime="near")
    parts = [part.float() for part in problem.parts()]
    problem = Problem(parts[0], parts[1], parts[2] + 4096)
    target = make_target("ids", 9, num_classes=40)
    options = {"reduction": "none"} | ({"sampler": {"name": "popularity"}} if name == "SampledSoftmax" else {})
    exact = make_head(name, Problem(*(part.double() for part in problem.parts())), **options)
    sharded = ShardedHead(make_head(name, problem, **options), group=group)
    agree([sharded(problem.input, target).detach()], [exact(problem.input.double(), target).detach()], 1e-6)


def quantised(group: dist.ProcessGroup) -> None:
    """MIDX follows the class vectors that it was shown; without any it says what to do."""
    problem, target = make_problem(9, num_classes=40), make_target("ids", 9, num_classes=40)
    heads = [make_head("NCE", problem, sampler={"name": "midx", "options": {"num_codewords": 3}}) for _ in range(2)]
    for head in heads:
        head.sampler.refresh(problem.linear_weight, torch.Generator().manual_seed(1))
    expected = gradients(heads[0], problem.input.clone().requires_grad_(), target)
    actual = gradients(ShardedHead(heads[1], group=group), problem.input.clone().requires_grad_(), target)
    agree([actual["value"], actual["input"]], [expected["value"], expected["input"]], 1e-10)
    fresh = ShardedHead(make_head("NCE", problem, sampler={"name": "midx", "options": {}}), group=group)
    with pytest.raises(ArgumentError, match=r"call `refresh\(linear_weight\)`"):
        fresh(problem.input, target)


def remembering(sampler: Sampler) -> list[Draw]:
    """A list to which every later draw of the sampler is added."""
    drawn: list[Draw] = []
    draw = sampler.draw

    def remembered(request: Any) -> Draw:
        drawn.append(draw(request))
        return drawn[-1]

    sampler.draw = remembered  # type: ignore[method-assign]
    return drawn


def draws_without_a_generator(group: dist.ProcessGroup, shared: bool) -> float:
    """Ranks draw the same negatives although their global generators, or the generators they are given, differ."""
    problem, target = make_problem(9, num_classes=40), make_target("ids", 9, num_classes=40)
    values = []
    for own in (False, True):
        torch.manual_seed(100 + dist.get_rank(group))
        generator = torch.Generator().manual_seed(100 + dist.get_rank(group)) if own else None
        head = ShardedHead(make_head("SampledSoftmax", problem, shared=shared, generator=generator), group=group)
        drawn = remembering(head.head.sampler)
        value = head(problem.input, target)
        same_everywhere(value.detach(), group)
        same_everywhere(drawn[0].ids, group)
        assert float(head(problem.input, target)) != float(value)  # fresh draws in every call
        values.append(float(value))
    return values[1]
