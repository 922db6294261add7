"""Rows of the public table: the kept runs of each search, its best settings, and what they reach with each seed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from manymax.engine.member import Member
from manymax.study.groups import find_loss
from manymax.study.record_files import KEPT_SUFFIX, read_all_runs
from manymax.study.records import Record
from manymax.study.run_options import LATER_OPTIONS, flat
from manymax.study.search import Search
from manymax.study.study_file import read_study_file, searches

CONFIG, PUBLIC_RESULTS = Path("configs/public_topk.toml"), Path("results/public")
METRIC = "ndcg@20"


@dataclass(frozen=True)
class PublicRow:
    """One loss on one backbone and data set.

    trials: of the search, with the first seed.
    runs: of the best settings, one per seed.
    further: of all finalists, with the seeds after the first.
    """

    data: str
    backbone: str
    search: Search
    trials: tuple[Record, ...]
    runs: tuple[Record, ...]
    further: tuple[Record, ...] = ()

    @property
    def title(self) -> str:
        """What the row is called: its title in the study file, else that of its loss."""
        return self.search.title or str(self.search.row["loss"])

    @property
    def member(self) -> Member:
        """The entry of the loss."""
        return find_loss(str(self.search.row["loss"]))

    @property
    def best(self) -> Record | None:
        """The trial whose settings are the best in the mean of all seeds."""
        return self.runs[0] if self.runs else None

    @property
    def values(self) -> dict[str, Any]:
        """The best values of what was searched."""
        return {} if self.best is None else self.search.values(self.best)

    def per_seed(self, metric: str) -> list[float]:
        """A test metric of the best settings with each seed."""
        found = (run.test.get(metric) for run in self.runs)
        return [value for value in found if value is not None]

    def mean(self, metric: str = METRIC) -> float | None:
        """Its mean over the seeds."""
        values = self.per_seed(metric)
        return fmean(values) if values else None

    def spread(self, metric: str = METRIC) -> float | None:
        """Its standard deviation over the seeds; None for one seed."""
        values = self.per_seed(metric)
        return stdev(values) if len(values) > 1 else None

    @property
    def epoch_seconds(self) -> float | None:
        """Seconds of training in an epoch, the mean over the runs of the best settings."""
        found = [run.seconds["training"] / run.epochs for run in self.runs if run.epochs and "training" in run.seconds]
        return fmean(found) if found else None


def published() -> dict[str, Any]:
    """What the authors of the splits print."""
    text = (resources.files("manymax.paper.public") / "published.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def read_rows(root: Path) -> list[PublicRow]:
    """The rows of which there are kept runs, by data set in the order of the publication and then as in the file.

    Args:
        root: the top folder of a checkout.
    """
    study, found = read_study_file(root / CONFIG), []
    for data in published()["data"]:
        path = root / PUBLIC_RESULTS / f"{data}{KEPT_SUFFIX}"
        if not path.exists():
            continue
        records = [run.record for run in read_all_runs(path)]
        flats = [{**LATER_OPTIONS, **flat(record.settings)} for record in records]
        for search in searches(study, data=f"{data}.parquet"):
            own = [record for record, each in zip(records, flats, strict=True) if belongs(search, each)]
            if own:
                found.append(_row(data, search, own))
    return found


def belongs(search: Search, settings: Mapping[str, Any]) -> bool:
    """Whether a run with these settings is one of a search."""
    return all(settings.get(name) == value for name, value in search.row.items() if name != "data")


def _row(data: str, search: Search, records: Iterable[Record]) -> PublicRow:
    first = int(search.settings.get("seed", 0))
    by_seed: dict[int, list[Record]] = {}
    for record in records:
        by_seed.setdefault(int(flat(record.settings)["seed"]), []).append(record)
    further = [record for seed, each in sorted(by_seed.items()) if seed != first for record in each]
    trials = tuple(by_seed.get(first, ()))
    runs = search.chosen(trials, further)
    return PublicRow(data, str(search.row["backbone"]), search, trials, runs, tuple(further))


def by_place(rows: Sequence[PublicRow]) -> dict[tuple[str, str], list[PublicRow]]:
    """{(data, backbone): rows}."""
    places: dict[tuple[str, str], list[PublicRow]] = {}
    for row in rows:
        places.setdefault((row.data, row.backbone), []).append(row)
    return places
