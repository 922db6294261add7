"""`manymax study`: run a grid of trainings from a file, and write its report."""

from __future__ import annotations

import shlex
import signal
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from manymax.cli import exit_codes
from manymax.cli.console import put_json, say
from manymax.cli.report import write_report
from manymax.cli.study_progress import EndedRuns, RunNames, StudyProgress
from manymax.errors import ArgumentError, check_choice
from manymax.members import BASELINE
from manymax.study.config import RunConfig
from manymax.study.engines import Engine, LocalEngine
from manymax.study.preflight import check_data, unfinished
from manymax.study.report.answer import Answer, answers
from manymax.study.report.runs import read_study
from manymax.study.run_options import flattened, options
from manymax.study.search import Search, Searches, summaries
from manymax.study.study_file import expand, read_study_file, searches
from manymax.study.sweep import Outcome, sweep

OTHER_DATA = (
    "The built-in study is a demonstration: its few settings are meant for its own data. For data of your own use"
    " `manymax choose FILE`, or a study file."
)


def study(
    file: Annotated[
        Path | None, typer.Argument(help="TOML file with the runs; the built-in demonstration if left out.")
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
      manymax study                                  a demonstration: five losses on planted data, in minutes
      manymax study configs/q1_accuracy.toml
      manymax study mine.toml --set epochs=20 --set data=ratings.csv --out studies/short
      manymax study mine.toml --set loss.alpha=1.3   a setting by its group and name
      manymax study mine.toml --set seed=0,1,2       each run with several values
      manymax study mine.toml --dry-run              what would be run
      manymax study mine.toml --engine dask --address tcp://head:8786
    """
    content = read_study_file(file)
    overrides = read_overrides(set_ or [])
    # What the built-in study says of itself is not true of other data.
    note = "" if file is None and "data" in flattened(overrides) else content.note
    if note != content.note:
        say(OTHER_DATA, err=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        configs = expand(content, **overrides)
        found = searches(content, **overrides)
    for warning in caught:
        say(f"{warning.message}", err=True)
    folder = out or Path("studies") / (file.stem if file else "quick")
    to_do = unfinished(configs, folder)
    check_data([*to_do, *(search.config({}) for search in found)], lambda sentence: say(sentence, err=True))
    if dry_run:
        for config in configs:
            say(f"{config.content_hash()}  {describe(config)}")
        for search in found:
            say(describe_search(search))
        return
    searching = Searches(found, folder)
    names = RunNames(configs, (name for each in found for name in each.space))
    try:
        with stoppable(), open_engine(engine, address, workers) as chosen, StudyProgress(names) as watch:
            done = len(configs) - len(to_do)
            finished = f", {done} of them finished before" if done else ""
            total = len(configs) + searching.total
            say(f"{total} runs in {folder}{finished}; {chosen.slots} at a time", err=True)
            outcome = sweep(
                configs,
                folder,
                title=content.title,
                note=note,
                engine=chosen,
                on_record=EndedRuns(names, configs, searching, chosen.slots),
                on_poll=watch,
                searches=searching,
            )
    except KeyboardInterrupt:
        say(f"stopped and saved in {shlex.quote(str(folder))}; the same command goes on from there", err=True)
        raise typer.Exit(exit_codes.STOPPED) from None
    for line in summaries(searching):
        say(line, err=json)
    page = None if no_report else write_report(folder)
    told = answers(read_study(folder))
    if json:
        runs = _runs_as_json(outcome)
        put_json({"folder": str(folder), "report": page and str(page), "answers": _as_json(told), "runs": runs})
    else:
        say(_statuses(outcome), err=True)
        for answer in told:
            say("\n".join([*answer.lines(), ""]))
        say(f"report: {page.resolve()}" if page else f"records: {folder.resolve()}")
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


def describe_search(search: Search) -> str:
    """A search in one line: what every trial has, what is searched, and how much."""
    ranges = "; ".join(f"{name} {each}" for name, each in search.space.items())
    name = describe(search.config(dict(search.first[0]) if search.first else {}))
    return f"{search.trials} trials and {search.seeds} seeds over {ranges}: {name}"


def _statuses(outcome: Outcome) -> str:
    counts = Counter(record.status for record in outcome.records)
    found = f" ({outcome.found} of them before)" if outcome.found else ""
    return f"{outcome.total} runs: " + ", ".join(f"{count} {status}" for status, count in counts.items()) + found


def _as_json(told: Sequence[Answer]) -> list[dict[str, object]]:
    return [
        {
            "data": answer.data,
            "backbone": answer.backbone,
            "loss": answer.winner.loss,
            "settings": answer.winner.chosen_settings,
            "metric": answer.metric,
            "test": answer.winner.test,
            "gain_percent": None if answer.winner.gain is None else answer.winner.gain.value,
            "gain_over": BASELINE.name,
            "tied": [each.loss for each in answer.tied],
            "run": str(answer.winner.model.folder),
            "cautions": [each.text for each in answer.cautions],
        }
        for answer in told
    ]


def _runs_as_json(outcome: Outcome) -> list[dict[str, object]]:
    return [{"hash": r.hash, "status": r.status, "reason": r.reason, "test": r.test} for r in outcome.records]
