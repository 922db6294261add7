"""What the ranks do in the tests of their messages: number and size of what is sent, blocks of rows, the network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from manymax.distributed import Network, ShardedHead, measure_network
from manymax.distributed.collectives import ProcessRanks
from tests.distributed.compare import make_head
from tests.heads.plain import Problem, make_problem


@contextmanager
def counting() -> Iterator[list[Tensor]]:
    """Collect the tensors that this rank sends, in order."""
    sent: list[Tensor] = []

    def counted(call: Any, tensor_at: int) -> Any:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            sent.append(arguments[tensor_at].detach().clone())
            return call(*arguments, **options)

        return wrapper

    places = {"all_reduce": 0, "broadcast": 0, "all_gather": 1, "send": 0}
    with mock.patch.multiple(dist, **{name: counted(getattr(dist, name), place) for name, place in places.items()}):
        yield sent


def messages(
    group: dist.ProcessGroup, name: str, setting: Mapping[str, Any], num_classes: int, positives: int
) -> tuple[list[int], list[int]]:
    """How many numbers each message of a call and of its backward pass has, for 32 rows in one block."""
    problem = make_problem(32, num_classes=num_classes, regime="near")
    ids = torch.arange(32 * positives).reshape(32, positives) % num_classes
    head = ShardedHead(make_head(name, problem, **setting), group=group)
    with counting() as forward:
        value = head(problem.input.clone().requires_grad_(), ids)
    with counting() as backward:
        value.backward()
    return [values.numel() for values in forward], [values.numel() for values in backward]


def blocks(group: dist.ProcessGroup, sizes: list[int], block_scores: int) -> list[int]:
    """Number of rows in each block, for 130 rows: the maxima of softmax are exchanged as two numbers per row."""
    problem = make_problem(130, num_classes=sum(sizes))
    head = make_head("Softmax", problem, options={"block_scores": block_scores})
    with counting() as sent:
        ShardedHead(head, sizes=sizes, group=group)(problem.input, torch.zeros(130, dtype=torch.long))
    return [values.numel() // 2 for values in sent[1::2]]


def step_traffic(
    group: dist.ProcessGroup, name: str, batch: int, num_classes: int, positives: int
) -> tuple[float, float]:
    """Number and bytes of the sums of a step in float32; a broadcast (of uint8) counts half of a sum."""
    problem = make_problem(batch, num_classes=num_classes, regime="near", bias=False)
    problem = Problem(problem.input.float(), problem.linear_weight.float())
    ids = torch.arange(batch * positives).reshape(batch, positives) % num_classes
    head = ShardedHead(make_head(name, problem), group=group)
    with counting() as sent:
        head(problem.input.requires_grad_(), ids).backward()
    shares = [0.5 if values.dtype == torch.uint8 else 1.0 for values in sent]
    return sum(shares), sum(share * v.numel() * v.element_size() for share, v in zip(shares, sent, strict=True))


def network(group: dist.ProcessGroup) -> Network:
    return measure_network(ProcessRanks(group), rounds=3, megabytes=1)
