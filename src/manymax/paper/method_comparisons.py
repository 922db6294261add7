"""Method comparisons: studies that compare ways to do one thing, such as making batches.

Each has a section of its own on the page of the reproduction. Their runs answer none of the paper's questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manymax.study.report import figures, pace, tables
from manymax.study.report.drawing import Figure
from manymax.study.report.formats import Cell, ReportTable
from manymax.study.report.trials import Trial


@dataclass(frozen=True)
class MethodComparison:
    """One such study.

    Args:
        title: the headline of its section.
        options: the settings that are compared.
        note: what their values mean; printed below the table.
        make: from the comparison, its trials and metrics to the table.
        draw: from its trials to a figure, if it has one.
    """

    title: str
    options: tuple[str, ...]
    note: str
    make: Callable[[MethodComparison, Sequence[Trial], Sequence[str]], ReportTable]
    draw: Callable[[Sequence[Trial]], Figure] | None = None

    def table(self, trials: Sequence[Trial], metrics: Sequence[str]) -> ReportTable | None:
        """The table of the trials; None where they do not differ in the options."""
        return self.make(self, trials, metrics) if len({self.option_values(trial) for trial in trials}) > 1 else None

    def option_values(self, trial: Trial) -> tuple[str, ...]:
        """The values that a trial has of the options."""
        return tuple(str(trial.settings.get(option)) for option in self.options)

    @property
    def options_text(self) -> str:
        """The options for a sentence, in Markdown."""
        return " or ".join(f"`{option}`" for option in self.options)

    @property
    def headers(self) -> tuple[str, ...]:
        """The headers of a row: `Trial.place`, loss and options."""
        return ("data", "backbone", "loss", *self.options)


def outcome_table(comparison: MethodComparison, trials: Sequence[Trial], metrics: Sequence[str]) -> ReportTable:
    """A row per trial: its metrics, and how soon it reached them."""
    rows = [
        (
            (*trial.place, trial.loss, *comparison.option_values(trial)),
            (
                *(Cell(trial.mean(metric), trial.spread(metric), "-") for metric in metrics),
                *pace.pace(trial, metrics[0]),
            ),
        )
        for trial in sorted(trials, key=lambda t: (t.place, t.loss))
    ]
    columns = (*((tables.short(metric),) for metric in metrics), *pace.PACE_COLUMNS)
    return ReportTable("", "", comparison.headers, columns, tuple(rows), f"{comparison.note} {pace.LONGEST_WAIT_NOTE}")


def seconds_table(comparison: MethodComparison, trials: Sequence[Trial], metrics: Sequence[str]) -> ReportTable:
    """A row per trial: seconds of an epoch, and how many times those of softmax with the same computation they are."""
    found = {(trial.place, trial.loss, comparison.option_values(trial)[0]): trial for trial in trials}
    rows = []
    for (place, loss, computation), trial in found.items():
        # Softmax had no compiled form when these were run: a compiled loss is compared with the blocks of softmax.
        softmax = found.get((place, "softmax", computation)) or found.get((place, "softmax", "blocks"))
        seconds, softmax_seconds = (None if t is None else pace.epoch_seconds(t) for t in (trial, softmax))
        times = seconds / softmax_seconds if seconds is not None and softmax_seconds else None
        values = ((seconds, 1), (times, 2), (trial.mean(metrics[0]), 4))
        rows.append(
            ((*place, loss, computation), tuple(Cell(value, text="-", digits=digits) for value, digits in values))
        )
    columns = (("training s / epoch",), ("times softmax's",), (tables.short(metrics[0]),))
    return ReportTable("", "", comparison.headers, columns, tuple(rows), comparison.note)


METHOD_COMPARISONS = {
    "computation": MethodComparison(
        "Ways of computing",
        ("computation",),
        "Table: the scores of a batch as one table, sorted or searched over whole rows, and autograd, as the paper "
        "computes. Blocks: the heads, in plain torch. Compiled: the heads with their option of that name. One after "
        "the other on one core: on ml-1m two epochs each, on ml-100k until early stopping ends it. The metric only "
        "shows that the ways do the same.",
        seconds_table,
        figures.computed,
    ),
    "batches": MethodComparison(
        "Ways to make batches",
        ("batches", "lr"),
        "Pairs: each batch is of (user, item) pairs drawn from all, as in the paper. Chunks: a few pairs of a user "
        "stay together, so that a score row serves them all. Users: all pairs of a user are in one batch.",
        outcome_table,
    ),
    "positions": MethodComparison(
        "Ways to read histories",
        ("positions",),
        "All: every position of the latest items of a user. Windows: every position of the whole history, cut into "
        "windows. Prefix: a row for every position, with the items before it, as in the paper.",
        outcome_table,
    ),
    "lightgcn": MethodComparison(
        "LightGCN and the level of popularity",
        ("computation", "lr", "patience"),
        "Blocks and compiled: item vectors get all their gradients. Detached: those of positives alone, as where the "
        "table of item vectors is made outside the graph of gradients.",
        outcome_table,
    ),
    "log_z": MethodComparison(
        "NCE and its log partition",
        ("num_negatives", "log_z"),
        "A pair's logit is its score less log Z0 less log(k q), with q = 1 / C. None: log Z0 = log C, so that scores "
        "of 0 are normalised. 0: scores that must normalise themselves. log C - log k: scores alone, no correction. "
        "2 (log C - log k): log(k q) with the paper's sign.",
        outcome_table,
    ),
    "pointwise": MethodComparison(
        "NCE and binary cross entropy",
        ("num_negatives", "sampler"),
        "Bce: the mean over negatives where NCE has their sum, and no log(k q), as recommenders often compute it: the "
        "balance of positives and negatives, and so the result, hardly depends on the number of negatives.",
        outcome_table,
    ),
    "init": MethodComparison(
        "Ways to begin",
        ("init", "lr"),
        "Normal: standard deviation 0.02. Xavier: sqrt(2 / (rows + dim)), which is smaller where there are more rows.",
        outcome_table,
    ),
}
"""{name of the study in `results/study`: comparison}."""
