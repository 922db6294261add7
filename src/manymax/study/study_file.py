"""Study files: a TOML file with settings and grids, and the list of runs that it stands for."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from manymax.errors import ArgumentError, unknown_name
from manymax.study.config import RunConfig
from manymax.study.data.load import PLANTED_NAME
from manymax.study.run_options import flattened
from manymax.study.search import Search, read_search

if sys.version_info >= (3, 11):
    from importlib.resources.abc import Traversable

    import tomllib
else:
    from importlib.abc import Traversable

    import tomli as tomllib

QUICK_STUDY = "quick.toml"  # the built-in study, a file of this package


class StudyConfig(BaseModel):
    """The content of a study file.

        title = "..."
        note = "..."        # for the readers of the page
        [settings]          # of every run
        epochs = 50
        [[grid]]            # every combination of the lists
        loss = ["softmax", "sparsemax"]
        lr = [1e-3, 1e-4]
        [[grid]]            # more runs, in addition to these
        loss = "rg"
        solver = "als"

        [[search]]          # trials of each of these losses, chosen on the validation part, then seeds of the best
        loss = ["softmax", "rankmax"]
        over = { lr = { low = 1e-3, high = 1e-1, log = true }, temperature = [0.1, 0.2, 0.5] }
        first = [{ lr = 0.1, temperature = 0.2 }]
        trials = 12
        seeds = 3

    Keys of `settings` and `grid` are those of `RunConfig`, flat or nested (`loss.name = "entmax"` and
    `loss.alpha = [1.2, 1.5]`). A setting that has no effect together with the others (the learning rate of ALS) is left
    out, and combinations that are then equal are run once.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str = Field("", description="The title of the study.")
    note: str = Field("", description="A sentence for the readers of its page, below the title.")
    settings: dict[str, Any] = Field({}, description="Settings of every run.")
    grid: list[dict[str, Any]] = Field([{}], description="Tables of settings; every combination of their lists is run.")
    search: list[dict[str, Any]] = Field([], description="Tables of settings and of ranges of settings to search.")

    def __init__(self, **content: Any) -> None:
        for name in content:
            if name not in type(self).model_fields:
                raise unknown_name("key of a study", name, type(self).model_fields)
        search = content.get("search", [])
        content["search"] = [search] if isinstance(search, Mapping) else search
        grid = content.get("grid", [] if content["search"] else [{}])
        content["grid"] = [grid] if isinstance(grid, Mapping) else grid  # [grid] in place of [[grid]]
        tables = [content.get("settings", {}), *content["grid"]]
        if not all(isinstance(table, Mapping) for table in tables):
            raise ArgumentError("`settings` and `grid` must be tables: [settings] and [[grid]].")
        content["settings"], *content["grid"] = map(flattened, tables)
        try:
            super().__init__(**content)
        except ValidationError as error:
            raise ArgumentError(" ".join(f"`{e['loc'][0]}`: {e['msg']}." for e in error.errors())) from None


def read_study_file(path: Path | None) -> StudyConfig:
    """Read a study from a TOML file; the built-in demonstration if `path` is None."""
    return parse_study(resources.files("manymax.study") / QUICK_STUDY if path is None else path)


def parse_study(source: Traversable) -> StudyConfig:
    """The content of a study file that lies anywhere, also inside of this package."""
    try:
        content = tomllib.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"the study file {source} cannot be read: {error}") from None
    return StudyConfig(**content)


def expand(study: StudyConfig, **overrides: Any) -> list[RunConfig]:
    """The runs of a study, each once, in the order of the file.

    A combination that only the overrides make impossible (another loss for a row that uses ALS) is left out with a
    warning. A combination that is impossible by itself is an error.

    Args:
        study: content of a study file.
        overrides: settings that replace those of the file in every run; every combination of lists among them is run.

    >>> grid = [{"loss": ["softmax", "rg"], "lr": [1e-2, 1e-3]}, {"loss": "rg", "solver": "als", "lr": [1e-2, 1e-3]}]
    >>> [(run.loss.name, run.training.solver) for run in expand(StudyConfig(grid=grid))][-2:]
    [('rg', 'gradient'), ('rg', 'als')]
    """
    every_override = list(_products(flattened(overrides)))
    runs: dict[str, RunConfig] = {}  # by hash: combinations that differ only in settings without effect are equal
    refused: list[ArgumentError] = []
    for settings, replaced in product(_combinations(study), every_override):
        try:
            config = _config(settings | replaced)
        except ArgumentError as error:
            for alone in (settings, replaced):  # raises an error if one of them is impossible by itself
                _config(alone)
            refused.append(error)
        else:
            runs[config.content_hash()] = config
    if refused and not runs:
        raise refused[0]
    if refused:
        text = (
            f"{len(refused)} of the file's combinations are not possible with the settings given beside the file and"
            f" are left out: {refused[0]}"
        )
        warnings.warn(text, stacklevel=2)
    return list(runs.values())


def searches(study: StudyConfig, **overrides: Any) -> list[Search]:
    """The searches of a study, in the order of the file.

    Args:
        study: content of a study file.
        overrides: settings beside the file, as `read_search` takes them, or lists of values.
    """
    given = flattened(overrides)
    every = list(_products(given))
    found = [search for table in study.search for each in every for search in read_search(table, _common(study), each)]
    for search in found:
        search.config(dict(search.first[0]) if search.first else {})  # an error in the settings now, not after others
    if study.search and not found and not study.grid:
        raise ArgumentError(f"no search of the file has {', '.join(f'{k}={v}' for k, v in given.items())}.")
    return found


def _common(study: StudyConfig) -> dict[str, Any]:
    # One thread per run unless the file says otherwise: the order of summation depends on the number of threads, and
    # results must not depend on how many runs share the machine.
    return {"threads": 1, **study.settings}


def _combinations(study: StudyConfig) -> Iterator[dict[str, Any]]:
    """The settings of each run, with those that may have no effect."""
    common = _common(study)
    for table in study.grid:
        yield from (common | each for each in _products(table))


def _products(table: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every combination of the lists of a table.

    >>> list(_products({"loss": "nce", "seed": [0, 1]}))
    [{'loss': 'nce', 'seed': 0}, {'loss': 'nce', 'seed': 1}]
    """
    axes = {name: values if isinstance(values, list) else [values] for name, values in table.items()}
    if empty := [name for name, values in axes.items() if not values]:
        raise ArgumentError(f"`{empty[0]}` in [[grid]] must list at least one value; got an empty list.")
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _config(settings: Mapping[str, Any]) -> RunConfig:
    if not PLANTED_NAME.fullmatch(str(settings.get("data", "planted"))):
        # A study of planted data can be run on other data by an override: the size then has no meaning.
        settings = {name: value for name, value in settings.items() if name != "size"}
    return RunConfig.trimmed(settings)
