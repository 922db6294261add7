"""Ids on lists of their rows, and what rows with several positives leave out of their sums, against loops over rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from manymax.engine import exclude
from manymax.engine.exclude import on_lists, spare_positives

CLASSES, ROWS = 7, 300


@pytest.fixture(params=["marks", "search"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All classes are marked, in several rounds; or pairs are searched, as for very many classes."""
    monkeypatch.setattr(exclude, "MARKS", 10 * CLASSES)
    if request.param == "search":
        monkeypatch.setattr(exclude, "CLASSES_PER_ID", 0)


def some_ids(count: int, width: int, rng: torch.Generator) -> Tensor:
    """Ids of which some are none."""
    ids = torch.randint(-1, CLASSES, (count, width), generator=rng)
    return torch.where(ids < 0, -100, ids)


def test_ids_on_lists_of_their_rows(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randint(ROWS, (2 * ROWS,), generator=rng).sort().values  # some rows several times, some never
    ids, lists = some_ids(2 * ROWS, 4, rng), some_ids(ROWS, 3, rng)
    found = on_lists(ids, lists, CLASSES, rows)
    for n, row in enumerate(rows.tolist()):
        assert found[n].tolist() == [c >= 0 and c in lists[row].tolist() for c in ids[n].tolist()]
    assert torch.equal(on_lists(ids[:ROWS], lists, CLASSES), on_lists(ids[:ROWS], lists, CLASSES, torch.arange(ROWS)))


def test_positives_are_spared_also_where_they_are_listed_twice(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(CLASSES, (ROWS, 3), generator=rng)
    weights = torch.randint(2, (ROWS, 3), generator=rng)  # 0 fills up a row
    listed = some_ids(ROWS, 5, rng)
    left, hit = spare_positives(listed, SimpleNamespace(ids=ids, weights=weights), CLASSES)  # type: ignore[arg-type]
    for n in range(ROWS):
        positives = [c for c, w in zip(ids[n].tolist(), weights[n].tolist(), strict=True) if w]
        out = listed[n].tolist()
        assert left[n].tolist() == [-100 if c in positives else c for c in out]
        among = [bool(w) and len(positives) > 1 and c in out for c, w in zip(ids[n].tolist(), weights[n], strict=True)]
        assert hit[n].tolist() == among
