"""`manymax train`: one run, with live progress."""

from __future__ import annotations

import inspect
import math
import os
import shlex
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from manymax.cli.console import open_console, put, put_json, table
from manymax.errors import ArgumentError
from manymax.study.checkpoint import TrainingState
from manymax.study.config import RunConfig
from manymax.study.groups import GRADIENT
from manymax.study.metrics import METRICS
from manymax.study.parallel import RANK_TIMEOUT, join_ranks
from manymax.study.records import Record
from manymax.study.run import CHECKPOINT_SECONDS, follow_run, run
from manymax.study.run_options import Option, flat, flattened, options
from manymax.study.supervisor import ProgressReporter

EXIT_DIVERGED, EXIT_STOPPED = 1, 130
REFRESHES = 8  # a second
CLEARLY = 1.05  # times the popularity ranking: less may be luck


def train(
    config: Annotated[Path | None, typer.Option(help="TOML file with settings; options given here count more.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; made up of its settings if left out.")] = None,
    checkpoint_seconds: Annotated[float, typer.Option(help="Least time between two checkpoints.")] = CHECKPOINT_SECONDS,
    rank_timeout: Annotated[
        float, typer.Option(min=1, help="Under torchrun: seconds that a rank waits for the others.")
    ] = RANK_TIMEOUT,
    json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
    **given: Any,
) -> None:
    """Train one model with one loss on one data set, and test it.

    Interrupted by Ctrl-C or by force, the same command goes on from the last checkpoint and ends with the result of
    an uninterrupted run. Under torchrun every rank takes some rows of each batch; the result is the same up to
    rounding, with dropout up to its draws.

    \b
    Examples:
      manymax train                                       softmax, matrix factorisation, planted data
      manymax train --loss sparsemax --backbone sasrec
      manymax train --data ratings.csv --columns user=uid,item=book --loss ssm --num-negatives 50
      manymax train --data ml-1m.parquet --preset paper-table --lr 1e-3 --out runs/first
      torchrun --nproc-per-node 2 -m manymax train --backbone lightgcn
    """
    settings = flattened(read_toml(config)) if config is not None else {}
    chosen = RunConfig(**settings | {name: value for name, value in given.items() if value is not None})
    folder = out or default_folder(chosen)
    with join_ranks(rank_timeout) as team:
        if team.rank > 0:
            follow_run(team)
        else:
            record = run(chosen, folder, progress=watch(), checkpoint_seconds=checkpoint_seconds, team=team)
    if team.rank > 0:
        # Gloo's threads may still hold the last message: to free it aborts an interpreter that is shutting down
        # (pytorch/pytorch#179291). There is nothing left to do or to write here, so it does not shut down.
        os._exit(0)
    if json:
        put_json(record.model_dump(mode="json"))
    else:
        report(record, folder)
    if record.status != "done":
        raise typer.Exit(EXIT_STOPPED if record.status == "stopped" else EXIT_DIVERGED)


def read_toml(path: Path) -> dict[str, Any]:
    """The settings of a TOML file."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"`config` {path} cannot be read: {error}") from None


def default_folder(config: RunConfig) -> Path:
    """A folder of its own for each combination of settings."""
    names = (Path(config.data.source).stem, config.backbone.name, config.loss.name, config.content_hash()[:8])
    return Path("runs") / "-".join(names)


def train_command() -> Callable[..., None]:
    """`train` with one option for each setting that a run can have now: those of rows added to a table later too."""
    own = [p for p in inspect.signature(train, eval_str=True).parameters.values() if p.name != "given"]
    parameters = [*map(_option, options()), *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own)]

    @wraps(train)
    def command(**given: Any) -> None:
        train(**given)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _option(setting: Option) -> inspect.Parameter:
    """An option of the command from a setting: None where it is not given, so that the setting's default counts."""
    default = "" if setting.default is None else f" [default: {_shown(setting.default)}]"
    option = typer.Option(
        help=f"{setting.help}{default}",
        show_default=False,
        metavar=f"[{'|'.join(setting.choices)}]" if setting.choices else None,
    )
    kind: Any = setting.kind
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


class Lines(ProgressReporter):
    """One line an epoch."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def begin(self, config: RunConfig, folder: Path, state: TrainingState) -> None:
        """What is trained, and from where it goes on."""
        self.config = config
        self.started, self.first = time.perf_counter(), state.epoch
        where = f", from epoch {state.epoch + 1}, step {state.step + 1}" if state.step else ""
        names = f"{config.loss.name} on {config.backbone.name}, {config.data.source}"
        self.console.print(f"{names}, seed {config.seed}{where}: {folder}")

    def epoch(self, state: TrainingState, row: dict[str, Any]) -> None:
        """The epoch's line."""
        self.console.print(self.line(state, row))

    def line(self, state: TrainingState, row: dict[str, Any]) -> str:
        """Epoch, loss, the watched metric, the best so far and the time that is left at most."""
        metric = self.config.monitored
        value = f"  {metric} {row[metric]:.4f}" if metric in row else ""
        best = f"  best {state.best_value:.4f} (epoch {state.best_epoch})" if state.best_value else ""
        epoch = f"epoch {state.epoch}/{self.config.training.epochs}"
        return f"{epoch}  loss {row['loss']:.4f}{value}{best}  {self.left(state)}".rstrip()

    def left(self, state: TrainingState) -> str:
        """How long it takes if patience is never used up."""
        done = state.epoch - self.first
        if done < 1:
            return ""
        seconds = (time.perf_counter() - self.started) / done * (self.config.training.epochs - state.epoch)
        return f"at most {_clock(seconds)} left"


class Screen(Lines):
    """A line that moves with each step, and what each epoch left behind above it."""

    def begin(self, config: RunConfig, folder: Path, state: TrainingState) -> None:
        """Open the moving line."""
        super().begin(config, folder, state)
        self.live = Live(Text(""), console=self.console, refresh_per_second=REFRESHES, transient=True)
        self.shown = 0.0
        self.live.start()

    def step(self, state: TrainingState, loss: float, of: int) -> None:
        """Move the line, as often as an eye can follow."""
        if (now := time.perf_counter()) - self.shown < 1 / REFRESHES:
            return
        self.shown = now
        where = f"epoch {state.epoch + 1}/{self.config.training.epochs}  step {state.batch}/{of}"
        self.live.update(Text(f"{where}  loss {loss:.4f}  {self.left(state)}"))

    def end(self) -> None:
        """Close the moving line."""
        self.live.stop()


def watch() -> ProgressReporter:
    """Progress on stderr: moving in a terminal, plain lines elsewhere."""
    console = Console(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True)
    return Screen(console) if console.is_terminal else Lines(console)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def report(record: Record, folder: Path) -> None:
    """The outcome: metrics beside those of the popularity ranking, and what to do next."""
    console = open_console()
    if record.test:
        parts = (record.valid, record.test, record.popularity)
        rows = [[name, *(_number(part.get(name)) for part in parts)] for name in record.test]
        put(console, table(["metric", "valid", "test", "popularity"], rows))
    if record.status == "done" and not _learned(record):
        typer.echo(_advice(record))
    typer.echo(_closing(record, folder))


def _learned(record: Record) -> bool:
    """Whether the test metric that was watched is clearly better than that of the popularity ranking."""
    name = RunConfig(**record.settings).monitored
    value, popular = record.test.get(name) or 0.0, record.popularity.get(name) or 0.0
    higher = METRICS[name.partition("@")[0]].higher_is_better
    return value > CLEARLY * popular if higher else value * CLEARLY < popular


def _advice(record: Record) -> str:
    """What to try where early stopping, which counts epochs, met too few steps in each."""
    settings = flat(record.settings)
    if settings["solver"] != GRADIENT:
        return "hardly better than the popularity ranking; try another --ridge"
    steps = math.ceil(record.sizes["train"] / settings["batch_size"])
    return (
        "hardly better than the popularity ranking, where training begins: with about "
        f"{steps} steps an epoch it may have been given up too early; try a smaller --batch-size, a larger --lr or "
        "more --patience"
    )


def _closing(record: Record, folder: Path) -> str:
    place = shlex.quote(str(folder))
    if record.status == "stopped":
        return f"{record.reason} in epoch {record.epochs + 1}; the same command goes on from there: {place}"
    if record.status == "diverged":
        return f"diverged: {record.reason}; try a smaller --lr, or --clip. Recorded in {place}"
    spent = _clock(sum(record.seconds.values()))
    return f"best epoch {record.best_epoch} of {record.epochs}, {spent}; saved in {place}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
