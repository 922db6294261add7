"""Every variant of the model, and rows solved in one block or each in its own."""

from __future__ import annotations

from typing import Any

import pytest

from manymax.members.rg import interactions as interaction_rows
from tests.als.dense import VARIANTS


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> dict[str, Any]:
    return VARIANTS[request.param]


@pytest.fixture(params=["whole", "single rows"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Solve all rows in one block, where the longest row decides how, or each row in a block of its own."""
    if request.param == "single rows":
        monkeypatch.setattr(interaction_rows, "SHARED_BLOCK", 1)
        monkeypatch.setattr(interaction_rows, "SEPARATE_BLOCK", 1)
