"""`manymax study`: a grid of runs from a file, and its report."""

from __future__ import annotations

import shlex
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from manymax.cli.console import put_json
from manymax.errors import ArgumentError, check_choice
from manymax.paper.page_sections import EXTRA, PUBLISHED
from manymax.study.checkpoint import read_training_state
from manymax.study.config import RunConfig
from manymax.study.engines import Engine, Job, LocalEngine
from manymax.study.records import CHECKPOINT, Record
from manymax.study.report.page import report
from manymax.study.run_options import flat, options
from manymax.study.study_file import expand, read_study_file
from manymax.study.sweep import Outcome, sweep

EXIT_FAILED, EXIT_STOPPED = 1, 130
LOOK = 2.0  # seconds between two looks at the runs under way


def study(
    file: Annotated[Path | None, typer.Argument(help="TOML file; the built-in quick study if left out.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the study; studies/NAME OF THE FILE if left out.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Runs at a time; as many as cores if left out.")] = None,
    engine: Annotated[str, typer.Option(help="What does the runs: local processes, or dask, a cluster.")] = "local",
    address: Annotated[
        str | None, typer.Option(help="Of dask's scheduler; if left out it is started on this machine.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of every run, over the file's.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and do nothing.")] = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Leave the report out.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print what became of the runs as JSON.")] = False,
) -> None:
    """Run a study and write its report.

    Finished runs are not done again, so the same command goes on after any interruption, and a file that has grown
    adds its new runs. Several machines may work on one shared folder. On a cluster (pip install "manymax[cluster]")
    the workers must see the folder of the study, and own files of data, under the same path.

    \b
    Examples:
      manymax study                                  every member on planted data, in minutes
      manymax study configs/q1_accuracy.toml
      manymax study mine.toml --set epochs=20 --set data=ratings.csv --out studies/short
      manymax study mine.toml --set loss.alpha=1.3   a setting by its group and name
      manymax study mine.toml --dry-run              what would be run
      manymax study mine.toml --engine dask --address tcp://head:8786
    """
    asked = read_study_file(file)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        configs = expand(asked, **_overrides(set_ or []))
    for each in said:
        typer.echo(f"{each.message}", err=True)
    folder = out or Path("studies") / (file.stem if file else "quick")
    if dry_run:
        for config in configs:
            typer.echo(f"{config.content_hash()}  {describe(config)}")
        return
    start = time.perf_counter()
    try:
        with _stoppable(), _engine(engine, address, workers) as chosen, UnderWay() as watch:
            outcome = sweep(
                configs,
                folder,
                title=asked.title,
                engine=chosen,
                on_record=lambda so_far, record: _say(so_far, record, start),
                on_poll=watch,
            )
    except KeyboardInterrupt:
        typer.echo(f"stopped; the same command goes on from there: {shlex.quote(str(folder))}", err=True)
        raise typer.Exit(EXIT_STOPPED) from None
    page = None if no_report else report(folder, extra=EXTRA, published=PUBLISHED)
    if json:
        put_json({"folder": str(folder), "report": page and str(page), "runs": _summary(outcome)})
    else:
        typer.echo(_counts(outcome))
        typer.echo(f"report: {page.resolve()}" if page else f"records: {folder.resolve()}")
    if outcome.count("done") == 0:
        raise typer.Exit(EXIT_FAILED)


def _engine(name: str, address: str | None, workers: int | None) -> AbstractContextManager[Engine]:
    check_choice("engine", name, ("local", "dask"))
    if name == "dask":
        from manymax.study.engines_dask import DaskEngine  # of the extra `cluster`

        return DaskEngine(address, workers)
    if address is not None:
        raise ArgumentError("`address` is of a cluster: add `--engine dask`.")
    return nullcontext(LocalEngine(workers))


@contextmanager
def _stoppable() -> Iterator[None]:
    """Ctrl-C and `kill` stop the study in order, also where the shell that started it had Ctrl-C ignored."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _overrides(pairs: list[str]) -> dict[str, object]:
    """NAME=VALUE as settings; values are written as in TOML, or as bare words."""
    overrides: dict[str, object] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name.strip():
            raise ArgumentError(f"`--set` must look like NAME=VALUE; got {pair!r}.")
        overrides[name.strip()] = value.strip()
    return overrides


def describe(config: RunConfig) -> str:
    """A run in a line: where, what, and which settings are not the usual ones."""
    usual = {option.name: option.default for option in options()}
    own = ("data", "backbone", "loss", "seed")
    now = {name: tuple(value) if isinstance(value, list) else value for name, value in config.flat().items()}
    details = "".join(f" {name}={value}" for name, value in now.items() if name not in own and value != usual[name])
    return f"{_place(config)}{details} seed={config.seed}"


def _place(config: RunConfig) -> str:
    return f"{config.data.source} {config.backbone.name} {config.loss.name}"


class UnderWay:
    """In a terminal, a line for each run that is under way, below those that have ended; elsewhere nothing.

    Where a run stands is read from its checkpoint, on whatever machine it is.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, markup=False, emoji=False, highlight=False)
        self.live = Live(Text(""), console=self.console, auto_refresh=False, transient=True)
        self.shown = 0.0

    def __enter__(self) -> UnderWay:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def __call__(self, jobs: Sequence[Job]) -> None:
        """Look again, every other second."""
        if not self.console.is_terminal or time.monotonic() - self.shown < LOOK:
            return
        self.shown = time.monotonic()
        self.live.update(Text("\n".join(map(_standing, jobs)), no_wrap=True, overflow="ellipsis"), refresh=True)


def _standing(job: Job) -> str:
    """A run that is under way in a line."""
    config, state = job.config, read_training_state(job.folder / CHECKPOINT)
    name = f"{_place(config)} seed {config.seed}"
    if state is None:
        return f"{name}: under way"
    best = f"  best {config.monitored} {state.best_value:.4f}" if state.best_value is not None else ""
    return f"{name}: epoch {state.epoch + 1}/{config.training.epochs}{best}"


def _say(outcome: Outcome, record: Record, start: float) -> None:
    """A line on stderr for each run that has ended."""
    s, done = flat(record.settings), len(outcome.records)
    metric = next(((name, value) for name, value in record.test.items() if value is not None), None)
    result = (
        f"{metric[0]} {metric[1]:.4f}" if record.status == "done" and metric else f"{record.status}: {record.reason}"
    )
    left = (time.perf_counter() - start) / done * (outcome.total - done)
    name = f"{s['data']} {s['backbone']} {s['loss']} seed {s['seed']}"
    clock = f"  about {round(left)} s left" if done < outcome.total else ""
    sys.stderr.write(f"[{done}/{outcome.total}] {name}: {result}{clock}\n")


def _counts(outcome: Outcome) -> str:
    counts = Counter(record.status for record in outcome.records)
    return f"{outcome.total} runs: " + ", ".join(f"{count} {status}" for status, count in counts.items())


def _summary(outcome: Outcome) -> list[dict[str, object]]:
    return [{"hash": r.hash, "status": r.status, "reason": r.reason, "test": r.test} for r in outcome.records]
