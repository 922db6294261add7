"""What is left out of the sums of rows with several positives, against loops over rows."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from manymax.engine.exclude import spare_positives

CLASSES, ROWS = 7, 300


def test_positives_are_spared_also_where_they_are_listed_twice(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(CLASSES, (ROWS, 3), generator=rng)
    weights = torch.randint(2, (ROWS, 3), generator=rng)  # 0 fills up a row
    listed = torch.randint(-1, CLASSES, (ROWS, 5), generator=rng)
    listed[listed < 0] = -100
    left, hit = spare_positives(listed, SimpleNamespace(ids=ids, weights=weights), CLASSES)  # type: ignore[arg-type]
    for n in range(ROWS):
        positives = [c for c, w in zip(ids[n].tolist(), weights[n].tolist(), strict=True) if w]
        out = listed[n].tolist()
        assert left[n].tolist() == [-100 if c in positives else c for c in out]
        among = [bool(w) and len(positives) > 1 and c in out for c, w in zip(ids[n].tolist(), weights[n], strict=True)]
        assert hit[n].tolist() == among
