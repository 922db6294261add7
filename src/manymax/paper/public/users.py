"""Differences between rows with intervals over users and seeds, from sums that are kept in place of the users.

For every data set and backbone `users.json` holds, of the metric of each test user averaged over the seeds, the
covariance of any two rows over the users, and the mean of each row with each seed. With U users and S seeds

    var(mean difference) = var_users / U + var_seeds / S

The users of a test are a sample, and so are the seeds. The first term holds a share of what the seeds do to single
users, so that the interval is rather too wide. Degrees of freedom are those of Welch and Satterthwaite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from manymax.errors import ManymaxError
from manymax.paper.findings_file import folders_with_users
from manymax.paper.public.rows import METRIC, PUBLIC_RESULTS, PublicRow, by_place
from manymax.study.files import read_json
from manymax.study.records import USER_METRICS, Record, kept_file, read_table
from manymax.study.report.runs import identity

USERS_FILE = "users.json"
LEVEL = 0.95
COVARIANCE_DIGITS = 6  # significant digits of a covariance


@dataclass(frozen=True)
class Difference:
    """The difference of two rows as a share of the second, with the ends of its interval."""

    share: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """ "above" or "below" where the interval leaves out 0, else "level"."""
        return "above" if self.low > 0 else "below" if self.high < 0 else "level"

    def __str__(self) -> str:
        return f"{self.share:+.1%} ({self.low:+.1%} to {self.high:+.1%})"


def measure(rows: Sequence[PublicRow], originals: Sequence[Path], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `users.json` from the folders of the original runs; a place without them is kept as it was.

    Args:
        rows: of the page.
        originals: folders with run folders.
        earlier: the content before.
    """
    folders = folders_with_users(originals)
    found: dict[str, Any] = {key: dict(value) for key, value in earlier.items()}
    for (data, backbone), here in by_place(rows).items():
        known = [row for row in here if row.runs and all(run_identity(run) in folders for run in row.runs)]
        if not known:
            continue
        tables = [[_users(folders[run_identity(run)]) for run in row.runs] for row in known]
        ids = tables[0][0][0]
        if any(not np.array_equal(ids, each) for row in tables for each, _ in row):
            raise ManymaxError(f"runs on {data} were tested on different users: they cannot be compared user by user.")
        means = np.stack([np.mean([values for _, values in row], axis=0) for row in tables])
        found.setdefault(data, {})[backbone] = {
            "users": len(ids),
            "rows": {
                row.title: {
                    "runs": [run_identity(run) for run in row.runs],
                    "means": [float(values.mean()) for _, values in table],
                }
                for row, table in zip(known, tables, strict=True)
            },
            "covariance": [
                [float(f"{v:.{COVARIANCE_DIGITS}g}") for v in line] for line in np.atleast_2d(np.cov(means))
            ],
        }
    return found


def _rounded(table: Any) -> list[list[float]]:
    return [[float(f"{value:.{COVARIANCE_DIGITS}g}") for value in line] for line in table]


def run_identity(run: Record) -> str:
    """Tells a run from others, and from another run of the same settings."""
    return identity(run.hash, run.test)


def _users(folder: Path) -> tuple[Any, Any]:
    table = read_table(kept_file(folder, USER_METRICS))
    return table["user"].to_numpy(), table[METRIC].to_numpy().astype(float)


def read_users(root: Path) -> dict[str, Any]:
    """The content of `users.json`; empty without the file."""
    path = root / PUBLIC_RESULTS / USERS_FILE
    return dict(read_json(path)) if path.exists() else {}


def difference(users: Mapping[str, Any], one: PublicRow, other: PublicRow) -> Difference | None:
    """The difference of two rows of one place; None where the users of their runs were not measured."""
    place = users.get(one.data, {}).get(one.backbone)
    if place is None or not all(_known(place, row) for row in (one, other)):
        return None
    titles = list(place["rows"])
    i, j = titles.index(one.title), titles.index(other.title)
    ours, theirs = (np.array(place["rows"][row.title]["means"]) for row in (one, other))
    covariance = np.array(place["covariance"])
    variance = covariance[i, i] + covariance[j, j] - 2 * covariance[i, j]
    common = min(len(ours), len(theirs))
    half = half_width(float(variance), place["users"], (ours[:common] - theirs[:common]).tolist())
    mean, base = float(ours.mean() - theirs.mean()), float(theirs.mean())
    return Difference(mean / base, (mean - half) / base, (mean + half) / base)


def _known(place: Mapping[str, Any], row: PublicRow) -> bool:
    kept = place["rows"].get(row.title)
    return kept is not None and kept["runs"] == [run_identity(run) for run in row.runs]


def half_width(variance: float, users: int, by_seed: Sequence[float]) -> float:
    """Half of the width of the interval of a mean difference.

    Args:
        variance: over users, of the difference averaged over seeds.
        users: U.
        by_seed: the mean difference with each seed.

    >>> round(half_width(4.0, 400, [0.0]), 4)  # users alone: 1.966 times 2 / 20
    0.1966
    """
    from scipy import stats  # type: ignore[import-untyped]  # imported here: it takes a second

    of_users, seeds = variance / users, len(by_seed)
    of_seeds = float(np.var(by_seed, ddof=1)) / seeds if seeds > 1 else 0.0
    total = of_users + of_seeds
    if total == 0:
        return 0.0
    freedom = total**2 / (of_users**2 / (users - 1) + (of_seeds**2 / (seeds - 1) if seeds > 1 else 0))
    return float(stats.t.ppf((1 + LEVEL) / 2, freedom)) * math.sqrt(total)
