"""The report: one page that needs no network, and its tables and figures as files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from manymax.errors import ManymaxError, check_choice
from manymax.members import BASELINE, FAMILY
from manymax.study.files import atomic_write
from manymax.study.report import figures, pace, tables
from manymax.study.report.drawing import Figure, draw, interactive
from manymax.study.report.formats import FORMATS, ReportTable
from manymax.study.report.formats import figure as format_figure
from manymax.study.report.runs import Study, Trial, is_sampled, read_study, trials
from manymax.study.report.sections import Extra, Published, Section

PAGE = "report.html"
IMAGES = ("png", "svg")
ONE = {
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
        folder: of a study or of one run; or a file of kept runs.
        out: where to write. If left out, it is `folder`/report, or, for a file NAME.jsonl, NAME_report in the working
            folder.
        images: whether to write PNG and SVG too.
        extra: sections that the caller adds.
        published: numbers of others that stand beside ours in the tables of results.

    Returns:
        The path of the page.
    """
    study = read_study(folder)
    sections = build(study, extra, published)
    out = (folder / "report" if folder.is_dir() else Path(f"{folder.stem}_report")) if out is None else out
    try:
        return _write_all(out, study, sections, images)
    except OSError as error:
        raise ManymaxError(f"the report in {out} cannot be written: {error.strerror or error}.") from None


def _write_all(out: Path, study: Study, sections: Sequence[Section], images: bool) -> Path:
    for table in (table for section in sections for table in section.tables if table.rows):
        for suffix, write in FORMATS.items():
            _write(out / "tables" / f"{table.name}.{suffix}", write(table))
    if images:
        for figure in (figure for section in sections for figure in section.figures):
            _save_images(figure, out / "figures")
    _write(out / PAGE, render(study, sections))
    return out / PAGE


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _save_images(figure: Figure, folder: Path) -> None:
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw(figure)
    with matplotlib.rc_context({"svg.hashsalt": figure.name}):  # the same records give the same file
        for suffix in IMAGES:
            metadata = {"Date": None} if suffix == "svg" else None
            with atomic_write(folder / f"{figure.name}.{suffix}") as partial:
                drawn.savefig(partial, format=suffix, dpi=120, metadata=metadata)


def build(study: Study, extra: Sequence[Extra] = (), published: Published | None = None) -> list[Section]:
    """The sections of the page from what the study holds, with those that the caller adds in their places."""
    made = trials(study.done)
    sections = [
        _results(made, study, published),
        _significance(made),
        _curves(made),
        _sampling(made, published),
        _growth(made),
        _gradients(made),
        _approximations(made),
        _cost(made),
        _data(made),
        _gaps(study),
        Section("runs", "All runs", tables=(tables.all_runs(study),), folded=True),
    ]
    for each in extra:
        ids = [section.id for section in sections]
        check_choice("before", each.before, ids)
        sections.insert(ids.index(each.before), each.build(made))
    return sections


def _results(made: Sequence[Trial], study: Study, published: Published | None) -> Section:
    backbones = dict.fromkeys(trial.backbone for trial in made)
    found = tuple(tables.results(made, backbone, published) for backbone in backbones)
    missing = () if made else (f"No run has finished: {_count(study)}. There is nothing to compare yet.",)
    return Section("results", "Results", tables=found, missing=missing)


def _significance(made: Sequence[Trial]) -> Section:
    table = tables.significance(made)
    gap = "A test needs two methods on the same data and backbone, with the metrics of each user."
    return Section("significance", "Significance", tables=_full(table), missing=() if table.rows else (gap,))


def _curves(made: Sequence[Trial]) -> Section:
    drawn = (
        figures.curves(made, "epoch", "epoch"),
        figures.curves(made, "seconds_train", "training seconds"),
    )
    gap = "No run has recorded a curve."
    return Section("curves", "Curves", figures=_drawn(drawn), missing=() if drawn[0].panels else (gap,))


def _sampling(made: Sequence[Trial], published: Published | None) -> Section:
    sweeps: list[tuple[str, dict[str, Any], str]] = [
        ("num_negatives", {"sampler": "uniform"}, "Numbers of negatives, uniform proposal"),
        ("sampler", {}, "Proposals"),
    ]
    found = [tables.sweep(made, *each, published) for each in sweeps]
    drawn = [figures.sweep(made, *each) for each in sweeps]
    losses = " or ".join(name for name in FAMILY if is_sampled(name))
    gap = f"No study of negatives: run {losses} with several `num_negatives` or `sampler`."
    kept = tuple(table for table in found if table is not None)
    return Section("sampling", "Negatives", figures=_drawn(drawn), tables=kept, missing=() if kept else (gap,))


def _growth(made: Sequence[Trial]) -> Section:
    figure = figures.growth(made)
    gap = "The regret against the Bayes ranking needs runs on `planted` data of several sizes."
    return Section("growth", "Bayes ranking", figures=_drawn([figure]), missing=() if figure.panels else (gap,))


def _cost(made: Sequence[Trial]) -> Section:
    return Section("cost", "Cost", figures=_drawn([figures.trade_off(made)]), tables=_full(pace.cost(made)))


def _data(made: Sequence[Trial]) -> Section:
    return Section("data", "Data", tables=(*_full(tables.data_sets(made)), *tables.cards(made)))


def _gaps(study: Study) -> Section:
    gaps = [*study.unreadable]
    if study.unfinished:
        names = ", ".join(path.name for path in study.unfinished[:5]) + (", ..." if len(study.unfinished) > 5 else "")
        gaps.append(f"{len(study.unfinished)} runs are under way or were interrupted ({names}); start the study again.")
    text = "" if gaps or study.failed else "Every run has finished."
    return Section("gaps", "What is missing", text, tables=_full(tables.not_done(study)), missing=tuple(gaps))


def _gradients(made: Sequence[Trial]) -> Section:
    drawn = _drawn(figures.heat_maps(made, what) for what in ("gradients", "jacobian"))
    gap = f"No model has been probed; `manymax study` does so for exact losses.{_probe_errors(made)}"
    return Section("gradients", "Gradients", figures=drawn, missing=() if drawn else (gap,))


def _approximations(made: Sequence[Trial]) -> Section:
    drawn, table = figures.bias_variance(made), tables.approximations(made)
    gap = f"Bias and variance are measured at models that `manymax study` has trained with {BASELINE.name}."
    gap += _probe_errors(made)
    found = _drawn([drawn])
    return Section(
        "bias", "Bias and variance", figures=found, tables=_full(table), missing=() if found else (gap,), folded=True
    )


def _probe_errors(made: Sequence[Trial]) -> str:
    errors = {run.probe["error"] for trial in made for run in trial.runs if "error" in run.probe}
    return f" What went wrong: {'; '.join(sorted(errors))}" if errors else ""


def _full(*found: ReportTable) -> tuple[ReportTable, ...]:
    return tuple(table for table in found if table.rows)


def _drawn(found: Iterable[Figure]) -> tuple[Figure, ...]:
    return tuple(figure for figure in found if figure.panels)


def _count(study: Study) -> str:
    counts: Counter[str] = Counter(run.record.status for run in study.runs)
    counts["under way"] += len(study.unfinished)
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "no runs"


def render(study: Study, sections: Sequence[Section]) -> str:
    """The page as text; whatever comes from data or settings is escaped."""
    environment = Environment(
        loader=PackageLoader("manymax.study.report", "."), autoescape=True, undefined=StrictUndefined
    )
    panels = {
        f"{figure.name}-{index}": interactive(panel)
        for section in sections
        for figure in section.figures
        for index, panel in enumerate(figure.panels)
    }
    return environment.get_template("page.html").render(
        title=study.title,
        subtitle=f"Runs: {_count(study)}.",
        facts=_facts(study),
        sections=sections,
        origin=_origin(study),
        figure=format_figure,
        charts=_script(panels),
        plotly=Markup(_plotly().replace("</script", "<\\/script")),
    )


def _plotly() -> str:
    """plotly.js, as the Python package carries it; its Python part is not needed."""
    return (resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def _script(content: Any) -> Markup:
    """JSON that may stand inside of a script: names from data cannot close it."""
    text = json.dumps(content, allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


def _facts(study: Study) -> list[tuple[str, str]]:
    done = study.done
    hours = sum(sum(run.record.seconds.values()) for run in study.runs) / 3600
    counts = {
        "finished runs": len(done),
        "losses": len({run.settings["loss"] for run in done}),
        "backbones": len({run.settings["backbone"] for run in done}),
        "data sets": len({trial.data for trial in trials(done)}),
        "seeds": len({run.settings["seed"] for run in done}),
    }
    return [
        *((str(count), ONE[name] if count == 1 else name) for name, count in counts.items()),
        (f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.1f} min", "of running"),
    ]


def _origin(study: Study) -> str:
    """Versions and machines of the runs."""
    versions = {", ".join(f"{k} {v}" for k, v in run.record.versions.items()) for run in study.runs}
    machines = {", ".join(f"{k}: {v}" for k, v in run.record.machine.items()) for run in study.runs}
    return "Versions: " + "; ".join(sorted(versions)) + ". Machines: " + "; ".join(sorted(machines)) + "."
