"""A training in which classes are ruled out by small integers ends where one that scores all of them does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from manymax.engine import filter as engine_filter
from manymax.engine import native_library
from manymax.engine.filter import Filter
from manymax.members.entmax import filter as entmax_filter
from manymax.study.config import RunConfig
from manymax.study.run import run

LEVELS = [level for level in native_library.levels_here() if native_library.find_level(level).products]


@pytest.mark.slow
@pytest.mark.skipif(not LEVELS, reason="no level here has products of its own")
def test_twenty_epochs_end_at_the_same_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used, candidates = [], Filter.candidates

    def counted(self: Filter, *given: Any) -> Any:
        used.append(candidates(self, *given))
        return used[-1]

    monkeypatch.setattr(Filter, "candidates", counted)
    monkeypatch.setattr(engine_filter, "WORTH_ROWS", 32)
    monkeypatch.setattr(entmax_filter, "FEW", 6)
    monkeypatch.setattr(engine_filter, "MOST_BYTES", 100)
    values = []
    for name, classes in (("with", 1024), ("without", 1 << 40)):
        monkeypatch.setattr(engine_filter, "WORTH_CLASSES", classes)
        config = RunConfig(
            size="300x2500x15", epochs=20, eval_every=20, batches="users", loss="sparsemax", lr=0.01, seed=0
        )
        run(config, tmp_path / name)
        values.append(json.loads((tmp_path / name / "record.json").read_text(encoding="utf-8"))["valid"])
    assert sum(found is not None for found in used) > 20, "the filter was used in many steps"
    assert values[0] == pytest.approx(values[1], abs=1e-3)
