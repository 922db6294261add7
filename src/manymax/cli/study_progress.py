"""How far a study is: the runs that are under way, those that have ended, and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from statistics import fmean

from rich.console import Console
from rich.live import Live
from rich.text import Text

from manymax.cli.console import open_console, say
from manymax.study.checkpoint import read_training_state
from manymax.study.config import RunConfig
from manymax.study.engines import Job
from manymax.study.plain_text import in_one_line
from manymax.study.records import CHECKPOINT, Record
from manymax.study.report.answer import seconds_text
from manymax.study.report.labels import VARIANT_SETTINGS, run_labels, setting_text, variant
from manymax.study.run_options import flat, options
from manymax.study.search import Searches
from manymax.study.sweep import Outcome

VIEW_SECONDS = 2.0  # between two updates of the lines about runs under way: each reads all their checkpoints
FIRST_LINE_SECONDS, LINE_SECONDS = 5.0, 30.0  # when such lines are printed where no terminal can update them


class RunNames:
    """What the runs of a study are called in its lines: data, backbone, loss, all that tells them apart, and the seed.

    Args:
        configs: the runs that are known from the beginning.
        searched: names of settings whose values tell all other runs apart, those of searches; if left out, those of
            their settings that differ from the default.
    """

    def __init__(self, configs: Iterable[RunConfig] = (), searched: Iterable[str] = ()) -> None:
        known = [(config, config.flat()) for config in configs]
        labels = run_labels([settings for _, settings in known])
        rates: dict[str, set[float]] = {}
        for (_, settings), label in zip(known, labels, strict=True):
            rates.setdefault(label, set()).add(settings["lr"])
        self.names = {
            config.content_hash(): f"{_place(config)} {label}"
            + (f" lr={setting_text(settings['lr'])}" if len(rates[label]) > 1 else "")
            + f" seed {config.seed}"
            for (config, settings), label in zip(known, labels, strict=True)
        }
        self.searched = list(dict.fromkeys(searched))

    def of(self, config: RunConfig) -> str:
        """The name of a run."""
        if (known := self.names.get(config.content_hash())) is not None:
            return known
        settings, unused = config.flat(), config.unused()
        shown = self.searched or _unusual(config)
        values = [f"{name}={setting_text(settings[name])}" for name in shown if name not in unused]
        return " ".join([_place(config), variant(settings), *values, f"seed {config.seed}"])


def _unusual(config: RunConfig) -> list[str]:
    """The names of the settings of loss, scores and training that differ from their default."""
    settings = config.flat()
    return [
        option.name
        for option in options()
        if option.group in ("loss", "scores", "sampler", "training")
        and option.name not in (option.group, "epochs", "patience", *VARIANT_SETTINGS)
        and settings.get(option.name, option.default) != option.default
    ]


def _place(config: RunConfig) -> str:
    return f"{config.data.title} {config.backbone.name}"


class StudyProgress:
    """View of a study, a line per run that is under way: in a terminal it moves, elsewhere it is printed now and then.

    How far a run is comes from its checkpoint, which this process can read whichever machine does the run.
    """

    def __init__(self, names: RunNames | None = None, console: Console | None = None) -> None:
        self.names = names or RunNames()
        self.console = console or open_console(stderr=True)
        self.live = Live(Text(""), console=self.console, auto_refresh=False, transient=True)
        self.next = time.monotonic() + (0.0 if self.console.is_terminal else FIRST_LINE_SECONDS)

    def __enter__(self) -> StudyProgress:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def __call__(self, jobs: Sequence[Job]) -> None:
        """Update or print the lines; a call too soon after the last one does nothing."""
        if time.monotonic() < self.next or not jobs:
            return
        lines = Text("\n".join(in_one_line(self._line(job)) for job in jobs), no_wrap=True, overflow="ellipsis")
        if self.console.is_terminal:
            self.live.update(lines, refresh=True)
        else:
            self.console.print(lines, soft_wrap=True)
        self.next = time.monotonic() + (VIEW_SECONDS if self.console.is_terminal else LINE_SECONDS)

    def _line(self, job: Job) -> str:
        """How far a run is, in one line."""
        config, state = job.config, read_training_state(job.folder / CHECKPOINT)
        name = self.names.of(config)
        if state is None:
            return f"{name}: under way"
        best = f"  best {config.monitored} {state.best_value:.4f}" if state.best_value is not None else ""
        return f"{name}: epoch {state.epoch + 1}/{config.training.epochs}{best}"


class EndedRuns:
    """Prints a line on stderr about each run that has ended, with the time that is left.

    Args:
        names: of the runs.
        configs: the runs that are known from the beginning.
        searching: the searches of the study.
        slots: how many runs are done at a time.
    """

    def __init__(self, names: RunNames, configs: Sequence[RunConfig], searching: Searches, slots: int) -> None:
        self.names, self.searching, self.slots = names, searching, slots
        self.configs = {config.content_hash(): config.loss.name for config in configs}

    def __call__(self, outcome: Outcome, record: Record) -> None:
        """Print the line of a run."""
        done, config = len(outcome.records), RunConfig(**record.settings)
        value = record.test.get(config.monitored)
        done_well = record.status == "done" and value is not None
        result = f"{config.monitored} {value:.4f}" if done_well else f"{record.status}: {record.reason}"
        name = self.names.of(config)
        if (owner := self.searching.owner(record)) is not None:
            reached = owner.search.value(record)
            of = f"trial {len(owner.trials)}/{owner.search.trials}" if not owner.seeds else "further seed"
            valid = "" if reached is None else f", {reached:.4f} on validation"
            name, result = f"{name}, {of}", f"{result}{valid}, {record.epochs} epochs"
        left = f"  about {seconds_text(self.left(outcome.records))} left" if done < outcome.total else ""
        say(f"[{done}/{outcome.total}] {name}: {result}{left}", err=True)

    def left(self, records: Sequence[Record]) -> float:
        """Seconds until all runs have ended: each takes as long as those of its loss that have, or as all that have."""
        by_loss: dict[str, list[float]] = {}
        for record in records:
            if record.seconds:
                by_loss.setdefault(flat(record.settings)["loss"], []).append(sum(record.seconds.values()))
        every = fmean(seconds for each in by_loss.values() for seconds in each) if by_loss else 0.0
        ended = {record.hash for record in records}
        losses = [loss for name, loss in self.configs.items() if name not in ended]
        for each in self.searching.all:
            missing = each.search.runs - len(each.trials) - len(each.seeds)
            losses += [each.search.config({}).loss.name] * missing
        spent = sum(fmean(by_loss[loss]) if loss in by_loss else every for loss in losses)
        return spent / max(1, self.slots)
