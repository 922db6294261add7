"""Computations of other packages: listed by name, imported when a run asks for one, refused in words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import manymax
from manymax.engine.member import Member
from manymax.errors import ManymaxError, UnknownNameError
from manymax.heads import LinearHead
from manymax.members import FAMILY
from manymax.study.computations import computation_names, find_computation
from manymax.study.config import RunConfig

MODULE = """
from manymax.study.computations import Computation

class Head:
    def __init__(self, member, num_items):
        self.member, self.num_items = member.name, num_items

MINE = Computation("mine", lambda member: member.sparse, build=Head)
OTHER_NAME = Computation("yours", lambda member: True)
NO_COMPUTATION = 3
"""


def offer(folder: Path, package: str, *entries: str) -> Path:
    """A package as pip would install it into `folder`, with these entry points."""
    (folder / f"{package}.py").write_text(MODULE, encoding="utf-8")
    about = folder / f"{package}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text("\n".join(["[manymax.computations]", *entries]), encoding="utf-8")
    return folder


def test_the_paper_offers_two() -> None:
    """They are entry points of the installed package: install it again (`make study` does) where this fails."""
    assert computation_names()[:2] == ("blocks", "compiled")
    assert {"table", "detached"} <= set(computation_names())


def test_another_package_is_imported_when_a_run_asks_for_its_computation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(offer(tmp_path, "third_party", "mine = third_party:MINE"))
    assert "mine" in computation_names()
    RunConfig(loss="sparsemax", computation="compiled")
    assert "third_party" not in sys.modules
    config = RunConfig(loss="sparsemax", computation="mine")
    assert "third_party" in sys.modules
    assert config.nested()["machine"]["computation"] == "mine"
    build = find_computation("mine").build
    assert build is not None
    head: LinearHead = build(FAMILY["sparsemax"], 7)
    assert vars(head) == {"member": "sparsemax", "num_items": 7}
    with pytest.raises(ManymaxError, match="`computation='mine'` is for sparsemax, entmax, rankmax; got 'softmax'"):
        RunConfig(loss="softmax", computation="mine")


@pytest.mark.slow
def test_a_worker_knows_it_too(tmp_path: Path) -> None:
    offer(tmp_path, "third_party_2", "mine = third_party_2:MINE")
    script = (
        "import sys; from manymax.study.config import RunConfig; import manymax.cli.app as cli; cli.build_app(); "
        "assert 'third_party_2' not in sys.modules; print(RunConfig(loss='entmax', computation='mine').content_hash())"
    )
    source = Path(manymax.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(source), str(tmp_path)))}
    told = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert len(told.stdout.strip()) == 16


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("mine = nowhere_to_be_found:MINE", "cannot be loaded from nowhere_to_be_found:MINE: No module named"),
        ("mine = third_party_3:MISSING", "cannot be loaded from third_party_3:MISSING"),
        ("mine = third_party_3:OTHER_NAME", "must be a `Computation` with the name 'mine'"),
        ("mine = third_party_3:NO_COMPUTATION", "must be a `Computation` with the name 'mine'; it is 3"),
    ],
)
def test_what_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, complaint: str
) -> None:
    monkeypatch.syspath_prepend(offer(tmp_path, "third_party_3", entry))
    with pytest.raises(ManymaxError, match=complaint):
        find_computation("mine")
    sys.modules.pop("third_party_3", None)


def test_two_packages_with_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(tmp_path, "first_package", "mine = first_package:MINE")
    monkeypatch.syspath_prepend(offer(tmp_path, "second_package", "mine = second_package:MINE"))
    with pytest.raises(ManymaxError, match=r"'mine' is offered twice, as .*_package:MINE and as .*_package:MINE"):
        find_computation("mine")


def test_an_unknown_name_is_told_all_names_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(offer(tmp_path, "third_party_4", "mine = third_party_4:MINE"))
    with pytest.raises(UnknownNameError, match=r"unknown computation 'min': did you mean 'mine'\? Known: blocks, comp"):
        find_computation("min")
    assert "third_party_4" not in sys.modules


def test_only_exact_losses_have_the_option(tmp_path: Path) -> None:
    members: list[Member] = list(FAMILY.values())
    kept = [member.name for member in members if "computation" in RunConfig(loss=member.name).nested()["machine"]]
    assert kept == [member.name for member in members if member.kind == "exact"]
