"""Data-parallel training: several processes (ranks) train one model, each on some rows of every batch.

    gradient of a batch  =  sum over ranks of  (divisor of its rows / divisor of the batch) x gradient of its rows

The sum is the gradient of the whole batch, so a run on R ranks takes the same steps as a run on one rank, up to the
rounding of the summation. Each rank draws the negatives of the whole batch, from the same generator, and keeps those of
its own rows. Dropout masks are the one exception: each rank draws its own.

The first rank leads. It alone reads and writes files, evaluates, and decides when to stop. It sends the other ranks the
model to train, then the number of each batch before it is computed. If a rank ends or does not answer, all other ranks
raise `RankLost`.
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

# Seconds that a rank waits for a message. It must be longer than an evaluation, which the first rank does alone while
# the others wait. A rank that has died closes its connection and is noticed at once, without this wait.
RANK_TIMEOUT = 1800.0
TRAINING_OVER = -1  # sent in place of the number of an epoch


class RankLost(ManymaxError):
    """Another rank has ended, or has not answered for too long."""


@contextlib.contextmanager
def join_ranks(seconds: float = RANK_TIMEOUT) -> Iterator[Team]:
    """Connect the ranks that torchrun has started while the block runs; a team of one if there is no torchrun.

    Args:
        seconds: how long a rank waits for a message of the others before it gives up.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Team()
        return
    with _as_rank_lost("the ranks have not found each other"):
        dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    team = Team()
    _set_signal_handlers(team)
    try:
        yield team
        with contextlib.suppress(RankLost):  # the result is written by now: a rank that has died makes no difference
            team.finish()
    finally:
        dist.destroy_process_group()


def _set_signal_handlers(team: Team) -> None:
    """Let the first rank alone react to Ctrl-C and SIGTERM, which torchrun passes on to all ranks.

    The other ranks ignore both signals: they end when the first rank has saved its checkpoint and says so. If they
    ended at once, the first rank would lose them in the middle of a step and could not save.
    """

    def end_unless_lost(number: int, frame: FrameType | None) -> None:
        # When a rank dies, torchrun sends SIGTERM to the others. The first rank is then about to raise `RankLost`,
        # and its message would be lost if it ended here. During training, `stop_on_signals` replaces this handler.
        if not team.lost:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    if team.rank == 0:
        signal.signal(signal.SIGTERM, end_unless_lost)
    else:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _as_rank_lost(complaint: str) -> Iterator[None]:
    """Turn the errors that torch.distributed raises when a rank does not answer into a `RankLost`."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        # Keep the first sentence: torch adds the C++ source line before it and advice after it.
        reason = re.sub(r"^\[.*?\] ", "", str(error).strip()).partition("\n")[0].partition(". ")[0]
        raise RankLost(f"{complaint} ({reason}). The same command continues from the last checkpoint.") from None


class Team:
    """The ranks that train one model together.

    Args:
        group: of torch.distributed; it must contain the process of global rank 0, which leads. None means the default
            group, or this process alone if torch.distributed is not initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.ranks = ProcessRanks(group)
        self.rank, self.size = self.ranks.rank, self.ranks.size
        self.lost = False  # whether another rank has not answered
        self._task_sent = False
        self._splitting = False  # whether the current batch is split over the ranks

    # Messages of the first rank to the others. Each `send` of the first rank is a broadcast, so the others must be in
    # the matching `receive`: one task, then any number of batches, then the end.

    def send_task(self, task: Any) -> None:
        """On the first rank: send the others what is to be trained."""
        if self.size > 1:
            self._task_sent = True
            self._broadcast_object(task)

    def receive_task(self) -> Any:
        """On the other ranks: wait for the task of the first rank; None if there is nothing to do."""
        return self._broadcast_object(None)

    def announce_batch(self, epoch: int, batch: int, step: int) -> None:
        """On the first rank: tell the others which batch is computed next."""
        if self.size > 1:
            self._broadcast_numbers(epoch, batch, step)

    def next_batch(self) -> tuple[int, int, int] | None:
        """On the other ranks: wait for (epoch, batch, step) of the next batch; None when training is over."""
        epoch, batch, step = self._broadcast_numbers(0, 0, 0)
        return None if epoch == TRAINING_OVER else (epoch, batch, step)

    def finish(self) -> None:
        """On the first rank: tell the others that training is over. Does nothing on the other ranks."""
        if self.rank > 0:
            return
        # The others wait for a batch once they have a task, and for the task before that: each wait needs its answer.
        if self._task_sent:
            self.announce_batch(TRAINING_OVER, 0, 0)
        elif self.size > 1:
            self._broadcast_object(None)

    def _broadcast_numbers(self, *numbers: int) -> list[int]:
        with self._communicating():
            return self.ranks.first(torch.tensor(numbers)).tolist()

    def _broadcast_object(self, content: Any) -> Any:
        box = [content]
        with self._communicating():
            dist.broadcast_object_list(box, src=0, group=self.ranks.group)
        return box[0]

    @contextlib.contextmanager
    def _communicating(self) -> Iterator[None]:
        try:
            with _as_rank_lost("another rank has ended, or cannot be reached; its own error may say why"):
                yield
        except RankLost:
            self.lost = True
            raise

    # One training step

    def own_rows(self, batch: Batch, multilabel: str) -> tuple[Batch | None, float]:
        """The rows of a batch that this rank computes, and the weight of their mean loss in that of the batch.

        A batch with fewer rows than ranks is computed by the first rank alone; the others get (None, 0.0).

        Args:
            batch: the whole batch, the same on every rank.
            multilabel: how a row with several positives counts in the mean: "sum" or "normalized".
        """
        self._splitting = 1 < self.size <= len(batch.users)
        if not self._splitting:
            return (batch, 1.0) if self.rank == 0 else (None, 0.0)
        rows = len(batch.users)
        own = rows_of(batch, rows * self.rank // self.size, rows * (self.rank + 1) // self.size)
        return own, _divisor(own.target, multilabel) / _divisor(batch.target, multilabel)

    def sum_gradients(self, model: nn.Module, losses: Sequence[Tensor], refused: ArgumentError | None) -> list[float]:
        """Sum the gradients of all parameters and the losses over the ranks.

        Args:
            model: its parameters' `grad` become the sums.
            losses: scalars, one per batch of the step.
            refused: an error that this rank has met. If any rank has one, all ranks raise it.

        Returns:
            The sum of each loss.
        """
        if self.size > 1:
            parameters = list(model.parameters())
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            # One message for everything: gradients, losses and whether there is an error. A rank with an error takes
            # part too, because the others would wait for it in vain.
            tail = torch.stack([*losses, torch.tensor(float(refused is not None))])
            with self._communicating():
                summed = self.ranks.sum(torch.cat([*(grad.flatten() for grad in grads), tail]))
            *sums, tail = summed.split([*(grad.numel() for grad in grads), len(tail)])
            for parameter, total in zip(parameters, sums, strict=True):
                parameter.grad = total.view_as(parameter)
            losses = list(tail[:-1])
            if tail[-1] > 0:
                refused = self._first_error(refused)
        if refused is not None:
            raise refused
        return [loss.item() for loss in losses]

    def _first_error(self, refused: ArgumentError | None) -> ArgumentError:
        """The error of the lowest rank that has one, the same on all ranks."""
        messages: list[str | None] = [None] * self.size
        with self._communicating():
            dist.all_gather_object(messages, None if refused is None else str(refused), group=self.ranks.group)
        return ArgumentError(next(message for message in messages if message is not None))

    # Negatives

    def share_draws(self, model: nn.Module) -> None:
        """Let every sampler of the model draw for the rows of all ranks and return the draws of this rank's rows.

        The ranks' generators have the same seed. If each rank drew for its own rows only, all ranks would draw the same
        negatives, and the draws would depend on the number of ranks.
        """
        if self.size == 1:
            return
        for sampler in model.modules():
            if isinstance(sampler, Sampler):
                sampler.register_forward_pre_hook(self._gather_rows, with_kwargs=True)
                sampler.register_forward_hook(self._keep_own_rows, with_kwargs=False)

    def _gather_rows(self, sampler: nn.Module, args: tuple[Any, ...], call: dict[str, Any]) -> Any:
        """Forward pre-hook of a sampler: replace the rows of its call by those of all ranks."""
        if not self._splitting:
            return None
        target = call["target"]
        self._rows = len(target)
        # Only samplers whose proposal depends on the query need the queries of the other ranks: a message saved.
        needs_queries = not isinstance(sampler, FixedSampler | InBatchSampler)
        owner = torch.arange(len(target), device=target.device) if call.get("owner") is None else call["owner"]
        with self._communicating():
            # Number the queries of all ranks apart: query i of two ranks is not the same query.
            owner, _ = self.ranks.gather_all(owner * self.size + self.rank)
            target, self._start = self.ranks.gather_all(target)
            queries = self.ranks.gather_all(call["input"])[0] if needs_queries else None
        # Scores that the head has computed already are of this rank's rows only, so the sampler cannot use them.
        shared = {"target": target, "owner": owner, "input": queries, "scores": None}
        if "batch_rows" in call:
            shared["batch_rows"] = None  # the rows of all ranks are rows of several batches
        return args, call | shared

    def _keep_own_rows(self, sampler: nn.Module, args: tuple[Any, ...], draw: Draw) -> Draw:
        """Forward hook of a sampler: keep the draws of this rank's rows."""
        return rows_of_draw(draw, self._start, self._rows) if self._splitting else draw


def rows_of(batch: Batch, start: int, stop: int) -> Batch:
    """The rows [start, stop) of a batch, with their targets.

    >>> batch = Batch(torch.arange(3), torch.tensor([[5, 6], [7, -100], [8, 9]]), torch.arange(5), every_position=True)
    >>> rows_of(batch, 1, 3).target
    tensor([2, 3, 4])
    """
    history = None if batch.history is None else batch.history[start:stop]
    first, last = start, stop
    if batch.every_position and batch.history is not None:
        # There is one target per entry of the history, not one per row: count the entries up to each row.
        ends = (batch.history != PADDING).sum(1).cumsum(0)
        first, last = int(ends[start - 1]) if start else 0, int(ends[stop - 1])
    target = _rows_of_target(batch.target, first, last)
    exclude = None if batch.exclude is None else batch.exclude[start:stop]
    return replace(batch, users=batch.users[start:stop], history=history, target=target, exclude=exclude)


def _rows_of_target(target: Tensor | Target | None, start: int, stop: int) -> Tensor | Target | None:
    if not isinstance(target, Target):
        return None if target is None else target[start:stop]
    ids = None if target.ids is None else target.ids[start:stop]
    return Target(ids, target.weights[start:stop], target.count[start:stop], target.divisor[start:stop])


def _divisor(target: Tensor | Target | None, multilabel: str) -> float:
    """The number that the mean loss of these rows is divided by: that of their positives, or of rows with any."""
    assert target is not None
    if isinstance(target, Tensor):
        return float(target.numel())
    return float(target.weights.sum() if multilabel == "sum" else (target.count > 0).sum())


def rows_of_draw(draw: Draw, start: int, rows: int) -> Draw:
    """The draws of the rows [start, start + rows).

    Draws that all rows share stay as they are; only what is stated per row is cut.

    >>> rows = torch.tensor([7, 8, 8])  # of two queries
    >>> draw = Draw(torch.tensor([4, 1, 4]), None, torch.arange(3.0), "in-batch", source_row=rows, owner=rows)
    >>> rows_of_draw(draw, 1, 2).copies(2).tolist()
    [[False, True, True], [False, True, True]]
    """

    def own(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[start : start + rows]

    draw = replace(draw, log_q_target=own(draw.log_q_target), owner=own(draw.owner))
    if draw.shared:
        return draw
    return replace(draw, ids=draw.ids[start : start + rows], log_q=own(draw.log_q), source_row=own(draw.source_row))
