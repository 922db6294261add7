"""Several processes train one model: each takes some rows of every batch, and the gradients are summed.

    gradient of a batch  =  sum over ranks of  (divisor of its rows / divisor of the batch) x gradient of its rows

which is the gradient of the whole batch, so that a run on R ranks takes the steps of a run on one, up to the order of
summation. Negatives are drawn for the whole batch on every rank, from the same generator, and each rank keeps those of
its rows. Dropout masks alone are others: every rank draws its own.

The first rank leads: it alone reads and writes files, evaluates, and decides when to stop. The others hear from it what
is trained, then step by step which batch is next. A rank that is gone is an error on all others.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manymax.distributed.collectives import ProcessRanks
from manymax.engine.target import Target
from manymax.errors import ArgumentError, ManymaxError
from manymax.samplers import Sampler
from manymax.samplers.base import Draw, FixedSampler
from manymax.samplers.in_batch import InBatchSampler
from manymax.study.data.batches import Batch
from manymax.study.data.interactions import PADDING

PATIENCE = 1800.0  # seconds; while the first rank evaluates the others wait. A dead rank is noticed at once
OVER = -1


class Lost(ManymaxError):
    """Another rank is gone, or silent for too long."""


@contextlib.contextmanager
def joined(seconds: float = PATIENCE) -> Iterator[Team]:
    """The ranks that torchrun has started, while the block lasts; this process alone where it has started none.

    Args:
        seconds: that a rank waits for the others before it gives up.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Team()
        return
    with _reaching("the ranks have not found each other"):
        dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    team = Team()
    _hold_on(team)
    try:
        yield team
        with contextlib.suppress(Lost):  # all is done: whoever is gone by now is not missed
            team.dismiss()
    finally:
        dist.destroy_process_group()


def _hold_on(team: Team) -> None:
    """Let the first rank answer requests to end, and say what happened before torchrun ends all ranks."""

    def end(number: int, frame: FrameType | None) -> None:
        if not team.lost:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    if team.rank == 0:
        signal.signal(signal.SIGTERM, end)
    else:  # the first one stops between two steps, and saves
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _reaching(complaint: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:  # what torch.distributed raises when others do not answer
        reason = re.sub(r"^\[.*?\] ", "", str(error).strip()).partition("\n")[0].partition(". ")[0]  # no source lines
        raise Lost(f"{complaint} ({reason}). The same command goes on from the last checkpoint.") from None


class Team:
    """The ranks of a run.

    Args:
        group: of torch.distributed, which the first process of all must be in; None is the default group, or this
            process alone if there is none.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.ranks = ProcessRanks(group)
        self.rank, self.size = self.ranks.rank, self.ranks.size
        self.lost = self._begun = self._splitting = False

    # What the first rank says, and the others hear -----------------------------------------------

    def begin(self, task: Any) -> None:
        """Tell the others what is to be trained."""
        if self.size > 1:
            self._begun = True
            self._first_object(task)

    def task(self) -> Any:
        """What the first rank has begun; None if there is nothing to do."""
        return self._first_object(None)

    def lead(self, epoch: int, batch: int, step: int) -> None:
        """Tell the others which batch is next."""
        if self.size > 1:
            self._first(epoch, batch, step)

    def next(self) -> tuple[int, int, int] | None:
        """(epoch, batch, step) of the next batch; None when training is over."""
        epoch, batch, step = self._first(0, 0, 0)
        return None if epoch == OVER else (epoch, batch, step)

    def dismiss(self) -> None:
        """Tell the others that all is done."""
        if self.rank > 0:
            return
        if self._begun:
            self.lead(OVER, 0, 0)
        elif self.size > 1:
            self._first_object(None)

    def _first(self, *numbers: int) -> list[int]:
        with self._talking():
            return self.ranks.first(torch.tensor(numbers)).tolist()

    def _first_object(self, content: Any) -> Any:
        box = [content]
        with self._talking():
            dist.broadcast_object_list(box, src=0, group=self.ranks.group)
        return box[0]

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            with _reaching("another rank has ended, or cannot be reached; its own error may say why"):
                yield
        except Lost:
            self.lost = True
            raise

    # A step --------------------------------------------------------------------------------------

    def share(self, batch: Batch, multilabel: str) -> tuple[Batch | None, float]:
        """This rank's rows of a batch, and their part in its mean.

        A batch with fewer rows than ranks is left to the first rank; the others get None.
        """
        self._splitting = 1 < self.size <= len(batch.users)
        if not self._splitting:
            return (batch, 1.0) if self.rank == 0 else (None, 0.0)
        rows = len(batch.users)
        own = rows_of(batch, rows * self.rank // self.size, rows * (self.rank + 1) // self.size)
        return own, _divisor(own.target, multilabel) / _divisor(batch.target, multilabel)

    def summed(self, model: nn.Module, losses: Sequence[Tensor], refused: ArgumentError | None) -> list[float]:
        """Sum gradients and losses over the ranks, in one message; an error of one rank is raised on all."""
        if self.size > 1:
            parameters = list(model.parameters())
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            tail = torch.stack([*losses, torch.tensor(float(refused is not None))])
            with self._talking():
                whole = self.ranks.sum(torch.cat([*(grad.flatten() for grad in grads), tail]))
            *sums, tail = whole.split([*(grad.numel() for grad in grads), len(tail)])
            for parameter, total in zip(parameters, sums, strict=True):
                parameter.grad = total.view_as(parameter)
            losses = list(tail[:-1])
            if tail[-1] > 0:
                refused = self._first_error(refused)
        if refused is not None:
            raise refused
        return [loss.item() for loss in losses]

    def _first_error(self, refused: ArgumentError | None) -> ArgumentError:
        said: list[str | None] = [None] * self.size
        with self._talking():
            dist.all_gather_object(said, None if refused is None else str(refused), group=self.ranks.group)
        return ArgumentError(next(text for text in said if text is not None))

    # Negatives -----------------------------------------------------------------------------------

    def share_draws(self, model: nn.Module) -> None:
        """Let the samplers of a model draw for the rows of all ranks, and keep the draws for those of this rank."""
        if self.size == 1:
            return
        for sampler in model.modules():
            if isinstance(sampler, Sampler):
                sampler.register_forward_pre_hook(self._ask_for_all, with_kwargs=True)
                sampler.register_forward_hook(self._keep_own, with_kwargs=False)

    def _ask_for_all(self, sampler: nn.Module, args: tuple[Any, ...], call: dict[str, Any]) -> Any:
        if not self._splitting:
            return None
        target = call["target"]
        self._rows = len(target)
        follows_model = not isinstance(sampler, FixedSampler | InBatchSampler)
        owner = torch.arange(len(target), device=target.device) if call.get("owner") is None else call["owner"]
        with self._talking():
            owner, _ = self.ranks.gather_all(owner * self.size + self.rank)  # another query on every rank
            target, self._start = self.ranks.gather_all(target)
            queries = self.ranks.gather_all(call["input"])[0] if follows_model else None
        whole = {"target": target, "owner": owner, "input": queries, "scores": None}  # known scores are of own rows
        return args, call | whole

    def _keep_own(self, sampler: nn.Module, args: tuple[Any, ...], draw: Draw) -> Draw:
        return cut(draw, self._start, self._rows) if self._splitting else draw


def rows_of(batch: Batch, start: int, stop: int) -> Batch:
    """The rows [start, stop) of a batch.

    >>> batch = Batch(torch.arange(3), torch.tensor([[5, 6], [7, -100], [8, 9]]), torch.arange(5), every_position=True)
    >>> rows_of(batch, 1, 3).target
    tensor([2, 3, 4])
    """
    history = None if batch.history is None else batch.history[start:stop]
    first, last = start, stop
    if batch.every_position and batch.history is not None:  # a target for each entry of the history
        before = (batch.history != PADDING).sum(1).cumsum(0)
        first, last = int(before[start - 1]) if start else 0, int(before[stop - 1])
    return replace(batch, users=batch.users[start:stop], history=history, target=_cut(batch.target, first, last))


def _cut(target: Tensor | Target | None, start: int, stop: int) -> Tensor | Target | None:
    if not isinstance(target, Target):
        return None if target is None else target[start:stop]
    ids = None if target.ids is None else target.ids[start:stop]
    return Target(ids, target.weights[start:stop], target.count[start:stop], target.divisor[start:stop])


def _divisor(target: Tensor | Target | None, multilabel: str) -> float:
    """What the loss of a target is divided by in a mean: its positives, or its rows."""
    assert target is not None
    if isinstance(target, Tensor):
        return float(target.numel())
    return float(target.weights.sum() if multilabel == "sum" else (target.count > 0).sum())


def cut(draw: Draw, start: int, rows: int) -> Draw:
    """The draws for `rows` rows from `start` on.

    >>> rows = torch.tensor([7, 8, 8])  # of two queries
    >>> draw = Draw(torch.tensor([4, 1, 4]), None, torch.arange(3.0), "in-batch", source_row=rows, owner=rows)
    >>> cut(draw, 1, 2).copies(2).tolist()
    [[False, True, True], [False, True, True]]
    """

    def own(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[start : start + rows]

    draw = replace(draw, log_q_target=own(draw.log_q_target), owner=own(draw.owner))
    if draw.shared:
        return draw
    return replace(draw, ids=draw.ids[start : start + rows], log_q=own(draw.log_q), source_row=own(draw.source_row))
