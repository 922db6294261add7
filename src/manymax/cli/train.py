"""`manymax train`: train and test one model, with live progress."""

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

from manymax.cli import exit_codes
from manymax.cli.console import open_console, put, put_json, say, table
from manymax.errors import ArgumentError
from manymax.study.checkpoint import TrainingState
from manymax.study.config import RunConfig
from manymax.study.groups import GRADIENT
from manymax.study.metrics import METRICS
from manymax.study.parallel import RANK_TIMEOUT, join_ranks
from manymax.study.preflight import remarks, sizes
from manymax.study.records import Record
from manymax.study.run import CHECKPOINT_SECONDS, follow_run, run
from manymax.study.run_options import Option, flat, flattened, options
from manymax.study.supervisor import ProgressReporter

REFRESHES_PER_SECOND = 8  # of the moving line in a terminal
CLEARLY_BETTER = 1.05  # times the metric of the popularity ranking: less may be luck


def train(
    config: Annotated[
        Path | None, typer.Option(help="TOML file with settings; options on the command line take precedence.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; if left out, a folder below runs/ named by the settings.")
    ] = None,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="Least number of seconds between two checkpoints.")
    ] = CHECKPOINT_SECONDS,
    rank_timeout: Annotated[
        float, typer.Option(min=1, help="Under torchrun: seconds that a rank waits for the others before it gives up.")
    ] = RANK_TIMEOUT,
    json: Annotated[bool, typer.Option("--json", help="Print the record of the run as JSON.")] = False,
    **given: Any,
) -> None:
    """Train one model with one loss, and test it.

    The test ranks all items for every user. Use it to try a loss on your data; `manymax study` compares many settings
    at once. The folder of the run keeps its record, its curves and the best weights. After Ctrl-C or a crash the same
    command goes on from the last checkpoint and ends with the result of a run that was never interrupted. Under
    torchrun every rank takes some rows of each batch; the result is the same up to rounding (dropout masks are drawn by
    each rank, so they differ).

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
            record = run(
                chosen, folder, progress=progress_on_stderr(), checkpoint_seconds=checkpoint_seconds, team=team
            )
    if team.rank > 0:
        # Gloo's threads may still hold the last message, and freeing it while the interpreter shuts down aborts the
        # process (pytorch/pytorch#179291). This rank has nothing left to write, so it leaves without a shutdown.
        os._exit(0)
    if json:
        put_json(record.model_dump(mode="json"))
    else:
        print_outcome(record, folder)
    if record.status != "done":
        raise typer.Exit(exit_codes.STOPPED if record.status == "stopped" else exit_codes.FAILED)


def read_toml(path: Path) -> dict[str, Any]:
    """Read the settings in a TOML file."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"`--config` {path} cannot be read: {error}") from None


def default_folder(config: RunConfig) -> Path:
    """The folder of a run whose `--out` is left out: different settings get different folders."""
    data = config.data.name or Path(config.data.source).stem
    names = (data, config.backbone.name, config.loss.name, config.content_hash()[:8])
    return Path("runs") / "-".join(names)


def train_command() -> Callable[..., None]:
    """The command `train` with one option per setting that a run can have.

    The settings are read from the tables of members, samplers and backbones when this is called, so that a row that
    was added to one of them brings its settings along. typer reads the signature, so it is built here.
    """
    own = [p for p in inspect.signature(train, eval_str=True).parameters.values() if p.name != "given"]
    parameters = [*map(option_parameter, options()), *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own)]

    @wraps(train)
    def command(**given: Any) -> None:
        train(**given)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def option_parameter(setting: Option) -> inspect.Parameter:
    """A command-line option for a setting; its value is None unless given, so that `RunConfig` applies the default."""
    default = "" if setting.default is None else f" [default: {_default_text(setting.default)}]"
    option = typer.Option(
        help=f"{setting.help}{default}",
        show_default=False,
        metavar=f"[{'|'.join(setting.choices)}]" if setting.choices else None,
    )
    kind: Any = setting.kind
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _default_text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


class LineProgress(ProgressReporter):
    """Progress as plain text: one line per epoch."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def reading(self, config: RunConfig) -> None:
        """Print what is read."""
        self.console.print(f"reading {config.data.title}")

    def prepared(self, config: RunConfig, card: list[dict[str, Any]], num_items: int) -> None:
        """Print what was found, and what is odd about the settings."""
        self.console.print(f"{config.data.title}: {sizes(card[-1])}")
        for remark in remarks(config, num_items):
            self.console.print(remark)

    def begin(self, config: RunConfig, folder: Path, state: TrainingState) -> None:
        """Print what is trained and, if the run goes on from a checkpoint, from where."""
        self.config = config
        self.started, self.first_epoch = time.perf_counter(), state.epoch
        where = f", from epoch {state.epoch + 1}, step {state.step + 1}" if state.step else ""
        names = f"{config.loss.name} on {config.backbone.name}, {config.data.title}"
        self.console.print(f"{names}, seed {config.seed}{where}: {folder}")

    def epoch(self, state: TrainingState, row: dict[str, Any]) -> None:
        """Print the line of the epoch that has ended."""
        self.console.print(self.line(state, row))

    def line(self, state: TrainingState, row: dict[str, Any]) -> str:
        """Epoch, loss, the metric that early stopping watches, its best value so far, and the time left."""
        metric = self.config.monitored
        value = f"  {metric} {row[metric]:.4f}" if metric in row else ""
        best = f"  best {state.best_value:.4f} (epoch {state.best_epoch})" if state.best_value else ""
        epoch = f"epoch {state.epoch}/{self.config.training.epochs}"
        return f"{epoch}  loss {row['loss']:.4f}{value}{best}  {self.time_left(state)}".rstrip()

    def time_left(self, state: TrainingState) -> str:
        """The time left if early stopping does not end the run sooner; empty before the first epoch is over."""
        done = state.epoch - self.first_epoch
        if done < 1:
            return ""
        seconds = (time.perf_counter() - self.started) / done * (self.config.training.epochs - state.epoch)
        return f"at most {_clock(seconds)} left"


class LiveProgress(LineProgress):
    """Progress in a terminal: a line that moves with each step, below one line per epoch."""

    def begin(self, config: RunConfig, folder: Path, state: TrainingState) -> None:
        """Show the moving line."""
        super().begin(config, folder, state)
        self.live = Live(Text(""), console=self.console, refresh_per_second=REFRESHES_PER_SECOND, transient=True)
        self.shown = 0.0
        self.live.start()

    def step(self, state: TrainingState, loss: float, of: int) -> None:
        """Update the moving line, at most `REFRESHES_PER_SECOND` times per second."""
        if (now := time.perf_counter()) - self.shown < 1 / REFRESHES_PER_SECOND:
            return
        self.shown = now
        where = f"epoch {state.epoch + 1}/{self.config.training.epochs}  step {state.batch}/{of}"
        self.live.update(Text(f"{where}  loss {loss:.4f}  {self.time_left(state)}"))

    def end(self) -> None:
        """Remove the moving line."""
        self.live.stop()


def progress_on_stderr() -> ProgressReporter:
    """Progress on stderr: a moving line in a terminal, plain lines elsewhere."""
    console = open_console(stderr=True, soft_wrap=True)
    return LiveProgress(console) if console.is_terminal else LineProgress(console)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def print_outcome(record: Record, folder: Path) -> None:
    """Print the metrics beside those of the popularity ranking, and what to do next."""
    console = open_console()
    if record.test:
        parts = (record.valid, record.test, record.popularity)
        rows = [[name, *(_number(part.get(name)) for part in parts)] for name in record.test]
        put(console, table(["metric", "valid", "test", "popularity"], rows))
    if record.status == "done" and not _beats_popularity(record):
        say(_advice(record))
    say(_closing(record, folder))


def _beats_popularity(record: Record) -> bool:
    """Whether the test value of the metric that early stopping watched is clearly better than popularity's."""
    name = RunConfig(**record.settings).monitored
    value, popular = record.test.get(name) or 0.0, record.popularity.get(name) or 0.0
    higher = METRICS[name.partition("@")[0]].higher_is_better
    return value > CLEARLY_BETTER * popular if higher else value * CLEARLY_BETTER < popular


def _advice(record: Record) -> str:
    """What to try after a run that is hardly better than popularity.

    Early stopping counts epochs. Where an epoch has few steps, patience can run out before training has left the level
    of popularity, on which every model begins.
    """
    settings = flat(record.settings)
    if settings["solver"] != GRADIENT:
        return "The result is hardly better than the popularity ranking. Try another --ridge."
    steps = math.ceil(record.sizes["train"] / settings["batch_size"])
    return (
        "The result is hardly better than the popularity ranking, which is where training begins. With about"
        f" {steps} steps per epoch, early stopping may have ended it too soon. Try a smaller --batch-size, a larger"
        " --lr or more --patience."
    )


def _closing(record: Record, folder: Path) -> str:
    """The last line: how the run ended, and where its files are."""
    place = shlex.quote(str(folder))
    if record.status == "stopped":
        return f"{record.reason} in epoch {record.epochs + 1}; saved in {place}, the same command goes on from there"
    if record.status == "diverged":
        return f"diverged: {record.reason}. Try a smaller --lr, or --clip. The record is in {place}"
    spent = _clock(sum(record.seconds.values()))
    return f"best epoch {record.best_epoch} of {record.epochs}, {spent}; saved in {place}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
