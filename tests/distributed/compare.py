"""A sharded head next to the head on one machine: value and every gradient must agree, on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import manymax
from manymax.distributed import ShardedHead
from manymax.engine.head import LinearHead
from manymax.samplers import SAMPLERS
from tests.heads.plain import Problem, agree, upstream

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


SAMPLED = ("SampledSoftmax", "NCE", "BPR", "BCE", "GBCE")


def uneven(num_classes: int, ranks: int) -> list[int]:
    """Sizes of shards: every rank gets half of the classes that are left, the last one all of them."""
    sizes: list[int] = []
    for _ in range(ranks - 1):
        sizes.append((num_classes - sum(sizes)) // 2)
    return [*sizes, num_classes - sum(sizes)]


def make_head(name: str, problem: Problem, **options: Any) -> LinearHead:
    """A head on one machine with the class vectors of the problem."""
    dtype, (num_classes, dim) = problem.linear_weight.dtype, problem.linear_weight.shape
    bias = problem.linear_bias is not None
    if name in SAMPLED:
        sampler = options.pop("sampler", {"name": "uniform"})
        counts = 1.0 + torch.arange(num_classes) % 7
        made = SAMPLERS[sampler["name"]].make(num_classes, counts, **sampler.get("options", {}))
        options = {"num_negatives": 7, "sampler": made, "generator": torch.Generator().manual_seed(5), **options}
    made_by = getattr(manymax.heads, f"Linear{name}Loss")
    if "options" in options:  # a head refuses options that have no effect on it
        options["options"] = {k: v for k, v in options["options"].items() if k in made_by.honours}
    head = made_by(dim, num_classes, bias=bias, dtype=dtype, **options)
    with torch.no_grad():
        head.linear.weight.copy_(problem.linear_weight)
        if bias:
            head.linear.bias.copy_(problem.linear_bias)
    return head.to(dtype)


def gradients(head: Any, input: Tensor, target: Any) -> dict[str, Tensor]:
    """The loss and its gradients in the queries and in every parameter, dense."""
    value = head(input, target)
    names, parameters = zip(*head.named_parameters(), strict=True)
    grads = torch.autograd.grad(value, [input, *parameters], upstream(value), materialize_grads=True)
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
    """Compare the sharded head with the head on one machine: value and gradients, and the same bits on every rank."""
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
    """Fail unless every rank has the same value, bit for bit."""
    gathered = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, value.contiguous(), group=group)
    assert all(torch.equal(value, other) for other in gathered)
