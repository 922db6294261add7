"""`manymax choose`: from a file to the loss to use."""

from __future__ import annotations

import inspect
import math
import shlex
import time
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from manymax.cli import console as display
from manymax.cli import exit_codes
from manymax.cli.advise_study import when_grown
from manymax.cli.report import write_report
from manymax.cli.study import open_engine, read_overrides, stoppable
from manymax.cli.study_progress import RunNames, StudyProgress
from manymax.cli.train import option_parameter
from manymax.errors import ArgumentError
from manymax.members import BASELINE
from manymax.study.agenda import StudyAgenda
from manymax.study.choosing.candidates import name_of, read_candidates
from manymax.study.choosing.clock import Clock
from manymax.study.choosing.plan import ChoicePlan, ChoiceRequest, check_same, described, make_plan, read_plan
from manymax.study.choosing.rounds import TRIAL, Round, Rounds
from manymax.study.choosing.verdict import Verdict, verdict
from manymax.study.config import RunConfig
from manymax.study.data.card import CARD_HEADERS, card_notes, card_rows
from manymax.study.run import prepare_data
from manymax.study.run_options import options

GROWTH = 100  # times as many items, for which it is said what to use
CLOSING_SECONDS = 20.0  # kept for the page and the predictions
CLOSING_SHARE = 0.3  # but no more than this share of the time


def choose(
    data: Annotated[
        str,
        typer.Argument(help="The data: a CSV, TSV, JSON lines or Parquet file, or a name of `manymax data list`."),
    ],
    minutes: Annotated[float, typer.Option(min=0.01, help="Minutes to spend, all told.")] = 20.0,
    out: Annotated[Path | None, typer.Option(help="Folder to work in; studies/choose-NAME if left out.")] = None,
    metric: Annotated[str, typer.Option(help="What decides on the validation part: a metric at a cutoff.")] = "ndcg@20",
    trials: Annotated[
        int | None, typer.Option(min=1, help="Make so many trials of each loss, however long they take.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds of the best settings; 3 if the time allows, if left out.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="First seed: of the split, the weights and the search.")] = 0,
    candidates: Annotated[
        Path | None, typer.Option(help="Study file with [[search]] tables: the losses to choose among.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; as many as there are cores if left out.")
    ] = None,
    engine: Annotated[str, typer.Option(help="Where the runs are done: local or dask, as in a study.")] = "local",
    address: Annotated[str | None, typer.Option(help="Address of the dask scheduler, with --engine dask.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="A setting of every run, such as dim=128; it is not searched."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read the data, print the plan, and stop.")] = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no page.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    **given: Any,
) -> None:
    """Find the loss to use for your data, in the time that you give.

    The command reads the data, says what it found, times an epoch of every loss, prints a plan and carries it out: the
    same number of trials for every loss, over learning rate, temperature, weight decay and the settings of the loss,
    with hopeless trials ended early; then the best settings of each loss with several seeds. It chooses on the
    validation part. The test part says how much better the choice is than softmax, with an interval of 95 % over users
    and seeds. It also says what it does not know.

    After Ctrl-C or a crash the same command goes on with the same plan and the time that was left. Once it has ended it
    prints the answer again. The folder is that of a study: `manymax report`, `recommend`, `export` and `advise --study`
    take it.

    \b
    Examples:
      manymax choose ratings.csv
      manymax choose ratings.csv --minutes 5 --columns user=uid,item=book --min-rating 3
      manymax choose "Online Retail.csv" --encoding latin-1 --date-format '%m/%d/%Y %H:%M' --drop-missing
      manymax choose ratings.csv --dry-run                      what would be done, and how long it would take
      manymax choose ratings.csv --trials 8 --seeds 3           by numbers in place of a time: the same on any machine
      manymax choose ratings.csv --metric recall@50 --set dim=128
      manymax choose ratings.csv --engine dask --address tcp://head:8786
      manymax recommend studies/choose-ratings --user 42        with the model that was chosen
    """
    start = time.perf_counter()
    overrides = read_overrides(set_ or [])
    if several := [name for name, value in overrides.items() if isinstance(value, list)]:
        raise ArgumentError(f"`--set {several[0]}` must have one value: every loss is to have the same.")
    settings = {"data": data, **{name: value for name, value in given.items() if value is not None}}
    config = RunConfig(**settings, seed=seed)
    request = ChoiceRequest(
        settings=config.data.model_dump(mode="json", exclude={"source"}, exclude_defaults=True) | {"data": data},
        overrides=overrides,
        metric=metric,
        seed=seed,
        minutes=minutes,
        trials=trials,
        seeds=seeds,
        candidates=None if candidates is None else str(candidates),
    )
    folder = out or Path("studies") / f"choose-{config.data.name or Path(data).stem}"
    try:
        with stoppable(), open_engine(engine, address, workers) as chosen, StudyProgress() as watch:
            plan = read_plan(folder)
            if plan is not None:
                check_same(plan, request, folder)
                _say(["", f"going on with the plan in {folder}", *described(plan)], json)
            else:
                plan = _new_plan(request, config, candidates, chosen.slots, start, json)
            if dry_run:
                return
            plan.write(folder)
            watch.names = RunNames((), (name for each in plan.candidates for name in each.search.space))
            StudyAgenda(folder, f"Which loss for {config.data.title}?", "", [], 0)
            clock = Clock(folder, request.seconds, start)
            rounds = Rounds(plan, folder, chosen, clock, _reserve(request), _print_round, watch)
            rounds.run()
    except KeyboardInterrupt:
        display.say(f"stopped and saved in {shlex.quote(str(folder))}; the same command goes on from there", err=True)
        raise typer.Exit(exit_codes.STOPPED) from None
    found = verdict(plan, folder, clock)
    page = None if no_report else write_report(folder, images=False)
    clock.write()
    growth = when_grown(found.answer, GROWTH)
    if json:
        display.put_json(_as_json(found, folder, page, growth, clock))
    else:
        _put(found, folder, page, growth, clock)


def choose_command() -> Callable[..., None]:
    """The command `choose` with the options about data that a run has."""
    own = [p for p in inspect.signature(choose, eval_str=True).parameters.values() if p.name != "given"]
    about_data = [option_parameter(each) for each in options() if each.group == "data" and each.name != "data"]
    first, *rest = (p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own)
    parameters = [first, *rest[:2], *about_data, *rest[2:]]

    @wraps(choose)
    def command(**given: Any) -> None:
        choose(**given)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _reserve(request: ChoiceRequest) -> float:
    """Seconds to keep for what comes after the runs."""
    return 0.0 if request.trials is not None else min(CLOSING_SECONDS, CLOSING_SHARE * request.seconds)


def _new_plan(
    request: ChoiceRequest, config: RunConfig, candidates: Path | None, slots: int, start: float, json: bool
) -> ChoicePlan:
    """Read the data, time the candidates, and print what was found and what will be done."""
    content = read_candidates(candidates)
    _say([f"reading {config.data.title}"], True)
    begin = time.perf_counter()
    prepared = prepare_data(config)
    preparing = time.perf_counter() - begin
    console = display.open_console()
    if not json:
        display.put(console, display.table(CARD_HEADERS, card_rows(prepared.card)))
    _say((f"note: {note}" for note in card_notes(prepared.card)), json)
    _say(["timing an epoch of every loss"], True)
    plan = make_plan(request, content, prepared, preparing, start, _reserve(request), slots)
    _say(described(plan), json)
    return plan


def _say(lines: Iterable[str], on_stderr: bool) -> None:
    for line in lines:
        display.say(line, err=on_stderr)


def _print_round(ended: Round) -> None:
    """A line on stderr about a round."""
    if not ended.fresh:
        return
    best = []
    for each in ended.progress:
        ranked = each.search.ranked(each.trials)
        if ranked and (value := each.search.value(ranked[0])) is not None:
            best.append((value if each.search.higher_is_better else -value, value, each))
    shown = sorted(best, key=lambda row: -row[0])[:3]
    names = ", ".join(f"{name_of(each.search)} {value:.4f}" for _, value, each in shown)
    clock = ended.clock
    limit = "" if clock.budget == float("inf") else f" of {clock.budget / 60:g}"
    what = "trial" if ended.kind == TRIAL else "seed"
    more = ended.number > ended.planned
    of = f"({ended.planned} were planned) of" if more else f"of {ended.planned} of"
    display.say(
        f"{what} {ended.number} {of} each loss, {clock.spent / 60:.1f}{limit} minutes; best on validation: {names}",
        err=True,
    )


def _put(found: Verdict, folder: Path, page: Path | None, growth: str, clock: Clock) -> None:
    """Print the answer."""
    answer, model = found.answer, found.model
    rows = [
        ("loss to use", answer.headline()),
        ("settings", answer.winner.settings_text),
        ("tied with it", answer.tied_text()),
        ("cost", answer.cost_text()),
        ("measured on", answer.sample()),
        (f"{GROWTH} times", growth),
        ("model", str(model)),
        *([("page", str(page.resolve()))] if page else []),
        ("spent", f"{clock.spent / 60:.1f} minutes"),
        *(("not known", text) for text in found.unknown),
    ]
    console = display.open_console()
    display.put(console, display.pairs(rows))
    place = shlex.quote(str(folder))
    display.say(f"next: manymax recommend {place} --user ID, or manymax export {place}")


def _as_json(found: Verdict, folder: Path, page: Path | None, growth: str, clock: Clock) -> dict[str, Any]:
    answer, winner, gain = found.answer, found.answer.winner, found.answer.winner.gain
    over = None if gain is None else {"percent": gain.value, "low": _number(gain.low), "high": _number(gain.high)}
    rows = {each.loss: (each.valid, each.test, each.seconds) for each in answer.contenders}
    losses = {name: dict(zip(("valid", "test", "seconds"), row, strict=True)) for name, row in rows.items()}
    return {
        "loss": winner.loss,
        "settings": winner.chosen_settings,
        "metric": answer.metric,
        "valid": winner.valid,
        "test": winner.test,
        f"over_{BASELINE.name}": over,
        "tied": [each.loss for each in answer.tied],
        "losses": losses,
        "seconds": winner.seconds,
        "memory_mb": winner.memory_mb,
        f"at_{GROWTH}_times": growth,
        "unknown": list(found.unknown),
        "model": str(found.model),
        "report": page and str(page),
        "folder": str(folder),
        "minutes": clock.spent / 60,
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
