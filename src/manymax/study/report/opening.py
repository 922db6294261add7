"""The first screen of the page: the answer, what was the same in all runs, and what the study cannot tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from manymax.members import BASELINE
from manymax.study.report.answer import Answer
from manymax.study.report.figures import trade_off
from manymax.study.report.labels import setting_text
from manymax.study.report.runs import Study
from manymax.study.report.trials import Trial
from manymax.study.run_options import options

# Settings that a reader wants to know also where they have their default.
ALWAYS_SHOWN = ("data", "backbone", "dim", "batch_size", "epochs", "patience")
NEVER_SHOWN = ("seed", "name", "threads", "loss", "eval_every")
SHOWN_CAUTIONS = 3  # that are not folded away: the first are the gravest


@dataclass(frozen=True)
class Headline:
    """An answer in the words of the page.

    title: data and backbone. loss: the loss to use.
    gain: "+3.1 %", or empty where there is nothing to say. of: what the gain is of.
    sentence: what follows it. rows: (name, text) of further facts.
    cautions, folded: what the study cannot tell; the latter are shown after a click.
    chart: the key of its panel; None where there is none.
    """

    title: str
    loss: str
    gain: str
    of: str
    sentence: str
    rows: tuple[tuple[str, str], ...]
    cautions: tuple[str, ...]
    folded: tuple[str, ...]
    chart: str | None


def headlines(answers: Sequence[Answer]) -> list[Headline]:
    """The answers of a study in the words of the page."""
    figure = trade_off(answers)
    charts = {panel.title: f"{figure.name}-{index}" for index, panel in enumerate(figure.panels)}
    return [_headline(answer, charts.get(f"{answer.data}, {answer.backbone}")) for answer in answers]


def _headline(answer: Answer, chart: str | None) -> Headline:
    winner, gain = answer.winner, answer.winner.gain
    told = [each.text for each in answer.cautions]
    rows = {
        "Settings": winner.settings_text or "as all others",
        "Tied with it": answer.tied_text(),
        "Much faster": answer.quicker_text(),
        "Cost": answer.cost_text(),
        "Measured on": f"{answer.sample()}; loss and settings were chosen on the validation part",
    }
    return Headline(
        title=f"{answer.data} · {answer.backbone}",
        loss=winner.loss,
        gain="" if gain is None else f"{gain.value:+.1f} %",
        of=f"{answer.metric.upper()} over {BASELINE.name}",
        sentence=_sentence(answer),
        rows=tuple((name, text) for name, text in rows.items() if text),
        cautions=tuple(told[:SHOWN_CAUTIONS]),
        folded=tuple(told[SHOWN_CAUTIONS:]),
        chart=chart,
    )


def _sentence(answer: Answer) -> str:
    winner, gain = answer.winner, answer.winner.gain
    value = "" if winner.test is None else f"{answer.metric.upper()} {winner.test:.4f} on the test part"
    if answer.baseline is None:
        return f"{value}; {BASELINE.name} is not in the study."
    if winner is answer.baseline:
        alone = len(answer.contenders) == 1
        return f"{value}; {'no other loss was run' if alone else 'no other loss is better on the validation part'}."
    if gain is None or not gain.known:
        return f"{value}; how sure the difference is, is not known."
    chance = " The difference may be chance." if gain.low <= 0 <= gain.high else ""
    return f"95 % interval {gain.low:+.1f} to {gain.high:+.1f} %; {value}.{chance}"


def common_settings(study: Study, made: Sequence[Trial]) -> list[tuple[str, str]]:
    """The settings that are the same in all finished runs, as (name, value): the important and the unusual ones."""
    runs = study.done
    if not runs:
        return []
    defaults = {option.name: option.default for option in options()}
    found: list[tuple[str, str]] = []
    for name in dict.fromkeys((*ALWAYS_SHOWN, *defaults)):
        values = {repr(run.settings.get(name)) for run in runs}
        value = runs[0].settings.get(name)
        unusual = _plain(value) != _plain(defaults.get(name))
        if len(values) == 1 and name not in NEVER_SHOWN and value is not None and (unusual or name in ALWAYS_SHOWN):
            found.append((name, setting_text(value)))
    if len({trial.data for trial in made}) == 1:
        found[1:1] = [
            (name, f"{count:,}") for name, count in runs[0].record.sizes.items() if name in ("users", "items")
        ]
    seeds = sorted({run.settings["seed"] for run in runs})
    return [*found, ("seeds" if len(seeds) > 1 else "seed", ", ".join(map(str, seeds)))]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
