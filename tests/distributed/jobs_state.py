"""What the ranks do in the tests of ranking, saved states, first vectors and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import manymax
from manymax import ArgumentError, ManymaxError
from manymax.distributed import ShardedHead
from tests.distributed.compare import make_head, uneven
from tests.heads.plain import Problem, class_weights, make_problem, make_target


def ranking(group: dist.ProcessGroup) -> None:
    """Compare with the k best of the whole table, also with excluded classes and with k larger than a shard."""
    for num_classes, k, masked in ((40, 5, True), (40, 40, True), (301, 7, False), (301, 290, False)):
        problem = make_problem(3, 4, num_classes=num_classes, regime="near", masked=masked)
        random = torch.Generator().manual_seed(3)
        seen = torch.randint(num_classes, (3, 4, 9), generator=random)
        seen = torch.where(torch.rand(3, 4, 9, generator=random) < 0.3, -100, seen)
        sizes = uneven(num_classes, dist.get_world_size(group))
        head = ShardedHead(make_head("Softmax", problem), sizes=sizes, group=group)
        for exclude in (None, seen):
            values, ids = head.topk(problem.input, k, exclude=exclude)
            expected, _ = manymax.linear_topk(
                problem.input, problem.linear_weight, k, linear_bias=problem.linear_bias, exclude=exclude
            )
            assert torch.equal(values, expected)
            scores, live = problem.scores(), values > -torch.inf
            assert torch.equal(scores.gather(-1, ids.clamp(min=0))[live], values[live])  # ids may differ among ties
            assert (ids[~live] == -100).all()
            for row in ids.reshape(-1, k):
                assert len(row[row >= 0].unique()) == (row >= 0).sum()
            if exclude is not None:
                assert not (ids.unsqueeze(-1) == exclude.clamp(min=-1).unsqueeze(-2)).any()
        taylor = make_head("TaylorSoftmax", problem)  # ranked by p, not by scores
        expected = taylor.topk(3 * problem.input, k)
        found = ShardedHead(taylor, sizes=sizes, group=group).topk(3 * problem.input, k)
        assert torch.equal(found[0], expected[0])


def stateful(group: dist.ProcessGroup, sizes: list[int] | None = None) -> ShardedHead:
    """A head with vectors, bias, class weights, a learned number and a sampler that learns."""
    head = manymax.LinearNCELoss(
        None,
        21,
        manymax.samplers.InBatchSampler(21),
        None,
        log_z=0.5,
        learnable=True,
        weight=class_weights(21),
    )
    return ShardedHead(head, 3, bias=True, sizes=sizes, group=group, dtype=torch.float64)


def save(group: dist.ProcessGroup, sizes: list[int] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A step of training, then the state of this rank and that of all."""
    head = stateful(group, sizes)
    head(torch.ones(4, 3, dtype=torch.float64), torch.tensor([20, 3, 3, 11])).backward()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter -= 0.1 * parameter.grad
    return head.state_dict(), head.full_state_dict()


def load(group: dist.ProcessGroup, states: list[dict[str, Any]], sizes: list[int] | None) -> dict[str, Any]:
    """The state of all ranks after loading the parts."""
    torch.manual_seed(dist.get_rank(group))
    head = stateful(group, sizes)
    head.load_shards(states)
    return head.full_state_dict()


def state_of(
    group: dist.ProcessGroup, name: str, setting: Mapping[str, Any], states: list[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any], float]:
    """The state of this rank and of all, and the loss, of a member with its own vectors or with those of `states`."""
    problem, num_classes = make_problem(6, num_classes=17), 17
    sizes = uneven(num_classes, dist.get_world_size(group))
    weight = class_weights(num_classes)
    if states:  # everything must come from the states
        problem, weight = Problem(problem.input, 0 * problem.linear_weight, 0 * problem.linear_bias), 0 * weight
    head = ShardedHead(make_head(name, problem, weight=weight, **setting), sizes=sizes, group=group)
    if states:
        head.load_shards(states)
    loss = head(problem.input, make_target("ids", 6, num_classes=num_classes))
    return head.state_dict(), head.full_state_dict(), loss.item()


def load_wrong_part(group: dist.ProcessGroup, states: list[dict[str, Any]]) -> None:
    """The state of another rank, or of too few ranks."""
    head = stateful(group)
    with pytest.raises(RuntimeError, match="`load_shards` takes the states of all ranks"):
        head.load_state_dict(states[(dist.get_rank(group) + 1) % 2])
    if dist.get_rank(group) == 1:
        with pytest.raises(ArgumentError, match="`states` must hold the classes 11 to 20 of this rank; class 11 is in"):
            head.load_shards(states[:1])


def first_vectors(group: dist.ProcessGroup) -> dict[str, Any]:
    """New class vectors, in blocks of 8 classes, where only rank 0 has the same seed for every number of ranks."""
    torch.manual_seed(11 + dist.get_rank(group))
    with mock.patch("manymax.distributed.sharded_head.INIT_ROWS", 8):
        return stateful(group).full_state_dict()


def refusals(group: dist.ProcessGroup) -> None:
    """A fault on one rank raises an error on all of them, after which the ranks can go on."""
    rank, problem = dist.get_rank(group), make_problem(6, num_classes=40, bias=True)
    target = make_target("ids", 6, num_classes=40)
    head = ShardedHead(make_head("Sparsemax", problem), group=group)

    def refused(match_there: str, match_elsewhere: str, *arguments: Any, there: int = 1, head: Any = head) -> None:
        with pytest.raises(ManymaxError, match=match_there if rank == there else match_elsewhere):
            head(*arguments)

    own = head.shards.size
    wrong = torch.zeros(own + (rank == 1), problem.input.shape[1], dtype=torch.float64)
    refused("`linear_weight` must have .* the classes of rank 1", "another rank refused", problem.input, target, wrong)
    rows = 6 - (rank == 1)
    refused("got 5 rows on one, 6 on another", "got 5 rows on", problem.input[:rows], target[:rows])
    bias = torch.zeros(40, dtype=torch.float64)
    bias[39] = -torch.inf
    masked = ShardedHead(make_head("Rankmax", Problem(problem.input, problem.linear_weight, bias)), group=group)
    refused("a masked class", "another rank", problem.input, torch.full((6,), 39), head=masked)
    with torch.no_grad():
        head.linear_weight[0, 0] = torch.nan if rank == 1 else 0.0
    refused("must not hold nan", "must not hold nan", problem.input, target)
    for name in ("Softmax", "Rankmax"):
        again = ShardedHead(make_head(name, problem), group=group)
        with torch.no_grad():
            again.linear_weight[0, 0] = torch.nan if rank == 1 else 0.0
        refused("must not hold nan", "must not hold nan", problem.input, target, head=again)
    fine = ShardedHead(make_head("Softmax", problem), group=group)
    assert fine(problem.input, target).isfinite()
