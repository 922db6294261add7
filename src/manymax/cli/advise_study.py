"""`manymax advise --study`: the losses of a finished study by measured quality, with their cost at any size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from manymax import advisor
from manymax.errors import ArgumentError
from manymax.members import FAMILY
from manymax.samplers import SAMPLERS
from manymax.study.report.answer import Answer
from manymax.study.report.runs import Run, read_study
from manymax.study.report.trials import Trial, at_best_rates, chosen, metrics, trials, validation_merit
from manymax.study.trials import has_rules
from manymax.theory.cost import predict_seconds

OVERNIGHT = 12 * 3600.0  # seconds
EQUAL_QUALITY = 0.01  # share of the best value within which losses count as equally good


@dataclass(frozen=True)
class MeasuredLoss:
    """A loss of a study at its best learning rate, or as a search has chosen it.

    data, backbone, loss: what was trained; `loss` with the settings that tell it from the others.
    valid, test: means over seeds of the metric that ranks.
    runs: the number of seeds.
    step_seconds: predicted time of a step at the size asked for; None for a loss whose cost is not modelled.
    equal: whether it is within `EQUAL_QUALITY` of the best.
    """

    data: str
    backbone: str
    loss: str
    valid: float | None
    test: float | None
    runs: int
    step_seconds: float | None
    equal: bool


def of_study(folder: Path, advice: advisor.Advice) -> tuple[str, list[MeasuredLoss]]:
    """The metric of a study, and its losses, the best first, for each data set and backbone.

    Losses within `EQUAL_QUALITY` of the best on the validation part are equal, and among them the shorter step comes
    first; the others follow by quality.

    Args:
        folder: of the study.
        advice: for the size asked for; times of steps come from its situation and machine.
    """
    made = trials(read_study(folder).done)
    if not made:
        raise ArgumentError(f"`--study` must be the folder of a study with finished runs; {folder} has none.")
    metric = metrics(made)[0]
    best = _without_trials(at_best_rates(made, metric), chosen(made, metric))
    places = list(dict.fromkeys(trial.place for trial in best))
    return metric, [loss for place in places for loss in _of_place(best, place, metric, advice)]


def _without_trials(best: Sequence[Trial], chosen: Sequence[Trial]) -> list[Trial]:
    """Of each loss that was searched only what was chosen: its trials are no losses to choose among."""
    return [trial for trial in best if trial in chosen or not any(_is_searched(run) for run in trial.runs)]


def _is_searched(run: Run) -> bool:
    return run.folder is not None and has_rules(run.folder)


def _of_place(
    best: Sequence[Trial], place: tuple[str, str], metric: str, advice: advisor.Advice
) -> Iterator[MeasuredLoss]:
    here = [trial for trial in best if trial.place == place]
    top = max(validation_merit(trial, metric) for trial in here)
    found = []
    for trial in here:
        merit = validation_merit(trial, metric)
        equal = merit >= top - EQUAL_QUALITY * abs(top)
        seconds = _step_seconds(trial, advice)
        order = (not equal, (float("inf") if seconds is None else seconds) if equal else -merit)
        valid, test = trial.mean(metric, "valid"), trial.mean(metric)
        found.append((order, MeasuredLoss(*place, trial.label, valid, test, len(trial.runs), seconds, equal)))
    yield from (loss for _, loss in sorted(found, key=lambda pair: pair[0]))


def _step_seconds(trial: Trial, advice: advisor.Advice) -> float | None:
    """Predicted seconds of a step of this loss, with the settings that it had in the study."""
    if trial.loss not in FAMILY or trial.lr is None:
        return None
    member, settings = FAMILY[trial.loss], trial.settings
    if member.kind != "sampled":
        # The advisor has found out how many classes a sparse map takes.
        choices = (*advice.ranked, *advice.rejected)
        return next(choice.step_seconds for choice in choices if choice.member == member.name)
    situation, sampler = advice.situation, SAMPLERS[settings["sampler"]]
    # 0 stands for all of the batch, whose rows share it; of a pool to choose from every class is scored.
    chosen_from_pool = any(setting.public_name == "pool" for setting in sampler.settings)
    shape = situation.shape(
        num_negatives=int(settings["num_negatives"]) or max(1, situation.batch - 1),
        num_candidates=int(settings["pool"]) if chosen_from_pool else 0,
    )
    shape = replace(shape, shared=bool(settings["shared"]) or sampler.limited_by_batch)
    return predict_seconds(member.name, shape, advice.machine)


def items_of(folder: Path) -> int:
    """The number of items of a study; the largest, if it has several data sets."""
    return max((run.record.sizes.get("items", 0) for run in read_study(folder).done), default=0)


def ranked_by(metric: str, folder: Path, items: int, advice: advisor.Advice) -> str:
    """What the ranking is by, for above the table."""
    return (
        f"Ranked by {metric} on the validation part, measured in {folder} with {items:,} items; losses within"
        f" {EQUAL_QUALITY:.0%} of the best are equal, and among them the shorter step comes first. Steps are predicted"
        f" for {advice.situation.num_classes:,} classes, {advice.situation.batch:,} rows and {advice.situation.dim}"
        " dimensions. Quality at another number of items is not known."
    )


def as_dicts(losses: Sequence[MeasuredLoss]) -> list[dict[str, object]]:
    """The losses as dictionaries, for JSON."""
    return [asdict(loss) for loss in losses]


def duration(seconds: float) -> str:
    """A time in the unit that keeps the number short: ms, s, min or h.

    >>> duration(0.0123), duration(75.0), duration(7200.0)
    ('12.3 ms', '75 s', '2 h')
    """
    for unit, size in (("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= 2 * size or (unit == "s" and seconds >= 1):
            return f"{seconds / size:.3g} {unit}"
    return f"{1e3 * seconds:.3g} ms"


def when_grown(answer: Answer, factor: int) -> str:
    """What to use where there are `factor` times as many items, in a sentence.

    Quality is what was measured. The time is predicted: that of as many steps as the training took here. The best loss
    is taken whose training then takes no longer than `OVERNIGHT`.
    """
    trial = answer.winner.trial
    sizes, settings = trial.runs[0].record.sizes, trial.settings
    items, users = factor * sizes.get("items", 0), max(1, sizes.get("users", 0))
    positives = max(1.0, sizes.get("train", 0) / users)
    together = positives if settings["batches"] == "users" else 1.0
    rows = max(1, round(settings["batch_size"] / together))
    names = {each.trial.loss for each in answer.contenders} & {*FAMILY}
    exact = [FAMILY[name] for name in names if FAMILY[name].kind != "sampled"]
    advice = advisor.advise(items, dim=settings["dim"], batch=rows, positives=positives, members=exact)
    hours = []  # in the order of quality
    for each in answer.contenders:
        if (step := _step_seconds(each.trial, advice)) is not None:
            steps = sum(run.record.epochs for run in each.trial.runs) / len(each.trial.runs)
            hours.append((each, step, step * steps * sizes.get("train", 0) / settings["batch_size"]))
    if not hours:
        return f"at {items:,} items: not known, as the cost of these losses is not modelled"
    fitting = [row for row in hours if row[2] <= OVERNIGHT] or [min(hours, key=lambda row: row[2])]
    best, step, seconds = fitting[0]
    still = " still" if best is answer.winner else ""
    loss = "" if best.behind is None else f", {best.behind.value:+.1f} % against {answer.winner.loss} here"
    told = (
        f"at {items:,} items: {best.loss}{still}{loss}; about {duration(seconds)} of training, {duration(step)} a step"
    )
    quickest, _, shortest = min(hours, key=lambda row: row[2])
    if quickest is not best and quickest.behind is not None:
        told += f". {quickest.loss} would take {duration(shortest)} ({quickest.behind.value:+.1f} % here)"
    if answer.winner not in [each for each, _, _ in hours]:
        told += f". What {answer.winner.loss} would take is not modelled"
    return told
