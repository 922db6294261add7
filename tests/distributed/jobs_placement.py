"""What the ranks do in the tests of torch's own ways to spread tensors and modules: DTensor and `fully_shard`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import manymax
from manymax import ManymaxError
from manymax.distributed import ShardedHead

CLASSES, DIM, ROWS = 10, 4, 6


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, class vectors and labels, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    input, weight = torch.randn(ROWS, DIM, generator=generator), torch.randn(CLASSES, DIM, generator=generator)
    return input.to(dtype), weight.to(dtype), torch.randint(CLASSES, (ROWS,), generator=generator)


def refused(call: Callable[[], Any], pattern: str) -> None:
    """Fail unless a call raises an error of manymax with these words."""
    with pytest.raises(ManymaxError, match=pattern):
        call()


def class_vectors(group: dist.ProcessGroup) -> int:
    """A DTensor as class vectors: its gradient is that of one machine, and other placements are refused."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, (input, weight, target) = DeviceMesh.from_group(group, "cpu"), data()
    ranks = dist.get_world_size(group)
    whole = weight.clone().requires_grad_()
    expected = manymax.linear_entmax_loss(input, whole, target)
    expected.backward()
    spread = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    sizes = tuple(len(part) for part in weight.chunk(ranks))
    head = ShardedHead(manymax.LinearEntmaxLoss(None, CLASSES), sizes=sizes, group=group)
    queries = input.clone().requires_grad_()
    loss = head(queries, target, spread)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(spread.grad.full_tensor(), whole.grad, rtol=1e-12, atol=1e-12)
    assert queries.grad is not None
    best = head.topk(input, 3, spread)[1]
    assert torch.equal(best, (input @ weight.T).topk(3).indices)

    copies, columns = (distribute_tensor(weight, mesh, [place]) for place in (Replicate(), Shard(1)))
    for other in (copies, columns):
        refused(lambda other=other: head(input, target, other), r"sharded on dimension 0 .* got \((Replicate|Shard)\(")
    uneven = ShardedHead(
        manymax.LinearEntmaxLoss(None, CLASSES), sizes=(CLASSES - ranks + 1, *[1] * (ranks - 1)), group=group
    )
    if uneven.shards.sizes != sizes:
        refused(lambda: uneven(input, target, spread), rf"build it with `sizes={re.escape(str(sizes))}`")
    plain = manymax.LinearEntmaxLoss(None, CLASSES)
    for other in (spread, copies, columns):
        refused(lambda other=other: plain(input, target, other), r"`linear_weight` is a DTensor .*ShardedHead")
        refused(lambda other=other: manymax.linear_softmax_loss(input, other, target), "ShardedHead")
        refused(lambda other=other: manymax.linear_topk(input, other, 2), "ShardedHead")
    rows = distribute_tensor(input, mesh, [Shard(0)])
    refused(lambda: plain(rows, target, weight), r"`input` is a DTensor .* `input.to_local\(\)`")
    ids = distribute_tensor(target, mesh, [Replicate()])
    refused(lambda: plain(input, ids, weight), r"`target` is a DTensor")
    return ranks


class Model(nn.Module):
    """A layer and a head."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(DIM, DIM, dtype=torch.float64), head

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.head(torch.tanh(self.layer(input)), target)
        return loss


def fully_sharded(group: dist.ProcessGroup, wraps_head: bool) -> int:
    """Steps of a model under `fully_shard`, each rank with its own rows, against one machine with all rows."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh, (input, weight, target) = DeviceMesh.from_group(group, "cpu"), data()
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    def model() -> Model:
        made = Model(manymax.LinearSparsemaxLoss(DIM, CLASSES, bias=True, dtype=torch.float64))
        with torch.no_grad():
            made.head.linear.weight.copy_(weight)  # type: ignore[union-attr]
            made.head.linear.bias.zero_()  # type: ignore[union-attr]
        return made

    whole, parallel = model(), model()
    if wraps_head:
        fully_shard(parallel.head, mesh=mesh)
    fully_shard(parallel, mesh=mesh)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3) for each in (whole, parallel)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole(input, target).backward()
        mine = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
        parallel(input[mine], target[mine]).backward()
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(parallel.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-12, atol=1e-12)
    return ranks


def misplaced(group: dist.ProcessGroup) -> int:
    """`fully_shard` where it cannot work is refused in words."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh, (input, _, target) = DeviceMesh.from_group(group, "cpu"), data()
    made = Model(manymax.LinearSparsemaxLoss(DIM, CLASSES, dtype=torch.float64))
    fully_shard(made.head.linear, mesh=mesh)  # type: ignore[union-attr]
    refused(lambda: made(input, target), "wrap the head or the model around it")
    sharded = ShardedHead(manymax.LinearSparsemaxLoss(DIM, CLASSES, dtype=torch.float64), group=group)
    made = Model(sharded)
    fully_shard(made, mesh=mesh)
    refused(lambda: made(input, target), "ignored_params")
    made = Model(ShardedHead(manymax.LinearSparsemaxLoss(DIM, CLASSES, dtype=torch.float64), group=group))
    fully_shard(made, mesh=mesh, ignored_params=set(made.head.parameters()))
    made(input, target).backward()
    assert made.head.linear_weight.grad.shape == made.head.linear_weight.shape
    return dist.get_world_size(group)
