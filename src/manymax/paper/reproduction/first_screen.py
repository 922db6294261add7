"""The first screen of the page: verdicts, softmax beside sparse and sampled losses, and what it means for practice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from manymax.members import BASELINE, FAMILY
from manymax.paper.findings import FINDINGS, verdict
from manymax.paper.numbers import MAIN_METRIC
from manymax.paper.printed import SAMPLED
from manymax.paper.reproduction.collected import Collected
from manymax.paper.reproduction.markup import NOT_ENOUGH, without_title
from manymax.paper.selection import nearest_batches, question_1, tuned
from manymax.study.report.formats import Cell, ReportTable, escape
from manymax.study.report.tables import short
from manymax.study.report.trials import Trial, validation_merit

BACKBONE = "mf"  # the one that all data sets were run on


def first_screen(collected: Collected, made: Sequence[Trial]) -> Iterator[str]:
    """Verdicts by kind, a table of three kinds of losses on each data set, and what it means for practice."""
    yield "## In short\n"
    yield "Of the findings that the paper states, in our runs:\n"
    by_verdict = defaultdict(list)
    for finding in FINDINGS:
        claim = f"{escape(finding.claim.rstrip('.'))} ([{finding.number}](#finding-{finding.number}))"
        by_verdict[verdict(collected.cases.get(finding.number, ()), finding.parts)].append(claim)
    for found, claims in sorted(by_verdict.items(), key=lambda pair: (pair[0] != "confirmed", pair[0])):
        yield f"**{found.capitalize()}**:\n\n" + "".join(f"- {claim}\n" for claim in claims)
    rows = [(data, _best_of_each_kind(data, made)) for data in dict.fromkeys(trial.data for trial in made)]
    rows = [(data, kinds) for data, kinds in rows if all(kinds)]
    if not rows:
        yield f"{NOT_ENOUGH} for a table of three kinds of losses.\n"
        return
    yield f"{short(MAIN_METRIC)} on {BACKBONE}, each loss chosen and tuned on the validation part:\n"
    columns = ((BASELINE.title,), ("best sparse loss",), ("best sampled loss",))
    cells = tuple(((data,), _cells(kinds)) for data, kinds in rows)
    yield without_title(ReportTable("first_screen", "", ("data",), columns, cells))
    yield _practice(rows)


def _best_of_each_kind(data: str, made: Sequence[Trial]) -> list[Trial | None]:
    """The trials of softmax, of the best sparse loss and of the best sampled one, by the validation part."""
    there = [trial for trial in made if trial.place == (data, BACKBONE) and not trial.settings.get("debias")]
    exact = tuned(question_1(there))
    kinds = (
        [trial for trial in exact if trial.loss == BASELINE.name],
        [trial for trial in exact if trial.loss in FAMILY and FAMILY[trial.loss].sparse],
        [trial for trial in tuned(nearest_batches(there)) if trial.loss in SAMPLED],
    )
    return [max(kind, key=lambda trial: validation_merit(trial, MAIN_METRIC), default=None) for kind in kinds]


def _cells(kinds: Sequence[Trial | None]) -> tuple[Cell, ...]:
    values = [trial.mean(MAIN_METRIC) or 0.0 for trial in kinds if trial is not None]
    names = [trial.label for trial in kinds if trial is not None]
    texts = [f"{value:.4f}" if at == 0 else f"{value:.4f} {names[at]}" for at, value in enumerate(values)]
    return tuple(Cell(text=text, best=value == max(values)) for text, value in zip(texts, values, strict=True))


def _practice(rows: Sequence[tuple[str, Sequence[Trial | None]]]) -> str:
    """What the table means for who has to choose a loss, in sentences that are counted from it."""
    gains = [[(trial.mean(MAIN_METRIC) or 0.0) if trial is not None else 0.0 for trial in kinds] for _, kinds in rows]
    changes = [[100 * (value / values[0] - 1) for value in values[1:]] for values in gains]
    sentences = []
    for name, column in zip(("sparse", "sampled"), zip(*changes, strict=True), strict=True):
        above = sum(change > 0 for change in column)
        sentences.append(
            f"The best {name} loss is above softmax on {above} of {len(rows)} data sets, by"
            f" {min(column):+.0f} to {max(column):+.0f} percent."
        )
    return (
        f"What it means for practice: {' '.join(sentences)} On other backbones the order may be another (question 1"
        " below). So begin with softmax, give both a trial, and let your own data decide ([how](choose.md)).\n"
    )
