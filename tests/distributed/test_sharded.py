"""Class-sharded heads against the heads on one machine, for 1 to 4 ranks: value and every gradient to 1e-10."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import jobs
from tests.distributed.pool import Pool

RANKS = [1, 2, 3, 4]
EXACT: list[tuple[str, dict[str, Any]]] = [
    ("Softmax", {}),
    ("Sparsemax", {}),
    ("Entmax", {"alpha": 1.0}),
    ("Entmax", {"alpha": 1.1}),
    ("Entmax", {"alpha": 1.5}),
    ("Entmax", {"alpha": 1.8}),
    ("Rankmax", {}),
    ("TaylorSoftmax", {"order": 2}),
    ("TaylorSoftmax", {"order": 6}),
    ("RG", {}),
]
KINDS = ("ids", "padded ids", "bool rows", "float rows")
SAMPLED: list[tuple[str, dict[str, Any]]] = [
    ("SampledSoftmax", {}),
    ("SampledSoftmax", {"correction": "none"}),
    ("NCE", {"learnable": True, "log_z": 0.3}),
]


def members(rows: list[tuple[str, dict[str, Any]]]) -> Any:
    ids = ["-".join([name, *map(str, setting.values())]) for name, setting in rows]
    return pytest.mark.parametrize(("name", "setting"), rows, ids=ids)


@members(EXACT)
def test_every_option(pool: Pool, name: str, setting: dict[str, Any]) -> None:
    for ranks in RANKS:
        for kind in KINDS:
            if kind == "float rows" and name == "Rankmax":
                continue
            tried = pool.run(ranks, jobs.every_option, name, kind, setting)
            assert tried == [12 if name == "Rankmax" else 24] * ranks


@members(EXACT)
def test_supports_of_all_sizes(pool: Pool, name: str, setting: dict[str, Any]) -> None:
    for ranks in (2, 4):
        pool.run(ranks, jobs.supports, name, setting)


@members(EXACT)
def test_a_support_on_one_rank(pool: Pool, name: str, setting: dict[str, Any]) -> None:
    for ranks in (2, 3):
        pool.run(ranks, jobs.one_rank_has_it_all, name, setting)


@members(EXACT + SAMPLED)
def test_grouped_and_empty_targets(pool: Pool, name: str, setting: dict[str, Any]) -> None:
    for ranks in (1, 3):
        pool.run(ranks, jobs.grouped_and_empty, name, setting)


def test_learned_alpha(pool: Pool) -> None:
    for ranks in RANKS:
        pool.run(ranks, jobs.learned_alpha)
