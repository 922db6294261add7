"""Supervision of a training run: progress, early stopping, best weights, checkpoints, and stopping on signals."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from manymax.errors import ManymaxError
from manymax.study.checkpoint import (
    Tensors,
    TrainingState,
    load_checkpoint,
    load_optimizer,
    optimizer_tensors,
    prefixed,
    save_checkpoint,
    snapshot,
    unprefixed,
)
from manymax.study.config import RunConfig
from manymax.study.memory import MemoryWatch
from manymax.study.metrics import METRICS

LARGEST_WEIGHT = 1e6  # weights beyond it count as diverged; those of models that learn are orders of magnitude smaller


class Diverged(ManymaxError):
    """The loss is not finite, or a weight is not finite or larger than `LARGEST_WEIGHT`."""


class Pruned(ManymaxError):
    """A reporter has found the run, a trial of a search, to be hopeless: it ends early and is not tested."""


class Stopped(ManymaxError):
    """A signal asked the run to stop. Its checkpoint is saved, and starting the run again continues from it."""


class ProgressReporter:
    """Base class for progress reporters; ignores every event."""

    def reading(self, config: RunConfig) -> None:
        """Called before the data is read and prepared, which may take a minute."""

    def prepared(self, config: RunConfig, card: list[dict[str, Any]], num_items: int) -> None:
        """Called when the data is there, with its data card."""

    def begin(self, config: RunConfig, folder: Path, state: TrainingState) -> None:
        """Called when training begins, or continues from the checkpoint `state`."""

    def step(self, state: TrainingState, loss: float, of: int) -> None:
        """Called after each batch, with its loss and the number `of` batches in an epoch."""

    def epoch(self, state: TrainingState, row: dict[str, Any]) -> None:
        """Called after each epoch; `row` is the row of `epochs.parquet` for this epoch."""

    def end(self) -> None:
        """Called when training is over, for whatever reason."""


class TrainingSupervisor:
    """The part of a training run that is the same for every solver.

    A solver trains in a loop of this form, inside of `stop_on_signals`:

        while supervisor.has_epochs_left:
            ... learn a batch ...
            supervisor.count_batch(loss, batches_per_epoch)
            supervisor.save_or_stop()           # between two batches
        at the end of each epoch:
            supervisor.end_epoch()
            supervisor.save_or_stop()

    If there is a checkpoint at `path`, the constructor restores the model, the optimiser and `state` from it.

    Args:
        config: settings of the run.
        model: the model that is trained; its state is saved in checkpoints.
        validate: returns the mean metrics on the validation part.
        path: of the checkpoint.
        progress: is told about each batch and epoch.
        checkpoint_seconds: least number of seconds between two checkpoints.
        optimizer: its state is saved too; None for solvers without one.
    """

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        validate: Callable[[], dict[str, float]],
        path: Path,
        *,
        progress: ProgressReporter,
        checkpoint_seconds: float,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.config, self.model, self.validate, self.path = config, model, validate, path
        self.progress, self.checkpoint_seconds, self.optimizer = progress, checkpoint_seconds, optimizer
        self.state, self.best = TrainingState(), Tensors()
        self._stop_reason: str | None = None  # set by the signal handler, read between two batches
        if path.exists():
            self._resume()
        self._last_saved = time.perf_counter()
        self._memory: MemoryWatch | None = None

    def _resume(self) -> None:
        self.state, tensors = load_checkpoint(self.path, self.config.content_hash())
        try:
            self.model.load_state_dict(unprefixed("model", tensors))
        except RuntimeError as error:
            raise ManymaxError(f"{self.path} does not fit this run: {error}. Remove it to begin again.") from None
        self.best = unprefixed("best", tensors)
        if self.optimizer is not None:
            load_optimizer(self.optimizer, self.model, unprefixed("optimizer", tensors))

    @property
    def has_epochs_left(self) -> bool:
        """Whether to train another epoch: neither `epochs` nor `patience` is used up."""
        state, training = self.state, self.config.training
        return state.epoch < training.epochs and state.waited < training.patience

    def watch_memory(self) -> None:
        """Measure the memory of training from now to the end of the epoch; call it before the first step."""
        self._memory = MemoryWatch()

    @contextlib.contextmanager
    def timed(self, purpose: str) -> Iterator[None]:
        """Add the time of the block to `state.seconds[purpose]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = self.state.seconds
            spent[purpose] = spent.get(purpose, 0.0) + time.perf_counter() - start

    def count_batch(self, loss: float, batches_per_epoch: int) -> None:
        """Count a finished batch with this loss; raise `Diverged` if the loss is not finite."""
        state = self.state
        state.batch, state.step = state.batch + 1, state.step + 1
        if not math.isfinite(loss):
            raise Diverged(f"the loss is {loss} in epoch {state.epoch + 1}, step {state.step}")
        state.total_loss += loss
        self.progress.step(state, loss, batches_per_epoch)

    def end_epoch(self) -> None:
        """Finish an epoch: evaluate if it is due, keep the weights if they are the best so far, append the epoch's row.

        The epoch counts as finished only with the last assignment to `state`. A checkpoint is never written inside of
        this method, so a process that is killed here resumes from a checkpoint of before the end of the epoch and
        evaluates again, with the same result.
        """
        state, config = self.state, self.config
        if self._memory is not None:  # before the evaluation, which needs memory of its own
            state.training_memory_mb, self._memory = self._memory.growth(), None
        self.check_weights()  # before the evaluation, whose metrics would be meaningless
        epoch = state.epoch + 1
        metrics: dict[str, float] = {}
        if epoch % config.training.eval_every == 0 or epoch == config.training.epochs:
            with self.timed("evaluation"):
                metrics = self.validate()
            self._update_best(epoch, metrics[config.monitored])
        row = self._epoch_row(epoch, metrics)
        state.rows.append(row)
        state.epoch, state.batch, state.total_loss = epoch, 0, 0.0
        self.progress.epoch(state, row)

    def check_weights(self) -> None:
        """Raise `Diverged` if a weight is nan, infinite or larger than `LARGEST_WEIGHT`."""
        for name, parameter in self.model.named_parameters():
            if not parameter.numel():
                continue
            largest = float(parameter.detach().abs().max())
            if not largest < LARGEST_WEIGHT:  # written this way because comparisons with nan are false
                where = f"in epoch {self.state.epoch + 1}, step {self.state.step}"
                raise Diverged(f"the largest entry of `{name}` is {largest:.3g} {where}")

    def _update_best(self, epoch: int, value: float) -> None:
        """Keep the weights if the monitored metric is strictly better than before; count the evaluation otherwise."""
        state, best = self.state, self.state.best_value
        state.waited += 1
        higher = METRICS[self.config.monitored.partition("@")[0]].higher_is_better
        if best is None or (value > best if higher else value < best):
            state.best_epoch, state.best_value, state.waited = epoch, value, 0
            self.best = snapshot(self.model)

    def _epoch_row(self, epoch: int, metrics: dict[str, float]) -> dict[str, Any]:
        """The row of `epochs.parquet`: mean loss of the epoch, seconds since the beginning of the run, metrics."""
        state, seconds = self.state, self.state.seconds
        return {
            "epoch": epoch,
            "step": state.step,
            "loss": state.total_loss / max(1, state.batch),
            "seconds_train": seconds.get("training", 0.0),
            "seconds_eval": seconds.get("evaluation", 0.0),
            "seconds_total": sum(seconds.values()),
            **metrics,
        }

    def save_or_stop(self) -> None:
        """Write a checkpoint if one is due, and raise `Stopped` if a signal has asked for it.

        Call it between two batches, where model, optimiser and `state` belong together: a checkpoint taken after a
        backward pass but before the optimiser step would repeat or lose a batch when the run is resumed.
        """
        if self._stop_reason is not None or time.perf_counter() - self._last_saved >= self.checkpoint_seconds:
            self.save()
        if self._stop_reason is not None:
            raise Stopped(self._stop_reason)

    def save(self) -> None:
        """Write the checkpoint. It replaces the previous one only when all of it is on the disk."""
        # The time of this very write is not in the checkpoint that it writes, because `timed` adds it afterwards: a
        # resumed run reports slightly less "saving" time than it took.
        with self.timed("saving"):
            tensors = prefixed("model", self.model.state_dict()) | prefixed("best", self.best)
            if self.optimizer is not None:
                tensors |= prefixed("optimizer", optimizer_tensors(self.optimizer, self.model))
            save_checkpoint(self.path, self.config.content_hash(), self.state, tensors)
        self._last_saved = time.perf_counter()

    @contextlib.contextmanager
    def stop_on_signals(self) -> Iterator[None]:
        """While the block runs, SIGINT (Ctrl-C) and SIGTERM stop the run at the next `save_or_stop`.

        A second signal raises `KeyboardInterrupt` at once, for a run whose step or evaluation takes too long; it then
        resumes from the last checkpoint that was written.
        """
        if threading.current_thread() is not threading.main_thread():  # Python delivers signals to the main thread only
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # The handler may run in the middle of an optimiser step or of a write, so it only leaves a note.
        if self._stop_reason is not None:
            raise KeyboardInterrupt
        self._stop_reason = f"stopped by {signal.Signals(number).name}"
