"""The losses of a study on one data set and backbone, each at the settings that are best on the validation part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from manymax.members import BASELINE
from manymax.study.report.intervals import Interval, difference
from manymax.study.report.labels import DATA_SETTINGS, STOPPING_SETTINGS, Settings, setting_text, variant
from manymax.study.report.runs import Run
from manymax.study.report.significance import SIGNIFICANCE_LEVEL, holm
from manymax.study.report.trials import Trial, chosen, direction, validation_merit
from manymax.study.run_options import by_flat_name


@dataclass(frozen=True, eq=False)
class Contender:
    """A loss with the settings that are best for it on the validation part.

    trial: its runs, which differ in the seed.
    metric: what decides.
    tuned: the settings beside the learning rate that were tried with several values.
    gain: how many per cent it is better than softmax on the test part; None for softmax itself and without softmax.
    behind: how many per cent it is better than the winner, as a rule below 0; None for the winner.
    p: of no difference to the winner, by Holm's correction for all that are compared with it; None if not known.
    """

    trial: Trial
    metric: str
    tuned: tuple[str, ...] = ()
    gain: Interval | None = None
    behind: Interval | None = None
    p: float | None = None

    @property
    def loss(self) -> str:
        """Its name, with what makes another loss of it: solver, proposal of negatives, what its sums leave out."""
        return variant(self.trial.settings)

    @property
    def is_baseline(self) -> bool:
        """Whether others are compared with it: softmax as it is."""
        return self.loss == BASELINE.name

    @property
    def chosen_settings(self) -> dict[str, Any]:
        """Its learning rate and the settings that were tried with several values, as far as they have an effect."""
        rate = {} if self.trial.lr is None else {"lr": self.trial.lr}
        with_effect = by_flat_name(self.trial.runs[0].record.settings)  # the temperature has none beside inner products
        known = {name: with_effect.get(name) for name in self.tuned}
        return rate | {name: each for name, each in known.items() if each is not None}

    @property
    def settings_text(self) -> str:
        """The chosen settings in words: "lr=0.01 temperature=0.2"."""
        return " ".join(f"{name}={setting_text(value)}" for name, value in self.chosen_settings.items())

    @property
    def valid(self) -> float | None:
        """The mean over seeds of the metric on the validation part."""
        return self.trial.mean(self.metric, "valid")

    @property
    def test(self) -> float | None:
        """The mean over seeds of the metric on the test part."""
        return self.trial.mean(self.metric)

    @property
    def seconds(self) -> float | None:
        """Seconds of training, early stopping included; the mean over seeds."""
        return self.trial.average(lambda record: record.seconds.get("training"))

    @property
    def memory_mb(self) -> float | None:
        """What training took, beside data and model, of the memory of the process; None in older records."""
        return self.trial.average(lambda record: record.training_memory_mb)

    @property
    def peak_memory_mb(self) -> float | None:
        """The largest amount of memory of the process; the mean over seeds."""
        return self.trial.average(lambda record: record.peak_memory_mb)

    @property
    def model(self) -> Run:
        """The run, of those with different seeds, that is best on the validation part."""
        sign = direction(self.metric)
        return max(self.trial.runs, key=lambda run: sign * (run.record.valid.get(self.metric) or 0.0))

    @property
    def tied(self) -> bool:
        """Whether the difference to the winner may be chance; False where nothing tells (`p` is None)."""
        return self.p is not None and self.p >= SIGNIFICANCE_LEVEL


def contenders(own: Sequence[Trial], metric: str) -> tuple[Contender, ...]:
    """The losses of the trials of one data set and backbone, best on the validation part first."""
    ranked = sorted(chosen(own, metric), key=lambda trial: -validation_merit(trial, metric))
    ranked = [trial for trial in ranked if trial.mean(metric, "valid") is not None]
    baseline = next((trial for trial in ranked if variant(trial.settings) == BASELINE.name), None)
    behind = [difference(trial, ranked[0], metric) for trial in ranked[1:]]
    tested = [each for each in behind if each is not None and each.known]
    corrected = dict(zip(map(id, tested), holm([each.p for each in tested]), strict=True))
    return tuple(
        Contender(
            trial,
            metric,
            _tuned([other.settings for other in own if variant(other.settings) == variant(trial.settings)]),
            gain=None if baseline is None or trial is baseline else difference(trial, baseline, metric),
            behind=each,
            p=corrected.get(id(each)),
        )
        for trial, each in zip(ranked, [None, *behind], strict=bool(ranked))
    )


def _tuned(tried: Sequence[Settings]) -> tuple[str, ...]:
    """The settings but for learning rate and seed that have several values."""
    names = dict.fromkeys(name for settings in tried for name in settings)
    others = [name for name in names if name not in ("lr", "seed", "name", *DATA_SETTINGS, *STOPPING_SETTINGS)]
    return tuple(name for name in others if len({repr(settings.get(name)) for settings in tried}) > 1)
