"""The figures of the report, made from the trials of a study."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from manymax.members import BASELINE, FAMILY
from manymax.study.report.answer import Answer
from manymax.study.report.drawing import NEUTRAL, Figure, Line, Panel
from manymax.study.report.tables import points, short, sortable
from manymax.study.report.trials import Trial, at_best_rates, metrics, natural_sort_key, shown

HEAT_MAP_DECADES = 6  # powers of ten between the largest value of a heat map and the last colour
FRONTIER = "nothing is both faster and better"
PLANTED_DATA = "planted"  # generated data, whose best possible ranking is known


def curves(trials: Sequence[Trial], column: str, unit: str) -> Figure:
    """The validation metric during training, one panel per data set and backbone.

    Args:
        trials: of the study.
        column: what the x axis shows: "epoch" or "seconds_train", a column of the curves.
        unit: its label.
    """
    names = metrics(trials)
    panels, without, variants = [], set(), _variants(trials)
    for place, own in _by_place(_shown(trials)).items():
        drawn = [trial for trial in own if names[0] in trial.curve and column in trial.curve]
        without |= {trial.label for trial in own if trial not in drawn}
        lines = tuple(
            Line(t.label, t.curve[column].tolist(), t.curve[names[0]].tolist(), t.loss, variants[t.label])
            for t in drawn
        )
        if lines:
            panels.append(Panel(", ".join(place), unit, f"validation {short(names[0])}", lines))
    note = "Each method has the learning rate that is best for it on the validation part; means over seeds."
    missing = f" No curve was recorded for {', '.join(sorted(without))}." if without else ""
    return Figure(f"curves_{column}", f"Validation against {unit}", f"{note}{missing}", tuple(panels))


def computed(trials: Sequence[Trial]) -> Figure:
    """The validation metric against training seconds, by the way of computing.

    Only trials are drawn that early stopping ended: the others would have gone on.
    """
    ended = [trial for trial in trials if all(run.record.epochs < run.settings["epochs"] for run in trial.runs)]
    drawn = curves(ended, "seconds_train", "training seconds")
    note = (
        "A colour is a loss, a kind of dashes a way of computing. All ways take the same steps; only the time differs."
    )
    panels = tuple(replace(panel, log_x=True) for panel in drawn.panels)
    return Figure("computation", "Validation against training seconds, by the way of computing", note, panels)


def _by_place(trials: Iterable[Trial]) -> dict[tuple[str, str], list[Trial]]:
    """{(data, backbone): trials}."""
    places: dict[tuple[str, str], list[Trial]] = defaultdict(list)
    for trial in trials:
        places[trial.place].append(trial)
    return places


def _variants(trials: Iterable[Trial]) -> dict[str, int]:
    """{label: its number among the labels of its loss}, which share a colour and differ in dashes in all panels."""
    by_loss: dict[str, set[str]] = defaultdict(set)
    for trial in trials:
        by_loss[trial.loss].add(trial.label)
    return {
        label: index for labels in by_loss.values() for index, label in enumerate(sorted(labels, key=natural_sort_key))
    }


def sweep(trials: Sequence[Trial], setting: str, fixed: dict[str, Any], title: str) -> Figure:
    """The test metric of sampled losses against a setting; the arguments are those of `tables.sweep`."""
    names = metrics(trials)
    panels: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for (data, backbone, label), line in points(trials, setting, fixed).items():
        values = sorted(line, key=sortable)
        means = [line[value].mean(names[0]) or float("nan") for value in values]
        spreads = [line[value].spread(names[0]) or 0.0 for value in values]
        lines = panels[data, backbone]
        loss = line[values[0]].loss
        variant = sum(other.loss == loss for other in lines)
        ordered = all(isinstance(value, int) for value in values)
        lines.append(Line(label, values, means, loss, variant, spreads if any(spreads) else None, joined=ordered))
    finished = [
        Panel(", ".join(place), setting, f"test {short(names[0])}", tuple(lines), log_x=setting == "num_negatives")
        for place, lines in panels.items()
    ]
    several = any(line.spread for panel in finished for line in panel.lines)
    note = "Means and standard deviations over seeds." if several else "One seed."
    return Figure(f"sweep_{setting}", title, note, tuple(finished))


def growth(trials: Sequence[Trial]) -> Figure:
    """Regret against the number of training interactions, on planted data, whose best possible ranking is known."""
    lines: dict[tuple[str, str, str], dict[int, Trial]] = defaultdict(dict)
    regret = next((name for name in metrics(trials) if name.startswith("regret")), None)
    for trial in _at_best_rates(trials) if regret else []:
        size = trial.runs[0].record.sizes.get("train")
        if regret in trial.runs[0].record.test and size:
            lines[_growing_place(trial), trial.label, trial.loss][size] = trial
    panels: dict[str, list[Line]] = defaultdict(list)
    for (place, label, loss), line in lines.items():
        if len(line) > 1 and regret:
            sizes = sorted(line)
            values = [line[size].mean(regret) or float("nan") for size in sizes]
            spreads = [line[size].spread(regret) or 0.0 for size in sizes]
            variant = sum(other.loss == loss for other in panels[place])
            panels[place].append(Line(label, sizes, values, loss, variant, spreads if any(spreads) else None))
    finished = [
        Panel(place, "training interactions", short(regret or ""), tuple(group), log_x=True, log_y=True)
        for place, group in panels.items()
    ]
    note = (
        "Regret: the share of the expected DCG of the Bayes ranking, the best possible one, that a ranking misses; 0 is"
        " the best."
    )
    return Figure("growth", "Towards the Bayes ranking as data grows", note, tuple(finished))


def _growing_place(trial: Trial) -> str:
    """The title of the panel of a trial: what stays the same as data grows, its backbone, users and items.

    Planted data has a size of the form USERSxITEMSxMEAN, or a name.
    """
    size = str(trial.settings.get("size") or trial.settings["data"]).removeprefix(f"{PLANTED_DATA}-")
    users, sign, items = size.rpartition("x")[0].partition("x")
    return f"{trial.backbone}, {users} users, {items} items" if sign else f"{trial.backbone}, {size}"


def trade_off(answers: Iterable[Answer]) -> Figure:
    """Quality against training seconds: a panel per answer, in it a point per loss and the frontier of the best."""
    panels = tuple(panel for answer in answers if (panel := _trade_off(answer)) is not None)
    note = (
        "Up and to the left is better. Each point is a loss with its 95 % interval; the grey line joins those that"
        " nothing is both faster and better than. Seconds can be compared if each run had a core to itself."
    )
    return Figure("trade_off", "Quality against time", note, panels)


def _trade_off(answer: Answer) -> Panel | None:
    """The panel of one answer: by how many per cent each loss is better than softmax, or than the winner without it.

    Intervals are those of the differences, which are taken in pairs: users differ from one another by much more than
    losses do, and intervals of the plain means would hide every difference.
    """
    reference = answer.baseline or answer.winner
    intervals = {each: each.behind if answer.baseline is None else each.gain for each in answer.contenders}
    losses = Counter(each.trial.loss for each in answer.contenders)
    lines, values = [], {}
    for each, interval in intervals.items():
        if not each.seconds or (interval is None and each is not reference):
            continue
        values[each] = 0.0 if interval is None else interval.value
        spread = [(interval.high - interval.low) / 2] if interval is not None and interval.known else None
        # Names are short where that is enough: they stand beside points.
        told = each.trial.loss == BASELINE.name or losses[each.trial.loss] > 1
        name = each.loss if told else each.trial.loss
        lines.append(Line(name, [each.seconds], [values[each]], each.trial.loss, spread=spread, joined=False))
    if not lines:
        return None
    frontier = [each for each in answer.frontier if each in values]
    if len(frontier) > 1:
        seconds = [each.seconds or 0.0 for each in frontier]
        lines.insert(0, Line(FRONTIER, seconds, [values[each] for each in frontier], NEUTRAL, markers=False))
    y_label = f"test {short(answer.metric)}, % over {reference.loss}"
    title = f"{answer.data}, {answer.backbone}"
    return Panel(title, "training seconds, early stopping included", y_label, tuple(lines), log_x=True, labelled=True)


def heat_maps(trials: Sequence[Trial], what: str) -> Figure:
    """Heat maps of "gradients" or of the "jacobian", one panel per loss.

    They are those of the data set and backbone for which most losses were measured.
    """
    places = _by_place(trial for trial in _at_best_rates(trials) if trial.runs[0].probe.get(what))
    place, own = max(places.items(), key=lambda item: len(item[1]), default=(("", ""), []))
    labels = {
        "gradients": ("rank of the item", "test user", "Gradients of the loss in the scores"),
        "jacobian": ("item by score", "item by score", "Jacobians of the map for one test user"),
    }
    x_label, y_label, title = labels[what]
    found = [(trial, tuple(map(tuple, trial.runs[0].probe[what]))) for trial in own]
    largest = max((abs(value) for _, values in found for row in values for value in row), default=0.0)
    decades = (math.log10(largest) - HEAT_MAP_DECADES, math.log10(largest)) if 0 < largest < math.inf else None
    panels = tuple(
        Panel(_heat_title(trial, what), _binned(trial, x_label, values), y_label, values=values, decades=decades)
        for trial, values in found
    )
    note = (
        f"Absolute values at trained models on {', '.join(place)}, items by score from left to right. Black: exactly 0."
    )
    return Figure(what, title, note, panels)


def _binned(trial: Trial, label: str, values: Sequence[Sequence[float]]) -> str:
    """The label of the x axis; it says how many bins there are if a column of the heat map holds several ranks."""
    columns, items = len(values[0]) if values else 0, trial.runs[0].record.sizes.get("items", 0)
    return f"{label}: {items:,} in {columns} bins" if label.startswith("rank") and columns < items else label


def _heat_title(trial: Trial, what: str) -> str:
    share = trial.runs[0].probe.get("zero_share")
    return trial.label if what != "gradients" or share is None else f"{trial.label}: {share:.0%} of negatives at 0"


def _at_best_rates(trials: Sequence[Trial]) -> list[Trial]:
    """The trials with the learning rate that is best on the validation part; none where no run has a metric."""
    names = metrics(trials)
    return at_best_rates(trials, names[0]) if names else []


def _shown(trials: Sequence[Trial]) -> list[Trial]:
    names = metrics(trials)
    return shown(trials, names[0]) if names else []


def bias_variance(trials: Sequence[Trial]) -> Figure:
    """Predicted and measured bias and variance of the sampled losses against k."""
    panels = []
    for trial in _at_best_rates(trials):
        rows = trial.runs[0].probe.get("approximations")
        if trial.loss == BASELINE.name and rows:
            panels += [_predicted_and_measured(trial, rows, what) for what in ("bias", "variance")]
    note = (
        f"On the scores of models trained with {BASELINE.name}, with a uniform proposal; means over test users. "
        "Lines with error bars: measured by Monte Carlo; dashes: predicted by the Delta method. What does not depend "
        "on the scores, and so has no gradient, is subtracted."
    )
    return Figure("bias_variance", "Bias and variance, predicted and measured", note, tuple(panels))


def _predicted_and_measured(trial: Trial, rows: Sequence[dict[str, Any]], what: str) -> Panel:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["member"], row["correction"] or ""].append(row)
    measured = {member for member, _ in groups}
    unused = (name for name in reversed([*FAMILY]) if name not in measured)
    seen: set[str] = set()
    lines: list[Line] = []
    for (member, correction), group in groups.items():
        # A member with several corrections needs a colour for each: those after the first borrow the colour of a
        # member that is not drawn here.
        loss = member if member not in seen else next(unused, member)
        seen.add(member)
        name = f"{member} {correction}".strip()
        ks = [row["num_negatives"] for row in group]
        errors = [row[f"measured_{what}_error"] for row in group]
        lines.append(Line(name, ks, [row[f"measured_{what}"] for row in group], loss, 0, errors))
        lines.append(Line(f"{name}, predicted", ks, [row[f"predicted_{what}"] for row in group], loss, 1))
    title = f"{', '.join(trial.place)}: {what}"
    return Panel(title, "num_negatives", what, tuple(lines), log_x=True, log_y=what == "variance")
