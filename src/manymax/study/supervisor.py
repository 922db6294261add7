"""The course of a training run: where it stands, its best weights, when it is saved and when it ends."""

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
    part,
    prefixed,
    save_checkpoint,
    snapshot,
)
from manymax.study.config import RunConfig
from manymax.study.metrics import METRICS

LARGEST_WEIGHT = 1e6  # a model that has learned something is orders of magnitude below


class Diverged(ManymaxError):
    """The loss or a weight is no longer a finite number."""


class Stopped(ManymaxError):
    """The user, or the system, asked the run to stop; it can go on from its checkpoint."""


class ProgressReporter:
    """Hears what happens in a run; this one keeps it to itself."""

    def begin(self, config: RunConfig, folder: Path, state: TrainingState) -> None:
        """Training begins, or goes on from `state`."""

    def step(self, state: TrainingState, loss: float, of: int) -> None:
        """A batch has been learned, one `of` so many in an epoch."""

    def epoch(self, state: TrainingState, row: dict[str, Any]) -> None:
        """An epoch has ended; `row` is its line of `epochs.parquet`."""

    def end(self) -> None:
        """Training is over, for whatever reason."""


class TrainingSupervisor:
    """What every way of training shares.

    Args:
        config: of the run.
        model: whose state is saved.
        validate: the mean metrics on the validation part.
        path: of the checkpoint.
        progress: hears of each epoch.
        checkpoint_seconds: at least this much time between two checkpoints.
        optimizer: whose state is saved too, if there is one.
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
        self._stop: str | None = None
        if path.exists():
            self._resume()
        self._saved = time.perf_counter()

    def _resume(self) -> None:
        self.state, tensors = load_checkpoint(self.path, self.config.content_hash())
        try:
            self.model.load_state_dict(part("model", tensors))
        except RuntimeError as error:
            raise ManymaxError(f"{self.path} does not fit this run: {error}. Remove it to begin again.") from None
        self.best = part("best", tensors)
        if self.optimizer is not None:
            load_optimizer(self.optimizer, self.model, part("optimizer", tensors))

    @property
    def going(self) -> bool:
        """Whether there is another epoch to train."""
        state, training = self.state, self.config.training
        return state.epoch < training.epochs and state.waited < training.patience

    @contextlib.contextmanager
    def timed(self, purpose: str) -> Iterator[None]:
        """Count the time of the block towards a purpose."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = self.state.seconds
            spent[purpose] = spent.get(purpose, 0.0) + time.perf_counter() - start

    def count_batch(self, loss: float, of: int) -> None:
        """A batch has been learned at this loss, one `of` so many; a loss that is no number ends the run."""
        state = self.state
        state.batch, state.step = state.batch + 1, state.step + 1
        if not math.isfinite(loss):
            raise Diverged(f"the loss is {loss} in epoch {state.epoch + 1}, step {state.step}")
        state.total_loss += loss
        self.progress.step(state, loss, of)

    def end_epoch(self) -> None:
        """Evaluate where it is time to, keep the weights if they are the best so far, and write the epoch's row."""
        state, config = self.state, self.config
        self.check_weights()
        epoch = state.epoch + 1
        metrics: dict[str, float] = {}
        if epoch % config.training.eval_every == 0 or epoch == config.training.epochs:
            with self.timed("evaluation"):
                metrics = self.validate()
            self._compare(epoch, metrics[config.monitored])
        row = self._row(epoch, metrics)
        state.rows.append(row)
        state.epoch, state.batch, state.total_loss = epoch, 0, 0.0
        self.progress.epoch(state, row)

    def check_weights(self) -> None:
        """Weights beyond all measure end the run."""
        for name, parameter in self.model.named_parameters():
            if parameter.numel() and not (largest := float(parameter.detach().abs().max())) < LARGEST_WEIGHT:  # nan too
                where = f"in epoch {self.state.epoch + 1}, step {self.state.step}"
                raise Diverged(f"the largest entry of `{name}` is {largest:.3g} {where}")

    def _compare(self, epoch: int, value: float) -> None:
        state, best = self.state, self.state.best_value
        state.waited += 1
        higher = METRICS[self.config.monitored.partition("@")[0]].higher_is_better
        if best is None or (value > best if higher else value < best):
            state.best_epoch, state.best_value, state.waited = epoch, value, 0
            self.best = snapshot(self.model)

    def _row(self, epoch: int, metrics: dict[str, float]) -> dict[str, Any]:
        """An epoch's line: its mean loss, and the seconds since the beginning by purpose."""
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
        """Between two steps: save if it is time, and stop if that was asked for."""
        if self._stop is not None or time.perf_counter() - self._saved >= self.checkpoint_seconds:
            self.save()
        if self._stop is not None:
            raise Stopped(self._stop)

    def save(self) -> None:
        """Write the checkpoint."""
        with self.timed("saving"):
            tensors = prefixed("model", self.model.state_dict()) | prefixed("best", self.best)
            if self.optimizer is not None:
                tensors |= prefixed("optimizer", optimizer_tensors(self.optimizer, self.model))
            save_checkpoint(self.path, self.config.content_hash(), self.state, tensors)
        self._saved = time.perf_counter()

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Ctrl-C and the system's request to end take effect between two steps; a second one at once."""
        if threading.current_thread() is not threading.main_thread():  # only that one hears signals
            yield
            return
        before = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._stop is not None:
            raise KeyboardInterrupt
        self._stop = f"stopped by {signal.Signals(number).name}"
