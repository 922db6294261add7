"""`docs/reproduction.md`: the paper's questions answered by collected records, beside the paper's numbers."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from manymax.errors import ManymaxError
from manymax.paper.findings import FINDINGS as CLAIMS
from manymax.paper.findings import Finding, FindingCase, verdict
from manymax.paper.judgement import from_paper
from manymax.paper.method_comparisons import METHOD_COMPARISONS
from manymax.paper.numbers import DATA, NUMBERS, PAPER_METRICS, PaperNumber
from manymax.paper.page_sections import PUBLISHED
from manymax.paper.paper_columns import LARGE, as_in_the_paper, beside, far
from manymax.paper.printed import PAPER_NAMES, matching, paper_name
from manymax.paper.selection import METRIC, draws, nearest, question_1, question_2, rates, tuned
from manymax.paper.verdicts import FINDINGS, decide, read_decided
from manymax.study.files import atomic_write, write_json
from manymax.study.record_files import SUFFIX
from manymax.study.report import figures, pace, tables
from manymax.study.report.drawing import Figure, draw
from manymax.study.report.formats import Cell, ReportTable, escape, markdown
from manymax.study.report.runs import Run, read_study
from manymax.study.report.trials import Trial, data_name, trials

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE, FIGURES, CAUSES = Path("docs/reproduction.md"), Path("docs/figures"), Path("docs/causes.toml")
RESULTS = Path("results/study")
PREFIX = "reproduction_"  # of the figures' files
NOT_EXAMINED, NOT_ENOUGH = "not examined", "Not enough runs"

INTRODUCTION = """# The paper's tables, run again

Written by `manymax reproduction` from the records in `results/study`; nothing here is typed by hand but this
introduction and the causes in `docs/causes.toml`. Every number of ours is of the test part, at the epoch and the
tuned settings (learning rate; for alternating least squares the ridge) that are best on the validation part. In
brackets stands what the paper prints for the same data, backbone and loss at its own best learning rate by N@20.
Where there are several seeds, the mean is given with the standard deviation over seeds: seeds change the split too.
Where batches were made in several ways, a number is of the one nearest to the paper's, which are of pairs; learning
rates are compared in the way in which most of them were run.
Seconds are those of the clock, on a machine that other work shared at times: between runs they are no benchmark.
"""


@dataclass(frozen=True)
class Collected:
    """What the page is made of."""

    studies: Mapping[str, tuple[Run, ...]]
    decided: frozenset[str]
    cases: Mapping[int, tuple[FindingCase, ...]]
    causes: Mapping[tuple[str, str, str], str]

    @property
    def runs(self) -> list[Run]:
        """Those of all studies but those that stand apart, each once."""
        every = [run for name, runs in self.studies.items() if name not in METHOD_COMPARISONS for run in runs]
        return list({run.record.hash: run for run in every}.values())

    @property
    def done(self) -> list[Run]:
        """Those that ended well."""
        return [run for run in self.runs if run.record.status == "done"]


def write(root: Path, originals: Sequence[Path] = ()) -> list[Path]:
    """Write the page and its figures from `results/study`.

    Args:
        root: the top folder of a checkout.
        originals: folders with original runs, to judge the findings anew by the rows of their users.

    Returns:
        The files that were written.
    """
    if originals:
        known = read(root)
        write_json(root / RESULTS / FINDINGS, decide(known.done, originals, known.cases))
    collected = read(root)
    folder = root / FIGURES
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [_save(figure, folder) for figure in drawings(collected)]
        for stale in set(folder.glob(f"{PREFIX}*.svg")) - set(written):
            stale.unlink()
        with atomic_write(root / PAGE) as partial:
            partial.write_text(page(collected), encoding="utf-8")
    except OSError as error:
        raise ManymaxError(f"the page in {root / PAGE} cannot be written: {error.strerror or error}.") from None
    return [root / PAGE, *written]


def _save(figure: Figure, folder: Path) -> Path:
    import matplotlib

    path = folder / f"{PREFIX}{figure.name}.svg"
    drawn = draw(figure)
    # Equal records give equal files: without a fixed salt, matplotlib numbers the parts of an SVG at random.
    with matplotlib.rc_context({"svg.hashsalt": figure.name}), atomic_write(path) as partial:
        drawn.savefig(partial, format="svg", metadata={"Date": None})
    return path


def read(root: Path) -> Collected:
    """The records below `root`/results/study, what was decided from them, and the causes of differences."""
    place = root / RESULTS
    found = {name: read_study(path) for name, path in _study_sources(place).items()}
    unreadable = [why for study in found.values() for why in study.unreadable]
    if unreadable:
        raise ManymaxError(" ".join(unreadable))
    decided, cases = read_decided(place / FINDINGS)
    studies = {name: study.runs for name, study in found.items()}
    return Collected(studies, frozenset(decided), cases, _causes(root / CAUSES))


def _study_sources(folder: Path) -> dict[str, Path]:
    """{name: path} of the studies in a folder, sorted by name: files of kept runs, and folders of run folders."""
    sources: dict[str, Path] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() or path.suffix == SUFFIX:
            name = path.name if path.is_dir() else path.stem
            if name in sources:
                raise ManymaxError(f"{sources[name]} and {path} are two studies of one name: rename or remove one.")
            sources[name] = path
    return dict(sorted(sources.items()))


def _causes(path: Path) -> dict[tuple[str, str, str], str]:
    """{(data, backbone, loss): likely cause} from a file of [[cause]] with these and `text`; `loss` may be a list."""
    causes: dict[tuple[str, str, str], str] = {}
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8")).get("cause", []) if path.is_file() else []
        for row in rows:
            losses = [row["loss"]] if isinstance(row["loss"], str) else row["loss"]
            for key in ((row["data"], row["backbone"], loss) for loss in losses):
                if key in causes:
                    raise ManymaxError(f"{path} has two causes for {', '.join(key)}: leave one.")
                causes[key] = " ".join(row["text"].split()).rstrip(".")
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ManymaxError(f"{path} must hold [[cause]] with data, backbone, loss and text: {error!r}.") from None
    return causes


def page(collected: Collected) -> str:
    """The page in Markdown."""
    made = trials(collected.done)
    parts = [
        INTRODUCTION,
        *_board(collected),
        *_accuracy(made),
        *_negatives(made),
        *_differences(made, collected.causes),
        *_convergence(made),
        *_models(made),
        *_apart(collected),
        *_data(made),
        *_origin(collected),
        *_missing(made, collected),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _sub(table: ReportTable) -> str:
    return f"#{markdown(table)}"


def _board(collected: Collected) -> Iterator[str]:
    """The findings, each with its verdict and the cases behind it."""
    yield "## Findings\n"
    hashes = {run.record.hash for run in collected.done}
    yield (
        f"Decided from {len(collected.decided & hashes)} of the {len(hashes)} finished runs by the rules of "
        "`manymax report`; the same rules are put to the paper's own tables. A finding that is stated without "
        "exception is contradicted by one case that opposes it. De-biased losses, which the paper does not have, "
        "decide nothing.\n"
    )
    rows = [_verdict(finding, collected.cases.get(finding.number, ())) for finding in CLAIMS]
    columns = (("our runs",), ("the paper's tables",), ("support",), ("oppose",), ("open",))
    yield markdown(ReportTable("findings", "", ("", "finding"), columns, tuple(rows))).partition("\n\n")[2]
    for finding in CLAIMS:
        yield f"### Finding {finding.number}\n"
        yield f"{escape(finding.claim)} {escape(finding.rule)}\n"
        yield "\n".join(_case_lines(collected.cases.get(finding.number, ()))) + "\n"


def _verdict(finding: Finding, cases: Sequence[FindingCase]) -> tuple[tuple[str, ...], tuple[Cell, ...]]:
    counts = Counter(case.supports for case in cases)
    theirs = verdict(tuple(finding.cases(from_paper())), finding.parts)
    cells = [verdict(cases, finding.parts), theirs, *(str(counts[says]) for says in (True, False, None))]
    return (str(finding.number), finding.claim), tuple(Cell(text=cell, best=i == 0) for i, cell in enumerate(cells))


def _case_lines(cases: Sequence[FindingCase]) -> Iterator[str]:
    """What decides comes first."""
    if not cases:
        yield f"{NOT_ENOUGH}: no case can be looked at yet."
    for says, word in ((False, "opposes"), (True, "supports"), (None, "open")):
        yield from (f"- {word}: {escape(case.name)}: {escape(case.why)}" for case in cases if case.supports is says)


def _by_place(made: Iterable[Trial]) -> dict[tuple[str, str], list[Trial]]:
    places: dict[tuple[str, str], list[Trial]] = {}
    for trial in made:
        places.setdefault(trial.place, []).append(trial)
    return places


def _accuracy(made: Sequence[Trial]) -> Iterator[str]:
    yield "## Question 1: accuracy\n"
    first = question_1(made)
    if not first:
        yield f"{NOT_ENOUGH}: none has finished.\n"
    for (data, backbone), here in _by_place(first).items():
        table = beside(f"{backbone}, {data}", tuned(here), _popularity(here))
        yield _sub(table)
    every = rates(made)
    for backbone in dict.fromkeys(trial.backbone for trial in every):
        here = [trial for trial in every if trial.backbone == backbone]
        if len({trial.lr for trial in here} - {None}) > 1:
            note = (
                f"Bold: the best of a method over its learning rates, or, in italics, of a data set.{_searched(here)}"
            )
            table = tables.results(here, backbone, PUBLISHED)
            yield _sub(replace(table, title=f"{backbone}: all learning rates", note=note))


def _searched(here: Sequence[Trial]) -> str:
    """How the batches of these trials were made, where they differ in that."""
    ways: dict[tuple[str, str], list[str]] = defaultdict(list)
    for trial in here:
        if trial.batches is not None and trial.label not in ways[trial.data, trial.batches]:
            ways[trial.data, trial.batches].append(trial.label)
    if len({way for _, way in ways}) < 2:
        return ""
    several = {data for data, count in Counter(data for data, _ in ways).items() if count > 1}
    parts = [
        f"{way} on {data}" + (f" ({'; '.join(labels)})" if data in several else "")
        for (data, way), labels in sorted(ways.items())
    ]
    return f" Batches: {', '.join(parts)}."


def _popularity(here: Sequence[Trial]) -> str:
    record = here[0].runs[0].record
    values = ", ".join(
        f"{tables.short(metric)} {value:.4f}"
        for metric in PAPER_METRICS
        if (value := record.popularity.get(metric)) is not None
    )
    return f"Bold: the best of a column. The popularity ranking has {values}." if values else ""


def _negatives(made: Sequence[Trial]) -> Iterator[str]:
    yield "## Question 2: negatives\n"
    rows = {place: here for place, here in _by_place(question_2(made)).items() if len({draws(t) for t in here}) > 1}
    if not rows:
        yield f"{NOT_ENOUGH}: needed is a sampled loss with several numbers of negatives or proposals.\n"
    for (data, backbone), here in rows.items():
        yield _sub(beside(f"{backbone}, {data}: sampled losses", tuned(here), "Bold: the best of a column."))


def _differences(made: Sequence[Trial], causes: Mapping[tuple[str, str, str], str]) -> Iterator[str]:
    yield f"## Where ours differs from the paper by more than {LARGE:g} percent\n"
    by_cause: dict[str, list[str]] = defaultdict(list)
    for trial in tuned(nearest(made)):
        if line := far(trial):
            names = (data_name(trial.settings), paper_name(trial))
            keys = [(name, trial.backbone, trial.loss) for name in names]
            by_cause[next((causes[key] for key in keys if key in causes), NOT_EXAMINED)].append(line)
    for cause, lines in by_cause.items():
        yield "\n".join([f"Likely cause: {cause}.\n", *lines]) + "\n"
    if not by_cause:
        yield "Nowhere, as far as there are runs.\n"


def _convergence(made: Sequence[Trial]) -> Iterator[str]:
    yield "## Question 3: epochs and seconds\n"
    first = tuned(question_1(made))
    rows = tuple(((*t.place, t.label, tables.rate(t.lr)), pace.pace(t, METRIC)) for t in first)
    if not rows:
        yield f"{NOT_ENOUGH}: none has finished.\n"
        return
    note = "Seconds are of training alone. Runs that shared the machine with others are slower than alone."
    headers = ("data", "backbone", "loss", "rate")
    yield _sub(
        ReportTable("", "How soon, and how long", headers, pace.PACE_COLUMNS, rows, f"{note} {pace.LONGEST_WAIT_NOTE}")
    )
    for figure in _curves(made):
        yield _image(figure)


def _curves(made: Sequence[Trial]) -> list[Figure]:
    first = tuned(question_1(made))
    drawn = [figures.curves(first, *axis) for axis in (("epoch", "epoch"), ("seconds_train", "training seconds"))]
    return [figure for figure in drawn if figure.panels]


def _probes(made: Sequence[Trial]) -> list[Figure]:
    first = tuned(question_1(made))
    drawn = [*(figures.heat_maps(first, what) for what in ("gradients", "jacobian")), figures.bias_variance(first)]
    return [figure for figure in drawn if figure.panels]


def drawings(collected: Collected) -> list[Figure]:
    """Every figure of the page."""
    made = trials(collected.done)
    apart = (figure for name in METHOD_COMPARISONS if (figure := _apart_figure(name, _apart_trials(collected, name))))
    return [*_curves(made), *_probes(made), *apart]


def _image(figure: Figure) -> str:
    link = f"{FIGURES.name}/{PREFIX}{figure.name}.svg"
    return f"![{escape(figure.title)}]({link})\n\n{escape(figure.title)}. {escape(figure.note)}\n"


def _models(made: Sequence[Trial]) -> Iterator[str]:
    yield "## At the trained models: gradients, bias and variance\n"
    drawn = _probes(made)
    if not drawn:
        yield f"{NOT_ENOUGH}: no model of an exact loss has been probed.\n"
    for figure in drawn:
        yield _image(figure)
    table = tables.approximations(tuned(question_1(made)))
    if table.rows:
        yield _sub(table)


def _apart(collected: Collected) -> Iterator[str]:
    for name, comparison in METHOD_COMPARISONS.items():
        yield f"## {comparison.title}\n"
        made = _apart_trials(collected, name)
        table = comparison.table(made, PAPER_METRICS)
        yield (
            markdown(table).partition("\n\n")[2]
            if table
            else f"{NOT_ENOUGH}: needed are runs that differ in {comparison.options_text}, in `{RESULTS / name}`.\n"
        )
        if figure := _apart_figure(name, made):
            yield _image(figure)


def _apart_trials(collected: Collected, name: str) -> list[Trial]:
    return trials([run for run in collected.studies.get(name, ()) if run.record.status == "done"])


def _apart_figure(name: str, made: Sequence[Trial]) -> Figure | None:
    """None where the comparison has none, or nothing can be drawn."""
    draw_it = METHOD_COMPARISONS[name].draw
    figure = draw_it(made) if draw_it else None
    return figure if figure and figure.panels else None


def _data(made: Sequence[Trial]) -> Iterator[str]:
    yield "## Data\n"
    table = tables.data_sets(made)
    if not table.rows:
        yield f"{NOT_ENOUGH}: no set has been used.\n"
        return
    yield _sub(replace(table, title="After the filters"))
    rows = tuple(
        ((name,), tuple(Cell(text=text) for text in (f"{d.users:,}", f"{d.items:,}", f"{d.interactions:,}", d.note)))
        for name, d in DATA.items()
    )
    columns = (("users",), ("items",), ("interactions",), ("what fits these counts",))
    aliases = "; ".join(f"{file} is compared with the paper's {name}" for file, name in PAPER_NAMES.items())
    note = f"Where a set is not available in the form that fits the paper's counts, another stands for it: {aliases}."
    yield _sub(ReportTable("", "As the paper prints them", ("data",), columns, rows, note))
    for card in tables.cards(made):
        yield _sub(card)


def _origin(collected: Collected) -> Iterator[str]:
    """How long it took, on what."""
    yield "## How it was run\n"
    runs = list({run.record.hash: run for each in collected.studies.values() for run in each}.values())
    if not runs:
        yield f"{NOT_ENOUGH}: there is no record.\n"
        return
    rows = [((name,), _hours(each)) for name, each in collected.studies.items()]
    if len(rows) > 1:
        rows.append((("all, each run once",), _hours(runs)))
    yield _sub(ReportTable("", "Hours", ("study",), (("runs",), ("hours",), ("of them training",)), tuple(rows)))
    for what in ("versions", "machine"):
        seen = {", ".join(f"{k} {v}" for k, v in getattr(run.record, what).items()) for run in runs}
        yield "\n".join(f"- {what}: {escape(each)}" for each in sorted(seen)) + "\n"


def _hours(runs: Sequence[Run]) -> tuple[Cell, ...]:
    total = sum(sum(run.record.seconds.values()) for run in runs)
    training = sum(run.record.seconds.get("training", 0.0) for run in runs)
    return Cell(text=str(len(runs))), Cell(total / 3600, digits=2), Cell(training / 3600, digits=2)


def _missing(made: Sequence[Trial], collected: Collected) -> Iterator[str]:
    """What the paper has and these records have not."""
    yield "## What is missing\n"
    lines = list(_gaps(made))
    late = {run.record.hash for run in collected.done} - collected.decided
    gone = collected.decided - {run.record.hash for run in collected.done}
    if gone:
        lines.append(f"- The findings rest on {len(gone)} runs that are no longer among the records.")
    if late:
        lines.append(f"- {len(late)} runs have not been looked at for the findings yet.")
    lines += [
        f"- {escape(_called(run))}: {run.record.status}." for run in collected.runs if run.record.status != "done"
    ]
    yield "\n".join(lines or ["Nothing."]) + "\n"


def _called(run: Run) -> str:
    s = run.settings
    return ", ".join((data_name(s), s["backbone"], s["loss"], tables.rate(s.get("lr")), f"seed {s['seed']}"))


def _gaps(made: Sequence[Trial]) -> Iterator[str]:
    """For each place the losses, then the settings of the other losses, of which the paper prints a number."""
    met = {number for trial in made for number in matching(as_in_the_paper(trial), METRIC)}
    places: dict[str, dict[str, list[PaperNumber]]] = {}
    for number in NUMBERS:
        if number.metric == METRIC:
            here = places.setdefault(f"{number.data}, {number.backbone}", {})
            here.setdefault(number.loss, []).append(number)
    for place, losses in places.items():
        lacking = [loss for loss, numbers in losses.items() if not any(number in met for number in numbers)]
        if lacking:
            what = "none yet" if len(lacking) == len(losses) else f"without {', '.join(lacking)}"
            yield f"- {place}: {NOT_ENOUGH.lower()}, {what}."
        parts = {
            loss: [f"{name}={value}" for n in numbers if n not in met for name, value in n.setting.items()]
            for loss, numbers in losses.items()
            if loss not in lacking
        }
        if any(parts.values()):
            text = "; ".join(f"{loss} {', '.join(settings)}" for loss, settings in parts.items() if settings)
            yield f"- {place}: not run of the paper's settings: {text}."
