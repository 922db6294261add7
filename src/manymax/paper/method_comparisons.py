"""Studies that compare ways to do one thing. They stand apart: their runs are none of the paper's questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manymax.study.report import figures, pace, tables
from manymax.study.report.drawing import Figure
from manymax.study.report.formats import Cell, ReportTable
from manymax.study.report.trials import Trial


@dataclass(frozen=True)
class MethodComparison:
    """One of these studies.

    Args:
        title: of its section.
        options: the settings that are compared.
        note: what their values mean.
        make: the table of its trials and the metrics.
        draw: the figure of its trials, if it has one.
    """

    title: str
    options: tuple[str, ...]
    note: str
    make: Callable[[MethodComparison, Sequence[Trial], Sequence[str]], ReportTable]
    draw: Callable[[Sequence[Trial]], Figure] | None = None

    def table(self, here: Sequence[Trial], metrics: Sequence[str]) -> ReportTable | None:
        """None if nothing can be compared."""
        return self.make(self, here, metrics) if len({self.way(trial) for trial in here}) > 1 else None

    def way(self, trial: Trial) -> tuple[str, ...]:
        """The trial's values of the options."""
        return tuple(str(trial.settings.get(option)) for option in self.options)

    @property
    def options_text(self) -> str:
        """The options in a sentence."""
        return " or ".join(f"`{option}`" for option in self.options)

    @property
    def headers(self) -> tuple[str, ...]:
        """Of a row of `Trial.place`, loss and options."""
        return ("data", "backbone", "loss", *self.options)


def outcome(comparison: MethodComparison, here: Sequence[Trial], metrics: Sequence[str]) -> ReportTable:
    """Metrics and how soon they were reached."""
    rows = [
        (
            (*trial.place, trial.loss, *comparison.way(trial)),
            (
                *(Cell(trial.mean(metric), trial.spread(metric), "-") for metric in metrics),
                *pace.pace(trial, metrics[0]),
            ),
        )
        for trial in sorted(here, key=lambda t: (t.place, t.loss))
    ]
    columns = (*((tables.short(metric),) for metric in metrics), *pace.PACE_COLUMNS)
    return ReportTable("", "", comparison.headers, columns, tuple(rows), f"{comparison.note} {pace.LONGEST_WAIT_NOTE}")


def seconds(comparison: MethodComparison, here: Sequence[Trial], metrics: Sequence[str]) -> ReportTable:
    """Seconds of an epoch by each way of computing, and how many times softmax's by the same way they are."""
    found = {(trial.place, trial.loss, comparison.way(trial)[0]): trial for trial in here}
    rows = []
    for (place, loss, way), trial in found.items():
        # softmax has no compiled form: its blocks are what a compiled loss is compared with
        base = found.get((place, "softmax", way)) or found.get((place, "softmax", "blocks"))
        own, usual = (None if t is None else pace.epoch_seconds(t) for t in (trial, base))
        times = own / usual if own is not None and usual else None
        cells = (Cell(own, text="-", digits=1), Cell(times, text="-", digits=2), Cell(trial.mean(metrics[0]), text="-"))
        rows.append(((*place, loss, way), cells))
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
        seconds,
        figures.computed,
    ),
    "batches": MethodComparison(
        "Ways to make batches",
        ("batches", "lr"),
        "Pairs: each batch is of (user, item) pairs drawn from all, as in the paper. Chunks: a few pairs of a user "
        "stay together, so that a score row serves them all. Users: all pairs of a user are in one batch.",
        outcome,
    ),
    "positions": MethodComparison(
        "Ways to read histories",
        ("positions",),
        "All: every position of the latest items of a user. Windows: every position of the whole history, cut into "
        "windows. Prefix: a row for every position, with the items before it, as in the paper.",
        outcome,
    ),
    "lightgcn": MethodComparison(
        "LightGCN and the level of popularity",
        ("computation", "lr", "patience"),
        "Blocks and compiled: item vectors get all their gradients. Detached: those of positives alone, as where the "
        "table of item vectors is made outside the graph of gradients.",
        outcome,
    ),
    "log_z": MethodComparison(
        "NCE and its log partition",
        ("num_negatives", "log_z"),
        "A pair's logit is its score less log Z0 less log(k q), with q = 1 / C. None: log Z0 = log C, so that scores "
        "of 0 are normalised. 0: scores that must normalise themselves. log C - log k: scores alone, no correction. "
        "2 (log C - log k): log(k q) with the paper's sign.",
        outcome,
    ),
    "pointwise": MethodComparison(
        "NCE and binary cross entropy",
        ("num_negatives", "sampler"),
        "Bce: the mean over negatives where NCE has their sum, and no log(k q), as recommenders often compute it: the "
        "balance of positives and negatives, and so the result, hardly depends on the number of negatives.",
        outcome,
    ),
    "init": MethodComparison(
        "Ways to begin",
        ("init", "lr"),
        "Normal: standard deviation 0.02. Xavier: sqrt(2 / (rows + dim)), which is smaller where there are more rows.",
        outcome,
    ),
}
"""By the name of the study's folder."""
