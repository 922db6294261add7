"""The losses to choose among, with settings that fit the data: the size of the model, the batches, what is searched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from manymax.errors import ArgumentError
from manymax.members import BASELINE
from manymax.study.data.interactions import Split
from manymax.study.report.labels import variant
from manymax.study.search import Search
from manymax.study.study_file import StudyConfig, parse_study, read_study_file, searches

CANDIDATES = "candidates.toml"  # a file of this package
SMALL_DATA = 20_000  # training pairs up to which a small model is taken
DIM, SMALL_DIM = 64, 32
LEAST_BATCH, MOST_BATCH = 128, 2048  # pairs of a batch
STEPS_OF_AN_EPOCH = 50  # with fewer steps, patience, which counts epochs, runs out before anything is learned


def name_of(search: Search) -> str:
    """What a candidate is called: its loss, with what makes another loss of it."""
    return variant(search.config({}).flat())


def is_baseline(search: Search) -> bool:
    """Whether this is the loss that others are compared with."""
    return name_of(search) == BASELINE.name


def settings_for(split: Split, data: Mapping[str, Any], metric: str, seed: int) -> dict[str, Any]:
    """The settings of every run: the data, and a model and batches that fit it.

    All pairs of a user are in one batch and share a row of scores. The loss is the same as that of single pairs, and a
    step costs a fraction.
    """
    pairs = split.train.items.numel()
    batch = LEAST_BATCH
    while batch < MOST_BATCH and 2 * batch * STEPS_OF_AN_EPOCH <= pairs:
        batch *= 2
    return {
        **data,
        "backbone": "mf",
        "dim": SMALL_DIM if pairs <= SMALL_DATA else DIM,
        "batches": "users",
        "batch_size": batch,
        "cutoffs": [_cutoff(metric)],
        "monitor": metric,
        "k": _cutoff(metric),
        "threads": 1,
        "seed": seed,
    }


def _cutoff(metric: str) -> int:
    name, at, cutoff = metric.partition("@")
    if not (name and at and cutoff.isdigit() and int(cutoff) > 0):
        raise ArgumentError(f"`--metric` must be a metric and a cutoff, such as ndcg@20; got {metric!r}.")
    return int(cutoff)


def read_candidates(file: Path | None) -> StudyConfig:
    """The [[search]] tables of a study file; of this package's own if `file` is None."""
    if file is None:
        return parse_study(resources.files(__package__) / CANDIDATES)
    content = read_study_file(file)
    if not content.search:
        raise ArgumentError(f"`--candidates` must be a file with [[search]] tables; {str(file)!r} has none.")
    return content


def candidates(content: StudyConfig, common: Mapping[str, Any], overrides: Mapping[str, Any]) -> list[Search]:
    """The searches of all candidates.

    Args:
        content: as `read_candidates` gives it; its own settings count more than `common`.
        common: as `settings_for` gives it.
        overrides: settings from the command line, which count more than both.
    """
    whole = content.model_copy(update={"settings": {**common, **content.settings}})
    found = searches(whole, **overrides)
    # The seeds of a search are counted from the first: the command's.
    seeded = [replace(search, settings={**search.settings, "seed": common["seed"]}) for search in found]
    names = [name_of(search) for search in seeded]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ArgumentError(f"`--candidates` has {twice[0]} twice: give one table for each loss.")
    return seeded


def unfit(found: Sequence[Search], num_items: int) -> Iterator[tuple[str, str]]:
    """(name, reason) of the candidates that have no place on data of this size."""
    for search in found:
        config = search.config(dict(search.first[0]) if search.first else {})
        drawn = config.sampler.num_negatives if config.member.kind == "sampled" else 0
        if drawn > num_items / 2:
            yield name_of(search), f"draws {drawn:,} of {num_items:,} items, and an exact loss takes all for less"
