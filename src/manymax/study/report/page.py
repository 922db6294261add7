"""Write the report of a study: one HTML page that needs no network, and its tables and figures as files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from manymax.errors import ManymaxError
from manymax.members import BASELINE, FAMILY
from manymax.study.files import atomic_write
from manymax.study.report import figures, pace, standings, tables
from manymax.study.report.answer import Answer, answers, seconds_text
from manymax.study.report.drawing import Figure, draw, interactive
from manymax.study.report.formats import TABLE_WRITERS, ReportTable, number_text
from manymax.study.report.opening import common_settings, headlines
from manymax.study.report.runs import Study, read_study
from manymax.study.report.sections import Extra, Published, Section
from manymax.study.report.trials import Trial, is_sampled, trials

PAGE_FILE = "report.html"
IMAGE_FORMATS = ("png", "svg")
MOST_COLUMNS = 16  # of the table of learning rates: with more, as of a search, "All runs" has them
SINGULAR = {  # the labels at the top of the page, for a count of 1
    "finished runs": "finished run",
    "losses": "loss",
    "backbones": "backbone",
    "data sets": "data set",
    "seeds": "seed",
}


def report(
    folder: Path,
    out: Path | None = None,
    *,
    images: bool = True,
    extra: Sequence[Extra] = (),
    published: Published | None = None,
) -> Path:
    """Read the runs below `folder` and write the page, the tables and the figures.

    Args:
        folder: the folder of a study or of one run, or a file of kept runs.
        out: the folder to write to; if left out, `folder`/report or, for a file NAME.jsonl, NAME_report in the working
            folder.
        images: whether to write the figures as PNG and SVG files too.
        extra: sections that the caller adds to the page.
        published: published numbers to print beside ours in the tables of results.

    Returns:
        The path of the page.
    """
    study = read_study(folder)
    made = trials(study.done)
    found = answers(study, made)
    sections, opening = _build(study, made, found, extra, published), figures.trade_off(found)
    out = (folder / "report" if folder.is_dir() else Path(f"{folder.stem}_report")) if out is None else out
    try:
        _write_files(out, sections, opening, images)
        _write(out / PAGE_FILE, render(study, made, found, opening, sections))
    except OSError as error:
        raise ManymaxError(f"the report in {out} cannot be written: {error.strerror or error}.") from None
    return out / PAGE_FILE


def _write_files(out: Path, sections: Sequence[Section], opening: Figure, images: bool) -> None:
    """Write the tables and the figures of the page as files of their own."""
    for table in (table for section in sections for table in section.tables if table.rows):
        for suffix, write in TABLE_WRITERS.items():
            _write(out / "tables" / f"{table.name}.{suffix}", write(table))
    if images:
        for figure in (opening, *(figure for section in sections for figure in section.figures)):
            if figure.panels:
                _save_images(figure, out / "figures")


def _write(path: Path, text: str) -> None:
    """Write a text file that appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _save_images(figure: Figure, folder: Path) -> None:
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw(figure)
    with matplotlib.rc_context({"svg.hashsalt": figure.name}):  # no random ids: the same records give the same file
        for suffix in IMAGE_FORMATS:
            metadata = {"Date": None} if suffix == "svg" else None
            with atomic_write(folder / f"{figure.name}.{suffix}") as partial:
                drawn.savefig(partial, format=suffix, dpi=120, metadata=metadata)


def build(study: Study, extra: Sequence[Extra] = (), published: Published | None = None) -> list[Section]:
    """The sections below the first screen, in their order; what has nothing to show is told of in "What is missing".

    Sections that the caller adds come last, and only those that have something to say of these runs.
    """
    made = trials(study.done)
    return _build(study, made, answers(study, made), extra, published)


def _build(
    study: Study, made: Sequence[Trial], found: Sequence[Answer], extra: Sequence[Extra], published: Published | None
) -> list[Section]:
    further = [_sampling(made, published), _growth(made), _gradients(made), _approximations(made)]
    absent = [text for section in further if not section.has_content for text in section.missing]
    sections = [
        _results(made, found, study, published),
        _significance(found),
        _curves(made),
        _cost(made),
        *(section for section in further if section.has_content),
        _data(made),
        _gaps(study, absent),
        Section("runs", "All runs", tables=(tables.all_runs(study),), folded=True),
    ]
    return [*sections, *(section for build_one in extra if (section := build_one(made)) is not None)]


def _results(made: Sequence[Trial], found: Sequence[Answer], study: Study, published: Published | None) -> Section:
    standing = [
        standings.standing(answer, [t for t in made if t.place == (answer.data, answer.backbone)], f"standing_{index}")
        for index, answer in enumerate(found)
    ]
    by_rate = [tables.results(made, backbone, published) for backbone in dict.fromkeys(t.backbone for t in made)]
    compared = [table for table in by_rate if 2 < len(table.columns) <= MOST_COLUMNS]
    missing = () if made else (f"No run has finished: {_statuses(study)}. There is nothing to compare yet.",)
    text = (
        "Every loss ranks all items for every test user; these are the mean metrics. N, P and R are NDCG, precision"
        " and recall of the top of the ranking, the more the better; `popularity` ranks items by how often they occur."
    )
    return Section("results", "Results", text, tables=(*standing, *compared), missing=missing)


def _significance(found: Sequence[Answer]) -> Section:
    table = standings.significance(found)
    reason = "A test needs two losses on the same data and backbone, with the metrics of each user in their folders."
    text = "Whether the chosen loss of each data set and backbone differs from the others by more than chance."
    missing = () if table.rows else (reason,)
    return Section("significance", "Significance", text, tables=_with_rows(table), missing=missing)


def _curves(all_trials: Sequence[Trial]) -> Section:
    drawn = (
        figures.curves(all_trials, "epoch", "epoch"),
        figures.curves(all_trials, "seconds_train", "training seconds"),
    )
    reason = "No run has recorded its metrics after each epoch, so there are no curves to draw."
    text = "The validation metric during training."
    return Section("curves", "Curves", text, figures=_with_panels(drawn), missing=() if drawn[0].panels else (reason,))


def _sampling(all_trials: Sequence[Trial], published: Published | None) -> Section:
    sweeps: list[tuple[str, dict[str, Any], str]] = [
        ("num_negatives", {"sampler": "uniform"}, "Numbers of negatives, uniform proposal"),
        ("sampler", {}, "Proposals"),
    ]
    found = [tables.sweep(all_trials, *each, published) for each in sweeps]
    drawn = [figures.sweep(all_trials, *each) for each in sweeps]
    losses = " or ".join(name for name in FAMILY if is_sampled(name))
    reason = f"Nothing here compares negatives: run {losses} with several values of `num_negatives` or `sampler`."
    kept = tuple(table for table in found if table is not None)
    text = (
        "How the number of negatives, and the proposal that they are drawn from, change the results of sampled losses."
    )
    missing = () if kept else (reason,)
    return Section("sampling", "Negatives", text, figures=_with_panels(drawn), tables=kept, missing=missing)


def _growth(all_trials: Sequence[Trial]) -> Section:
    figure = figures.growth(all_trials)
    reason = "This figure needs runs on `planted` data of several sizes: only there the best possible ranking is known."
    text = "Whether the methods come closer to the best possible ranking as the data grows."
    missing = () if figure.panels else (reason,)
    return Section("growth", "Bayes ranking", text, figures=_with_panels([figure]), missing=missing)


def _cost(all_trials: Sequence[Trial]) -> Section:
    return Section("cost", "Cost", "Time and memory of training.", tables=_with_rows(pace.cost(all_trials)))


def _data(all_trials: Sequence[Trial]) -> Section:
    text = "How large the data sets are, and what each step of their preparation left."
    return Section("data", "Data", text, tables=(*_with_rows(tables.data_sets(all_trials)), *tables.cards(all_trials)))


def _gaps(study: Study, absent: Sequence[str]) -> Section:
    gaps = [*study.unreadable]
    if unchecked := sum(run.folder is not None and not run.record.files for run in study.runs):
        gaps.append(
            f"{unchecked} runs have records without checksums (version 0.1.0): their files were read unchecked."
        )
    if study.unfinished:
        names = ", ".join(path.name for path in study.unfinished[:5]) + (", ..." if len(study.unfinished) > 5 else "")
        gaps.append(
            f"{len(study.unfinished)} runs are under way or were interrupted ({names}); starting the study again"
            " finishes those that were interrupted."
        )
    if study.never_started:
        gaps.append(f"{study.never_started} runs never started; starting the study again does them.")
    gaps += absent
    text = "" if len(gaps) > len(absent) or study.failed else "Every run has finished."
    return Section("gaps", "What is missing", text, tables=_with_rows(tables.not_done(study)), missing=tuple(gaps))


def _gradients(all_trials: Sequence[Trial]) -> Section:
    drawn = _with_panels(figures.heat_maps(all_trials, what) for what in ("gradients", "jacobian"))
    reason = f"No gradients were measured; `manymax study` does so at the end of a run.{_probe_errors(all_trials)}"
    text = "Which items get a gradient from a trained model, and how much of it."
    return Section("gradients", "Gradients", text, figures=drawn, missing=() if drawn else (reason,))


def _approximations(all_trials: Sequence[Trial]) -> Section:
    drawn, table = figures.bias_variance(all_trials), tables.approximations(all_trials)
    reason = f"Bias and variance are measured at models that `manymax study` has trained with {BASELINE.name}."
    reason += _probe_errors(all_trials)
    text = f"How far sampled losses are from the {BASELINE.name} loss on the scores of trained models."
    return Section(
        "bias",
        "Bias and variance",
        text,
        figures=_with_panels([drawn]),
        tables=_with_rows(table),
        missing=() if drawn.panels else (reason,),
        folded=True,
    )


def _probe_errors(all_trials: Sequence[Trial]) -> str:
    errors = {run.probe["error"] for trial in all_trials for run in trial.runs if "error" in run.probe}
    return f" Measuring failed: {'; '.join(sorted(errors))}" if errors else ""


def _with_rows(*candidates: ReportTable) -> tuple[ReportTable, ...]:
    return tuple(table for table in candidates if table.rows)


def _with_panels(candidates: Iterable[Figure]) -> tuple[Figure, ...]:
    return tuple(figure for figure in candidates if figure.panels)


def _statuses(study: Study) -> str:
    """How many runs have which status, as words: "3 done, 1 diverged"."""
    counts: Counter[str] = Counter(run.record.status for run in study.runs)
    counts["under way"] += len(study.unfinished)
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "no runs"


def render(
    study: Study, made: Sequence[Trial], found: Sequence[Answer], opening: Figure, sections: Sequence[Section]
) -> str:
    """The HTML of the page; everything that comes from data or settings is escaped."""
    environment = Environment(
        loader=PackageLoader("manymax.study.report", "."), autoescape=True, undefined=StrictUndefined
    )
    panels = {
        f"{figure.name}-{index}": interactive(panel)
        for figure in (opening, *(figure for section in sections for figure in section.figures))
        for index, panel in enumerate(figure.panels)
    }
    return environment.get_template("page.html").render(
        title=study.title,
        note=study.note,
        facts=_facts(study),
        statuses=_statuses(study) if study.failed or study.unfinished else "",
        headlines=headlines(found),
        opening=opening,
        settings=common_settings(study, made),
        sections=sections,
        origin=_origin(study),
        number_text=number_text,
        charts=_script(panels),
        plotly=Markup(_plotly().replace("</script", "<\\/script")),
    )


def _plotly() -> str:
    """The source of plotly.js, from inside of the Python package `plotly`."""
    return (resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def _script(content: Any) -> Markup:
    """`content` as JSON inside of a <script>, with < > & escaped: a name from the data cannot close the script."""
    text = json.dumps(content, allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


def _facts(study: Study) -> list[str]:
    """The counts at the top of the page: ["3 losses", ...]."""
    done = study.done
    spent = sum(sum(run.record.seconds.values()) for run in study.runs)
    counts = {
        "finished runs": len(done),
        "losses": len({run.settings["loss"] for run in done}),
        "backbones": len({run.settings["backbone"] for run in done}),
        "data sets": len({trial.data for trial in trials(done)}),
        "seeds": len({run.settings["seed"] for run in done}),
    }
    told = [f"{count} {SINGULAR[name] if count == 1 else name}" for name, count in counts.items()]
    return [*told, f"{seconds_text(spent)} of computing"]


def _origin(study: Study) -> str:
    """The versions, machines and back ends that the runs were made with, for the foot of the page."""
    versions = {", ".join(f"{k} {v}" for k, v in run.record.versions.items()) for run in study.runs}
    machines = {", ".join(f"{k}: {v}" for k, v in run.record.machine.items()) for run in study.runs}
    backends = {run.record.backend for run in study.runs if run.record.backend is not None}
    parts = {"Versions": versions, "Machines": machines, "Back ends": backends}
    return " ".join(f"{name}: {'; '.join(sorted(seen))}." for name, seen in parts.items() if seen)
