"""Losses of two towers whose documents are gathered over ranks, against the slow reference on all documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import manymax
from manymax.errors import ArgumentError, ManymaxError
from tests.distributed.pool import Pool
from tests.heads.two_towers import leaves, make_towers, slow_in_batch, slow_siglip

PAIRS, HARD = (5, 4, 1), (2, 3, 4)  # of each rank


def parts_of(rank: int) -> tuple[slice, slice]:
    """Which pairs and which hard negatives are those of a rank."""
    return tuple(slice(sum(sizes[:rank]), sum(sizes[: rank + 1])) for sizes in (PAIRS, HARD))


def own_part(batch: dict[str, Any], rank: int, count: int) -> dict[str, Any]:
    """What a rank has of a batch whose candidates are all `count` documents and then all hard negatives."""
    pairs, hard = parts_of(rank)
    later = slice(count + hard.start, count + hard.stop)
    both = {name: torch.cat([batch[name][pairs], batch[name][later]]) for name in ("ids", "log_q")}
    return (
        batch
        | {name: batch[name][pairs] for name in ("queries", "documents", "groups")}
        | both
        | {"hard": batch["hard"][hard]}
    )


def compare(group: dist.ProcessGroup, kind: str, normalize: bool) -> None:
    """The loss of this rank's queries, and the gradients of the sum of the losses of all ranks in its tensors."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    count = sum(PAIRS[:size])
    batch = make_towers(count, sum(HARD[:size]), 1)
    if kind == "siglip":
        batch.pop("log_q")
        call: Callable[..., Tensor] = manymax.siglip_loss
        slow: Callable[..., Tensor] = slow_siglip
        batch["log_q"] = torch.zeros(count + sum(HARD[:size]), dtype=torch.float64)
    else:
        batch.pop("bias")
        call, slow = manymax.in_batch_loss, lambda *given, **more: slow_in_batch(given[0], kind, symmetric=True, **more)
    keywords: dict[str, Any] = {} if kind == "siglip" else {"member": kind, "symmetric": True}
    mine, theirs = leaves(own_part(batch, rank, count)), leaves(batch)
    given = {name: value for name, value in mine.items() if kind != "siglip" or name != "log_q"}
    ours = call(**given, gather=group, normalize=normalize, **keywords)
    rows = slow(theirs, normalize=normalize)
    means = [rows[parts_of(each)[0]].mean() for each in range(size)]
    torch.testing.assert_close(ours, means[rank], rtol=1e-9, atol=1e-9)
    ours.backward()
    # Tensors that a rank has for itself get the gradient of its own loss; vectors that others use, that of the sum.
    (own,) = torch.autograd.grad(means[rank], [theirs["temperature"]], retain_graph=True)
    torch.testing.assert_close(mine["temperature"].grad, own, rtol=1e-9, atol=1e-9)
    sum(means).backward()
    pairs, hard = parts_of(rank)
    for name, part in (("queries", pairs), ("documents", pairs), ("hard", hard)):
        torch.testing.assert_close(mine[name].grad, theirs[name].grad[part], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["softmax", "sparsemax", "siglip"])
def test_documents_of_all_ranks_are_candidates(pool: Pool, kind: str, ranks: int) -> None:
    for normalize in (False, True):
        pool.run(ranks, compare, kind, normalize)


def refuse(group: dist.ProcessGroup, changes: dict[str, Any]) -> str:
    """The error of this rank, where the arguments of rank 1 are changed."""
    batch = make_towers(4, 2, dist.get_rank(group))
    given = {name: batch[name] for name in ("queries", "documents")}
    try:
        manymax.in_batch_loss(**(given | (changes if dist.get_rank(group) == 1 else {})), gather=group)
    except ManymaxError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_all_ranks_refuse_together(pool: Pool) -> None:
    other, own = pool.run(2, refuse, {"ids": torch.zeros(3, dtype=torch.long)})
    assert "another rank refused" in other
    assert own.startswith(ArgumentError.__name__)
    for changes in ({"groups": torch.zeros(4, dtype=torch.long)}, {"queries": torch.zeros(4, 5, requires_grad=True)}):
        assert all("all ranks must give" in error for error in pool.run(2, refuse, changes))
