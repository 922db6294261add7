"""`manymax study`: run a grid of trainings from a file, and write its report."""

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

from manymax.cli import exit_codes
from manymax.cli.console import put_json
from manymax.cli.report import write_report
from manymax.errors import ArgumentError, check_choice
from manymax.study.checkpoint import read_training_state
from manymax.study.config import RunConfig
from manymax.study.engines import Engine, Job, LocalEngine
from manymax.study.preflight import check_data, unfinished
from manymax.study.records import CHECKPOINT, Record
from manymax.study.run_options import flat, flattened, options
from manymax.study.search import Search, Searches, summaries
from manymax.study.study_file import expand, read_study_file, searches
from manymax.study.sweep import Outcome, sweep

VIEW_SECONDS = 2.0  # between two updates of the lines about runs under way: each reads all their checkpoints
FIRST_LINE_SECONDS, LINE_SECONDS = 5.0, 30.0  # when such lines are printed where no terminal can update them


def study(
    file: Annotated[
        Path | None, typer.Argument(help="TOML file with the grid of runs; the built-in quick study if left out.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the study; studies/FILE if left out.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; as many as there are cores if left out.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="Where the runs are done: local (processes of this machine) or dask (a cluster).")
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(help="Address of the dask scheduler; if left out, one is started on this machine."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting for every run, in place of the file's; several values, separated by commas, are combined.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and do nothing.")] = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Do the runs but write no report.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the status and the test metrics of the runs as JSON.")
    ] = False,
) -> None:
    """Train many models and write a report that compares them.

    A file names the settings and their values; every combination is a run. Use it to compare losses, settings or seeds
    on your data; `manymax train` is for a single model. Runs that have finished are not done again: the same command
    goes on after any interruption, and a file that has grown adds its new runs. Several machines may work on one shared
    folder. On a cluster (pip install "manymax[cluster]") the workers must see the folder of the study under the same
    path, and your data files too, which this machine reads once before the first run.

    \b
    Examples:
      manymax study                                  every member on planted data, in minutes
      manymax study configs/q1_accuracy.toml
      manymax study mine.toml --set epochs=20 --set data=ratings.csv --out studies/short
      manymax study mine.toml --set loss.alpha=1.3   a setting by its group and name
      manymax study mine.toml --set seed=0,1,2       each run with several values
      manymax study mine.toml --dry-run              what would be run
      manymax study mine.toml --engine dask --address tcp://head:8786
    """
    content = read_study_file(file)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        configs = expand(content, **read_overrides(set_ or []))
        found = searches(content, **read_overrides(set_ or []))
    for warning in caught:
        typer.echo(f"{warning.message}", err=True)
    folder = out or Path("studies") / (file.stem if file else "quick")
    to_do = unfinished(configs, folder)
    check_data([*to_do, *(search.config({}) for search in found)], lambda sentence: typer.echo(sentence, err=True))
    if dry_run:
        for config in configs:
            typer.echo(f"{config.content_hash()}  {describe(config)}")
        for search in found:
            typer.echo(describe_search(search))
        return
    start, searching = time.perf_counter(), Searches(found, folder)
    try:
        with stoppable(), open_engine(engine, address, workers) as chosen, StudyProgress() as watch:
            done = len(configs) - len(to_do)
            finished = f", {done} of them finished before" if done else ""
            total = len(configs) + searching.total
            typer.echo(f"{total} runs in {folder}{finished}; {chosen.slots} at a time", err=True)
            outcome = sweep(
                configs,
                folder,
                title=content.title,
                engine=chosen,
                on_record=lambda so_far, record: _print_ended(so_far, record, start, searching),
                on_poll=watch,
                searches=searching,
            )
    except KeyboardInterrupt:
        typer.echo(f"stopped and saved in {shlex.quote(str(folder))}; the same command goes on from there", err=True)
        raise typer.Exit(exit_codes.STOPPED) from None
    for line in summaries(searching):
        typer.echo(line, err=json)
    page = None if no_report else write_report(folder)
    if json:
        put_json({"folder": str(folder), "report": page and str(page), "runs": _runs_as_json(outcome)})
    else:
        typer.echo(_count_statuses(outcome))
        typer.echo(f"report: {page.resolve()}" if page else f"records: {folder.resolve()}")
    if outcome.count("done") == 0:
        raise typer.Exit(exit_codes.FAILED)


def open_engine(name: str, address: str | None, workers: int | None) -> AbstractContextManager[Engine]:
    """The engine of this name; the block that it is opened for does the runs."""
    check_choice("engine", name, ("local", "dask"))
    if name == "dask":
        from manymax.study.engines_dask import DaskEngine  # needs the extra `cluster`

        return DaskEngine(address, workers)
    if address is not None:
        raise ArgumentError("`--address` is that of a dask cluster: add `--engine dask`, or leave it out.")
    return nullcontext(LocalEngine(workers))


@contextmanager
def stoppable() -> Iterator[None]:
    """Let Ctrl-C and `kill` stop the study so that its runs are saved.

    The handlers are set here because a shell starts background jobs with Ctrl-C ignored, which processes inherit.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def read_overrides(pairs: list[str]) -> dict[str, object]:
    """The settings that `--set NAME=VALUE` gives, {name: value}, with a list for several values."""
    overrides: dict[str, object] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name.strip():
            raise ArgumentError(f"`--set` must look like NAME=VALUE, for example epochs=20; got {pair!r}.")
        if name.strip() in overrides:
            raise ArgumentError(f"`--set {name.strip()}` is given twice: give several values as seed=0,1,2.")
        overrides[name.strip()] = _one_or_several(name.strip(), value.strip())
    return overrides


def _one_or_several(name: str, text: str) -> str | list[str]:
    """The value of a setting, or several that commas separate, in brackets or not; they are read as bare words.

    >>> _one_or_several("seed", "0,1"), _one_or_several("loss", '["nce", "rg"]'), _one_or_several("cutoffs", "5,20")
    (['0', '1'], ['nce', 'rg'], '5,20')
    """
    (flat_name,) = flattened({name: text})
    option = next(each for each in options() if each.name == flat_name)
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    if option.has_commas or Path(text).exists():  # the name of a data file may have commas too
        return text
    values = [value.strip().strip("\"'") for value in text.split(",")]
    if len(values) > 1 and not all(values):
        raise ArgumentError(f"`--set {name}` must have a value between two commas; got {text!r}.")
    return values if len(values) > 1 else text


def describe(config: RunConfig) -> str:
    """A run in one line: data, backbone, loss, the settings that differ from their defaults, and the seed."""
    defaults = {option.name: option.default for option in options()}
    always_shown = ("data", "backbone", "loss", "seed")
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in config.flat().items()}
    details = "".join(
        f" {name}={value}" for name, value in settings.items() if name not in always_shown and value != defaults[name]
    )
    return f"{_place(config)}{details} seed={config.seed}"


def _place(config: RunConfig) -> str:
    """Data, backbone and loss of a run."""
    return f"{config.data.title} {config.backbone.name} {config.loss.name}"


class StudyProgress:
    """View of a study, a line per run that is under way: in a terminal it moves, elsewhere it is printed now and then.

    How far a run is comes from its checkpoint, which this process can read whichever machine does the run.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, markup=False, emoji=False, highlight=False)
        self.live = Live(Text(""), console=self.console, auto_refresh=False, transient=True)
        self.next = time.monotonic() + (0.0 if self.console.is_terminal else FIRST_LINE_SECONDS)

    def __enter__(self) -> StudyProgress:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def __call__(self, jobs: Sequence[Job]) -> None:
        """Update or print the lines; a call too soon after the last one does nothing."""
        if time.monotonic() < self.next or not jobs:
            return
        lines = Text("\n".join(map(_progress_line, jobs)), no_wrap=True, overflow="ellipsis")
        if self.console.is_terminal:
            self.live.update(lines, refresh=True)
        else:
            self.console.print(lines, soft_wrap=True)
        self.next = time.monotonic() + (VIEW_SECONDS if self.console.is_terminal else LINE_SECONDS)


def _progress_line(job: Job) -> str:
    """How far a run is, in one line."""
    config, state = job.config, read_training_state(job.folder / CHECKPOINT)
    name = f"{_place(config)} seed {config.seed}"
    if state is None:
        return f"{name}: under way"
    best = f"  best {config.monitored} {state.best_value:.4f}" if state.best_value is not None else ""
    return f"{name}: epoch {state.epoch + 1}/{config.training.epochs}{best}"


def describe_search(search: Search) -> str:
    """A search in one line: what every trial has, what is searched, and how much."""
    ranges = "; ".join(f"{name} {each}" for name, each in search.space.items())
    name = describe(search.config(dict(search.first[0]) if search.first else {}))
    return f"{search.trials} trials and {search.seeds} seeds over {ranges}: {name}"


def _print_ended(outcome: Outcome, record: Record, start: float, searching: Searches) -> None:
    """Print a line on stderr about a run that has ended."""
    settings, done = flat(record.settings), len(outcome.records)
    watched = RunConfig(**record.settings).monitored
    value = record.test.get(watched)
    done_well = record.status == "done" and value is not None
    result = f"{watched} {value:.4f}" if done_well else f"{record.status}: {record.reason}"
    left = (time.perf_counter() - start) / done * (outcome.total - done)
    title = settings.get("name") or settings["data"]
    name = "{title} {backbone} {loss} seed {seed}".format(**settings, title=title)
    if (owner := searching.owner(record)) is not None:
        values = " ".join(f"{key}={value}" for key, value in owner.search.values(record).items())
        name, reached = f"{name} trial {len(owner.trials)}/{owner.search.trials} {values}", owner.search.value(record)
        result = f"{result}, {owner.search.metric} {reached or 0:.4f} on valid, {record.epochs} epochs"
    clock = f"  about {round(left)} s left" if done < outcome.total else ""
    sys.stderr.write(f"[{done}/{outcome.total}] {name}: {result}{clock}\n")


def _count_statuses(outcome: Outcome) -> str:
    counts = Counter(record.status for record in outcome.records)
    return f"{outcome.total} runs: " + ", ".join(f"{count} {status}" for status, count in counts.items())


def _runs_as_json(outcome: Outcome) -> list[dict[str, object]]:
    return [{"hash": r.hash, "status": r.status, "reason": r.reason, "test": r.test} for r in outcome.records]
