"""What the ranks do in the tests of row-sparse gradients under DistributedDataParallel: half of the rows each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import manymax
from manymax import ArgumentError, ManymaxError
from manymax.distributed import RowSparseGradients
from manymax.engine.row_sparse import distinct_rows
from tests.distributed.jobs_messages import counting
from tests.heads.plain import agree

ROWS, DIM = 12, 6


class GivenDraws(manymax.samplers.UniformSampler):
    """A uniform sampler whose draws are known: row n gets row n of `ids`."""

    ids: Tensor

    def draw_ids(self, shape: tuple[int, ...], device: torch.device, generator: Any) -> Tensor:
        assert tuple(self.ids.shape) == tuple(shape)
        return self.ids


class Model(nn.Module):
    """A dense layer before a head."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.dense, self.head = nn.Linear(DIM, DIM), head

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return self.head(self.dense(input), target)


def sparsemax(classes: int) -> nn.Module:
    return manymax.LinearSparsemaxLoss(DIM, classes, bias=True, options={"sparse_grad": True})


def sampled(classes: int) -> nn.Module:
    return manymax.LinearSampledSoftmaxLoss(DIM, classes, GivenDraws(classes), 5, bias=True, sparse_grad=True)


def tree(classes: int) -> nn.Module:
    return manymax.LinearHierarchicalSoftmaxLoss(DIM, classes, bias=True, options={"sparse_grad": True})


HEADS: dict[str, Callable[[int], nn.Module]] = {"sparsemax": sparsemax, "sampled": sampled, "tree": tree}


def make(name: str, classes: int, seed: int) -> Model:
    """A model in float64, whose scores are far apart, so that supports are small."""
    torch.manual_seed(seed)
    model = Model(HEADS[name](classes)).double()
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.mul_(30)
    return model


def batch(classes: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, target and draws of all rows."""
    random = torch.Generator().manual_seed(seed)
    queries = torch.randn(ROWS, DIM, generator=random, dtype=torch.float64)
    return queries, *(torch.randint(classes, shape, generator=random) for shape in ((ROWS,), (ROWS, 5)))


def backward(model: Any, head: nn.Module, given: tuple[Tensor, ...], part: slice, factor: float = 1.0) -> None:
    """The gradients of some rows, times a factor."""
    queries, target, draws = (values[part] for values in given)
    if isinstance(getattr(head, "sampler", None), GivenDraws):
        head.sampler.ids = draws
    (factor * model(queries, target)).backward()


def own_rows(group: dist.ProcessGroup) -> slice:
    share = ROWS // dist.get_world_size(group)
    return slice(share * dist.get_rank(group), share * (dist.get_rank(group) + 1))


def compare(model: nn.Module, whole: nn.Module) -> None:
    """Fail unless all gradients agree, and row-sparse ones have the same rows."""
    expected = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        grad, other = parameter.grad, expected[name].grad
        assert grad.is_sparse == other.is_sparse, name
        if grad.is_sparse:
            assert torch.equal(distinct_rows(grad)[0], distinct_rows(other)[0]), name
        agree([grad.to_dense()], [other.to_dense()], 1e-12, name)


def averages(group: dist.ProcessGroup, name: str, classes: int) -> list[int]:
    """The gradients of the whole batch; returns how many numbers the messages have that average them."""
    whole, model = make(name, classes, 1), make(name, classes, 1 + dist.get_rank(group))
    given = batch(classes, 2)
    rows = RowSparseGradients(model, group=group)
    parallel = DistributedDataParallel(model, process_group=group)
    backward(whole, whole.head, given, slice(None))
    backward(parallel, model.head, given, own_rows(group))
    with counting() as sent:
        rows.average()
    compare(model, whole)
    return [message.numel() for message in sent]


def touched(group: dist.ProcessGroup, name: str, classes: int) -> list[int]:
    """How many rows the gradients of each rank's own part have, the largest of all ranks for each parameter."""
    given, ranks, counts = batch(classes, 2), dist.get_world_size(group), []
    for rank in range(ranks):
        model, share = make(name, classes, 1), ROWS // ranks
        backward(model, model.head, given, slice(share * rank, share * (rank + 1)))
        counts.append([distinct_rows(p.grad)[0].shape[1] for p in model.head.parameters()])
    return [max(column) for column in zip(*counts, strict=True)]


def training(group: dist.ProcessGroup, name: str) -> None:
    """Three steps of two accumulated batches, averaged by the optimiser's hook: those of one process."""
    models = [make(name, 500, 1), make(name, 500, 1 + dist.get_rank(group))]
    rows = RowSparseGradients(models[1], group=group)
    parallel = DistributedDataParallel(models[1], process_group=group)
    optimizers = []
    for model in models:
        optimizers.append(manymax.optim.SparseAdam(model.head.parameters(), lr=0.1))
        optimizers.append(torch.optim.SGD(model.dense.parameters(), lr=0.1))
    optimizers[2].register_step_pre_hook(lambda *_: rows.average())
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        first, second = batch(500, 2 * step), batch(500, 2 * step + 1)
        for given in (first, second):
            backward(models[0], models[0].head, given, slice(None), 0.5)
        with parallel.no_sync():
            backward(parallel, models[1].head, first, own_rows(group), 0.5)
        backward(parallel, models[1].head, second, own_rows(group), 0.5)
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        agree([ours.detach()], [theirs.detach()], 1e-10, name)


def ranks_without_rows(group: dist.ProcessGroup, name: str) -> None:
    """Ranks with nothing but ignored rows, and then without any gradient, beside one with all rows."""
    rank, given = dist.get_rank(group), batch(500, 2)
    whole, model = make(name, 500, 1), make(name, 500, 1)
    rows = RowSparseGradients(model.head, group=group)  # a head of its own, in no DistributedDataParallel
    rows.average()
    assert all(parameter.grad is None for parameter in model.head.parameters())
    backward(whole, whole.head, given, slice(None), 1 / dist.get_world_size(group))
    ignored = given[0], torch.full_like(given[1], -100), given[2]
    for empty in (True, False):
        model.zero_grad()
        if rank == 0 or empty:
            backward(model, model.head, given if rank == 0 else ignored, slice(None))
        rows.average()
        compare(model.head, whole.head)
    model.zero_grad()
    backward(model, model.head, ignored, slice(None))
    rows.average()
    assert all(len(distinct_rows(parameter.grad)[1]) == 0 for parameter in model.head.parameters())


def tied(group: dist.ProcessGroup) -> None:
    """A parameter with two names, whose gradient is dense on one rank and row-sparse on the other."""
    rank = dist.get_rank(group)
    model = nn.Module()
    model.table = model.again = nn.Embedding(9, 2, dtype=torch.float64)
    rows = RowSparseGradients(model, ["again.weight", "table.weight"], group=group)
    assert rows.names == ["again.weight"]
    weight = model.table.weight
    dense = torch.arange(18.0, dtype=torch.float64).view(9, 2)
    weight.grad = dense.clone() if rank == 0 else dense.to_sparse(1)
    rows.average()
    assert torch.equal(weight.grad, dense)


def refusals(group: dist.ProcessGroup) -> None:
    """A fault on one rank raises an error on all of them, after which the ranks can go on."""
    rank, model = dist.get_rank(group), make("sparsemax", 40, 1)
    names = ["head.linear.weight"]
    with pytest.raises(ManymaxError, match="has no 'head.weight'" if rank == 1 else "another rank refused"):
        RowSparseGradients(model, ["head.weight"] if rank == 1 else names, group=group)
    with pytest.raises(ArgumentError, match="`model` must have the same row-sparse parameters on all ranks"):
        RowSparseGradients(model, [*names, "head.linear.bias"] if rank == 1 else names, group=group)
    with pytest.raises(ArgumentError, match="`model` has no head with row-sparse gradients: give the head"):
        RowSparseGradients(nn.Linear(2, 2), group=group)
    with pytest.raises(ArgumentError, match="`model` must be given before it is wrapped"):
        RowSparseGradients(DistributedDataParallel(model, process_group=group), group=group)
    rows, weight = RowSparseGradients(model, names, group=group), model.head.linear.weight
    weight.grad = torch.ones_like(weight).to_sparse(1 + (rank == 1))  # single numbers on rank 1
    with pytest.raises(ManymaxError, match=r"the gradient of `head\.linear\.weight` is neither dense nor row-sparse"):
        rows.average()
    weight.grad = torch.ones_like(weight).to_sparse(1)
    rows.average()
    assert torch.equal(weight.grad.to_dense(), torch.ones_like(weight))


def half_precision(group: dist.ProcessGroup) -> None:
    """Summed in float32 and rounded once: 1, and 2^-9 on each other rank, whose sum and share bfloat16 would lose."""
    weight = nn.Parameter(torch.zeros(9, 2, dtype=torch.bfloat16))
    model = nn.ParameterDict({"weight": weight})
    rows = RowSparseGradients(model, ["weight"], group=group)
    value = torch.full((1, 2), 1.0 if dist.get_rank(group) == 0 else 2.0**-9, dtype=torch.bfloat16)
    weight.grad = torch.sparse_coo_tensor(torch.tensor([[4]]), value, weight.shape, check_invariants=True)
    rows.average()
    mean = (1 + (dist.get_world_size(group) - 1) * 2.0**-9) / dist.get_world_size(group)
    assert weight.grad.dtype == torch.bfloat16
    assert torch.equal(weight.grad.to_dense()[4], torch.full((2,), mean).bfloat16())
