"""What the ranks do in the tests of the shared keywords: comparisons with the head on one machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import manymax
from manymax import LossResult
from manymax.distributed import ShardedHead
from tests.distributed.compare import SAMPLED, make_head, uneven
from tests.distributed.jobs_exact import BACK_ENDS
from tests.heads.plain import make_problem, make_target

ROWS, CLASSES = 11, 67
# Keywords of heads with a partition function, of all heads, of heads with a bound, and of heads that draw.
OF_SUMS: list[dict[str, Any]] = [{"decoupled": True}, {"z_loss": 0.2}, {"exclude": "positives"}]
OF_ALL: list[dict[str, Any]] = [
    {"temperature": 0.6, "normalize": True},
    {"softcap": 2.0},
    {"exclude": True, "normalize": True, "softcap": 3.0},
    {"row_weight": True, "num_items": 5},
]
OF_BOUNDS: list[dict[str, Any]] = [{"bound": True, "exclude": "positives"}]
OF_DRAWS: list[dict[str, Any]] = [{"negatives": True}, {"shared": True, "negatives": True, "exclude": True}]


def every_keyword(group: dist.ProcessGroup, name: str, setting: Mapping[str, Any]) -> None:
    """Each keyword with rows of several positives, masked classes and uneven shards; value, gradients, statistics."""
    problem = make_problem(ROWS, num_classes=CLASSES, masked=True)
    target = make_target("padded ids", ROWS, num_classes=CLASSES)
    member = getattr(manymax.heads, f"Linear{name}Loss").member
    cases = [*OF_ALL, *(OF_SUMS if member.log_partition else []), *(OF_BOUNDS if member.bounded else [])]
    cases += OF_DRAWS if name in SAMPLED else [{"stats": True}]
    for index, case in enumerate(cases):
        kept, per_call = split(case, target)
        if name in SAMPLED:
            kept |= {"correction": "partition"} if {"decoupled", "z_loss"} & set(case) else {}
        if case.get("exclude") == "positives" and name in SAMPLED:
            continue
        found = []
        for shard in (False, True):
            kept["options"] = {"backend": BACK_ENDS[index % len(BACK_ENDS)], "block_rows": 4}
            head: Any = make_head(name, problem, **{**setting, **kept})
            if "stats" in case:
                head.stats = ("argmax", "correct", *head.member.statistics)
            if shard:
                head = ShardedHead(head, sizes=uneven(CLASSES, dist.get_world_size(group)), group=group)
            found.append(results(head, problem.input, target, per_call, group))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10, equal_nan=True)


def split(case: Mapping[str, Any], target: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keywords of a case that a head is built with, and those of its call."""
    random = torch.Generator().manual_seed(2)
    lists = torch.randint(CLASSES, (ROWS, 5), generator=random)
    lists[:, 1] = -100
    own = (lists.unsqueeze(2) == target.unsqueeze(1)).any(2)
    made = {
        "exclude": torch.cat([lists, target], 1)
        if case.get("exclude") == "positives"
        else lists.masked_fill(own, -100),
        "negatives": lists,
        "bound": torch.linspace(-1, 2, ROWS, dtype=torch.float64),
        "row_weight": torch.rand(ROWS, generator=random, dtype=torch.float64),
        "num_items": case.get("num_items"),
    }
    per_call = {name: value for name, value in made.items() if name in case}
    return {name: value for name, value in case.items() if name not in made and name != "stats"}, per_call


def results(
    head: Any, input: Tensor, target: Tensor, per_call: Mapping[str, Any], group: dist.ProcessGroup
) -> list[Tensor]:
    """The loss, its gradients in the queries and in all class vectors, and the statistics."""
    queries = input.detach().clone().requires_grad_()
    value = head(queries, target, **per_call)
    stats = []
    if isinstance(value, LossResult):
        found = [getattr(value, f.name) for f in fields(value) if f.name != "loss"]
        stats, value = [s for s in found if s is not None], value.loss
    parameters = [p for name, p in head.named_parameters() if "linear" in name]
    grads = torch.autograd.grad(value, [queries, *parameters], materialize_grads=True)
    whole = [g if not isinstance(head, ShardedHead) else gathered(g, group) for g in grads[1:]]
    return [value.detach(), grads[0], *whole, *stats]


def gathered(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks."""
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, rows, group=group)
    return torch.cat(parts)
