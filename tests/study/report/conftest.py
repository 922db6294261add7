"""A checkout with the records of a small study, for tests of the page that is made of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from manymax.paper import reproduction
from manymax.paper.reproduction import RESULTS
from manymax.study.report.collect import collect
from tests.study.report.small_study import originals


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    (folder / "docs").mkdir()
    collect([originals(folder / "mine")], folder / RESULTS / "q1.jsonl")
    return folder


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    """A checkout of one's own: docs, collected records, and the original runs in `mine`."""
    return Path(shutil.copytree(template, tmp_path / "root"))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without figures, which take seconds."""
    monkeypatch.setattr(reproduction, "drawings", lambda _: [])
