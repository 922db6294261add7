"""The figures of the report."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from manymax.members import BASELINE, FAMILY
from manymax.study.report.drawing import Figure, Line, Panel
from manymax.study.report.runs import Trial, chosen, direction, metrics, natural
from manymax.study.report.tables import points, short, sortable

DECADES = 6  # that the colours of a heat map reach down from the largest value
GROWS = "planted"  # data whose Bayes ranking is known


def curves(trials: Sequence[Trial], column: str, unit: str) -> Figure:
    """The validation metric against `column` of the epochs, one panel a data set and backbone."""
    names = metrics(trials)
    panels, without, variants = [], set(), _variants(trials)
    for place, here in _by_place(_chosen(trials)).items():
        drawn = [trial for trial in here if names[0] in trial.curve and column in trial.curve]
        without |= {trial.label for trial in here if trial not in drawn}
        lines = tuple(
            Line(t.label, t.curve[column].tolist(), t.curve[names[0]].tolist(), t.loss, variants[t.label])
            for t in drawn
        )
        if lines:
            panels.append(Panel(", ".join(place), unit, f"validation {short(names[0])}", lines))
    note = "Each at the learning rate that is best on the validation part; means over seeds."
    missing = f" No curve was recorded for {', '.join(sorted(without))}." if without else ""
    return Figure(f"curves_{column}", f"Validation against {unit}", f"{note}{missing}", tuple(panels))


def computed(trials: Sequence[Trial]) -> Figure:
    """The validation metric against training seconds by each way of computing, where early stopping ended training."""
    ended = [trial for trial in trials if all(run.record.epochs < run.settings["epochs"] for run in trial.runs)]
    drawn = curves(ended, "seconds_train", "training seconds")
    note = "Each loss has a colour, each way of computing its dashes. The ways take the same steps; the time differs."
    panels = tuple(replace(panel, log_x=True) for panel in drawn.panels)
    return Figure("computation", "Validation against training seconds, by the way of computing", note, panels)


def _by_place(trials: Iterable[Trial]) -> dict[tuple[str, str], list[Trial]]:
    places: dict[tuple[str, str], list[Trial]] = defaultdict(list)
    for trial in trials:
        places[trial.place].append(trial)
    return places


def _variants(trials: Iterable[Trial]) -> dict[str, int]:
    """Number the labels of each loss: they share its colour and differ in dashes, alike in all panels."""
    by_loss: dict[str, set[str]] = defaultdict(set)
    for trial in trials:
        by_loss[trial.loss].add(trial.label)
    return {label: index for labels in by_loss.values() for index, label in enumerate(sorted(labels, key=natural))}


def sweep(trials: Sequence[Trial], setting: str, fixed: dict[str, Any], title: str) -> Figure:
    """The test metric of sampled losses against a setting."""
    names = metrics(trials)
    panels: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for (data, backbone, label), line in points(trials, setting, fixed).items():
        values = sorted(line, key=sortable)
        means = [line[value].mean(names[0]) or float("nan") for value in values]
        spreads = [line[value].spread(names[0]) or 0.0 for value in values]
        here = panels[data, backbone]
        loss = line[values[0]].loss
        variant = sum(other.loss == loss for other in here)
        ordered = all(isinstance(value, int) for value in values)
        here.append(Line(label, values, means, loss, variant, spreads if any(spreads) else None, joined=ordered))
    made = [
        Panel(", ".join(place), setting, f"test {short(names[0])}", tuple(lines), log_x=setting == "num_negatives")
        for place, lines in panels.items()
    ]
    several = any(line.spread for panel in made for line in panel.lines)
    note = "Means and standard deviations over seeds." if several else "One seed."
    return Figure(f"sweep_{setting}", title, note, tuple(made))


def growth(trials: Sequence[Trial]) -> Figure:
    """How far from the Bayes ranking, against the number of training interactions, on data whose law is known."""
    lines: dict[tuple[str, str, str], dict[int, Trial]] = defaultdict(dict)
    regret = next((name for name in metrics(trials) if name.startswith("regret")), None)
    for trial in _chosen(trials) if regret else []:
        size = trial.runs[0].record.sizes.get("train")
        if regret in trial.runs[0].record.test and size:
            lines[_world(trial), trial.label, trial.loss][size] = trial
    panels: dict[str, list[Line]] = defaultdict(list)
    for (world, label, loss), line in lines.items():
        if len(line) > 1 and regret:
            sizes = sorted(line)
            values = [line[size].mean(regret) or float("nan") for size in sizes]
            spreads = [line[size].spread(regret) or 0.0 for size in sizes]
            variant = sum(other.loss == loss for other in panels[world])
            panels[world].append(Line(label, sizes, values, loss, variant, spreads if any(spreads) else None))
    made = [
        Panel(world, "training interactions", short(regret or ""), tuple(of), log_x=True, log_y=True)
        for world, of in panels.items()
    ]
    note = "Regret: the share of the Bayes ranking's expected DCG that is lost; 0 is the best that any ranking can do."
    return Figure("growth", "Towards the Bayes ranking as data grows", note, tuple(made))


def _world(trial: Trial) -> str:
    """What stays as data grows: the backbone, the users and the items; sizes are USERSxITEMSxMEAN, or names."""
    size = str(trial.settings.get("size") or trial.settings["data"]).removeprefix(f"{GROWS}-")
    users, sign, items = size.rpartition("x")[0].partition("x")
    return f"{trial.backbone}, {users} users, {items} items" if sign else f"{trial.backbone}, {size}"


def trade_off(trials: Sequence[Trial]) -> Figure:
    """Test metric against training seconds, one point a method."""
    names, variants = metrics(trials), _variants(trials)
    panels = []
    for place, here in _by_place(_chosen(trials)).items():
        lines = []
        for trial in here:
            seconds, value = trial.average(lambda r: r.seconds.get("training")), trial.mean(names[0])
            if seconds and value is not None:
                lines.append(Line(trial.label, [seconds], [value], trial.loss, variants[trial.label], joined=False))
        if lines:
            x_label = "training seconds, early stopping included"
            panels.append(Panel(", ".join(place), x_label, f"test {short(names[0])}", tuple(lines), log_x=True))
    where = "Down" if names and direction(names[0]) < 0 else "Up"
    note = f"{where} and to the left is better. Seconds compare fairly where the runs had the machine to themselves."
    return Figure("trade_off", "What a result costs", note, tuple(panels))


def heat_maps(trials: Sequence[Trial], what: str) -> Figure:
    """`what` of the probes, "gradients" or "jacobian", one panel a loss, where most losses have been probed."""
    places = _by_place(trial for trial in _chosen(trials) if trial.runs[0].probe.get(what))
    place, here = max(places.items(), key=lambda item: len(item[1]), default=(("", ""), []))
    labels = {
        "gradients": ("rank of the item", "test user", "Gradients of the loss in the scores"),
        "jacobian": ("item by score", "item by score", "Jacobians of the map for one test user"),
    }
    x_label, y_label, title = labels[what]
    found = [(trial, tuple(map(tuple, trial.runs[0].probe[what]))) for trial in here]
    largest = max((abs(value) for _, values in found for row in values for value in row), default=0.0)
    decades = (math.log10(largest) - DECADES, math.log10(largest)) if 0 < largest < math.inf else None
    panels = tuple(
        Panel(_heat_title(trial, what), _binned(trial, x_label, values), y_label, values=values, decades=decades)
        for trial, values in found
    )
    note = f"Sizes at trained models on {', '.join(place)}, best score first. Black: exactly 0, no signal."
    return Figure(what, title, note, panels)


def _binned(trial: Trial, label: str, values: Sequence[Sequence[float]]) -> str:
    """The label of an axis of ranks, where a column holds several of them."""
    columns, items = len(values[0]) if values else 0, trial.runs[0].record.sizes.get("items", 0)
    return f"{label}: {items:,} in {columns} bins" if label.startswith("rank") and columns < items else label


def _heat_title(trial: Trial, what: str) -> str:
    share = trial.runs[0].probe.get("zero_share")
    return trial.label if what != "gradients" or share is None else f"{trial.label}: {share:.0%} of negatives at 0"


def _chosen(trials: Sequence[Trial]) -> list[Trial]:
    names = metrics(trials)
    return chosen(trials, names[0]) if names else []


def bias_variance(trials: Sequence[Trial]) -> Figure:
    """Predicted and measured bias and variance of the sampled losses against k."""
    panels = []
    for trial in _chosen(trials):
        rows = trial.runs[0].probe.get("approximations")
        if trial.loss == BASELINE.name and rows:
            panels += [_predicted_and_measured(trial, rows, what) for what in ("bias", "variance")]
    note = (
        f"At the scores of models trained with {BASELINE.name}, uniform proposal, means over test users. "
        "Lines with error bars: measured by draws; dashes: the Delta method. Offsets that no gradient sees are taken "
        "off."
    )
    return Figure("bias_variance", "Bias and variance, predicted and measured", note, tuple(panels))


def _predicted_and_measured(trial: Trial, rows: Sequence[dict[str, Any]], what: str) -> Panel:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["member"], row["correction"] or ""].append(row)
    measured = {member for member, _ in groups}
    spare = (name for name in reversed([*FAMILY]) if name not in measured)
    taken: set[str] = set()
    lines: list[Line] = []
    for (member, correction), points_of in groups.items():
        # Forms of one member need colours of their own: those after the first have that of a member not drawn here.
        loss = member if member not in taken else next(spare, member)
        taken.add(member)
        name = f"{member} {correction}".strip()
        ks = [row["num_negatives"] for row in points_of]
        errors = [row[f"measured_{what}_error"] for row in points_of]
        lines.append(Line(name, ks, [row[f"measured_{what}"] for row in points_of], loss, 0, errors))
        lines.append(Line(f"{name}, predicted", ks, [row[f"predicted_{what}"] for row in points_of], loss, 1))
    title = f"{', '.join(trial.place)}: {what}"
    return Panel(title, "num_negatives", what, tuple(lines), log_x=True, log_y=what == "variance")
