"""The sections on questions 1 (accuracy) and 2 (negatives), and on large differences from the paper."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from manymax.paper.numbers import PAPER_METRICS
from manymax.paper.page_sections import PUBLISHED_NUMBERS
from manymax.paper.paper_columns import LARGE_DIFFERENCE, comparison_table, large_difference_line
from manymax.paper.printed import paper_name
from manymax.paper.reproduction.markup import NOT_ENOUGH, by_place, subsection
from manymax.paper.selection import nearest_batches, question_1, question_1_rates, question_2, sampling, tuned
from manymax.study.report import tables
from manymax.study.report.labels import data_name
from manymax.study.report.trials import Trial

NOT_EXAMINED = "not examined"


def accuracy(made: Sequence[Trial]) -> Iterator[str]:
    """Question 1: a table per data set and backbone, then one per backbone with all learning rates."""
    yield "## Question 1: accuracy\n"
    answering = question_1(made)
    if not answering:
        yield f"{NOT_ENOUGH}: none has finished.\n"
    for (data, backbone), there in by_place(answering).items():
        yield subsection(comparison_table(f"{backbone}, {data}", tuned(there), _popularity_note(there)))
    at_all_rates = question_1_rates(made)
    for backbone in dict.fromkeys(trial.backbone for trial in at_all_rates):
        there = [trial for trial in at_all_rates if trial.backbone == backbone]
        if len({trial.lr for trial in there} - {None}) > 1:
            note = (
                f"Bold: the best of a method over its learning rates, or, in italics, of a data set."
                f"{_batches_note(there)}"
            )
            table = tables.results(there, backbone, PUBLISHED_NUMBERS)
            yield subsection(replace(table, title=f"{backbone}: all learning rates", note=note))


def _batches_note(made: Sequence[Trial]) -> str:
    """A sentence on how the batches of these trials were made; empty where all were made in one way."""
    labels: dict[tuple[str, str], list[str]] = defaultdict(list)  # {(data, batches): labels of losses}
    for trial in made:
        if trial.batches is not None and trial.label not in labels[trial.data, trial.batches]:
            labels[trial.data, trial.batches].append(trial.label)
    if len({batches for _, batches in labels}) < 2:
        return ""
    in_several_ways = {data for data, count in Counter(data for data, _ in labels).items() if count > 1}
    parts = [
        f"{batches} on {data}" + (f" ({'; '.join(losses)})" if data in in_several_ways else "")
        for (data, batches), losses in sorted(labels.items())
    ]
    return f" Batches: {', '.join(parts)}."


def _popularity_note(made: Sequence[Trial]) -> str:
    record = made[0].runs[0].record
    values = ", ".join(
        f"{tables.short(metric)} {value:.4f}"
        for metric in PAPER_METRICS
        if (value := record.popularity.get(metric)) is not None
    )
    return f"Bold: the best of a column. The popularity ranking has {values}." if values else ""


def negatives(made: Sequence[Trial]) -> Iterator[str]:
    """Question 2: a table per data set and backbone where numbers of negatives or proposals vary."""
    yield "## Question 2: negatives\n"
    places = {
        place: there
        for place, there in by_place(question_2(made)).items()
        if len({sampling(trial) for trial in there}) > 1
    }
    if not places:
        yield f"{NOT_ENOUGH}: needed is a sampled loss with several numbers of negatives or proposals.\n"
    for (data, backbone), there in places.items():
        title = f"{backbone}, {data}: sampled losses"
        yield subsection(comparison_table(title, tuned(there), "Bold: the best of a column."))


def large_differences(made: Sequence[Trial], causes: Mapping[tuple[str, str, str], str]) -> Iterator[str]:
    """The trials that differ much from the paper, by likely cause."""
    yield f"## Where ours differs from the paper by more than {LARGE_DIFFERENCE:g} percent\n"
    by_cause: dict[str, list[str]] = defaultdict(list)
    for trial in tuned(nearest_batches(made)):
        if line := large_difference_line(trial):
            names = (data_name(trial.settings), paper_name(trial))
            keys = [(name, trial.backbone, trial.loss) for name in names]
            by_cause[next((causes[key] for key in keys if key in causes), NOT_EXAMINED)].append(line)
    for cause, lines in by_cause.items():
        yield "\n".join([f"Likely cause: {cause}.\n", *lines]) + "\n"
    if not by_cause:
        yield "Nowhere, as far as there are runs.\n"
