"""Findings that are decided where the rows of users are, and kept where they are gone."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from manymax.errors import ManymaxError
from manymax.paper.findings import FINDINGS
from manymax.paper.findings_file import FINDINGS_FILE, UNTESTED, decide
from manymax.paper.reproduction import PAGE, RESULTS, page, read, write
from manymax.study.files import read_sealed, write_json, write_sealed
from manymax.study.record_files import read_all_runs, write_runs
from manymax.study.records import RECORD
from manymax.study.report.collect import collect
from tests.study.report.generated import write_run
from tests.study.report.small_study import ML1M, row, section


@pytest.mark.usefixtures("undrawn")
class TestFindings:
    def test_decided_where_the_users_are(self, root: Path) -> None:
        write(root, [root / "mine"])
        text = (root / PAGE).read_text(encoding="utf-8")
        claim = FINDINGS[1]
        assert row(text, "2", claim.claim)[2] == "**confirmed**"
        assert "- supports: ml-1m, mf: rankmax 0.30" in section(text, "### Finding 2")
        assert "Decided from 10 of the 10 finished runs" in text

    def test_kept_when_the_users_are_gone(self, root: Path) -> None:
        write(root, [root / "mine"])
        first = (root / PAGE).read_text(encoding="utf-8")
        os.rename(root / "mine", root / "gone")
        write(root)
        assert (root / PAGE).read_text(encoding="utf-8") == first

    def test_backbones_are_compared_on_two_forms_of_a_set(self, tmp_path: Path) -> None:
        for backbone, form in (("mf", "10core"), ("sasrec", "sequences")):
            for loss, quality in (("softmax", 0.4), ("sparsemax", 0.2 if backbone == "sasrec" else 0.3)):
                settings = {"data": f"electronics_{form}.parquet", "backbone": backbone}
                write_run(tmp_path / "mine", loss=loss, quality=quality, **settings)
        collect([tmp_path / "mine"], tmp_path / RESULTS / "q1.jsonl")
        (case,) = decide(read(tmp_path).done, [tmp_path / "mine"], {})["findings"]["4"]
        assert case["name"].startswith("electronics, sasrec, sparsemax, 7")  # per cent of softmax on mf
        assert case["supports"]

    @pytest.mark.usefixtures("undrawn")
    def test_a_share_that_has_changed_since_is_not_kept(self, tmp_path: Path) -> None:
        """Finding 4 compares a share with that on mf, where no test is needed."""
        (tmp_path / "docs").mkdir()
        for backbone, quality in (("mf", 0.3), ("sasrec", 0.2)):
            write_run(tmp_path / "mine", loss="softmax", backbone=backbone, quality=0.4, **ML1M)
            write_run(tmp_path / "mine", loss="sparsemax", backbone=backbone, quality=quality, **ML1M)
        collect([tmp_path / "mine"], tmp_path / RESULTS / "q1.jsonl")
        write(tmp_path, [tmp_path / "mine"])
        write_run(tmp_path / "more", loss="sparsemax", lr=5e-4, quality=0.39, **ML1M)
        collect([tmp_path / "more"], tmp_path / RESULTS / "q1.jsonl")
        before, after = (
            decide(read(tmp_path).done, [tmp_path / place], read(tmp_path).cases) for place in ("mine", "more")
        )
        assert [cases["findings"]["4"][0]["supports"] for cases in (before, after)] == [True, None]

    def test_a_later_run_of_the_same_settings_is_another(self, root: Path) -> None:
        for path in (root / "mine").rglob(RECORD):
            content = read_sealed(path)
            write_sealed(path, content | {"test": dict.fromkeys(content["test"], 0.9)})
        (case,) = decide(read(root).done, [root / "mine"], {})["findings"]["2"]
        assert (case["supports"], case["why"].partition(";")[2]) == (None, f" {UNTESTED}")

    def test_more_runs_when_the_users_of_the_first_are_gone(self, root: Path) -> None:
        """A worse run leaves a case as it was; a better one takes part in it, and cannot be tested against the old."""
        write(root, [root / "mine"])
        os.rename(root / "mine", root / "gone")
        for lr, quality, supports in ((5e-4, 0.2, True), (2e-3, 0.4, None)):
            write_run(root / "more", loss="softmax", lr=lr, quality=quality, **ML1M)
            collect([root / "more"], root / RESULTS / "q1.jsonl")
            write(root, [root / "more"])
            collected = read(root)
            (case,) = collected.cases[2]
            assert case.supports is supports
            assert case.why.endswith(UNTESTED) == (supports is None)
            assert collected.decided == {run.record.hash for run in collected.done}

    def test_what_was_said_of_a_run_does_not_hold_for_a_later_one(self, root: Path) -> None:
        write(root, [root / "mine"])
        file = root / RESULTS / "q1.jsonl"
        kept = {run.record.settings["loss"]["name"]: run for run in read_all_runs(file)}
        later = kept["rankmax"].record.model_copy(update={"test": kept["rankmax"].record.test | {"ndcg@20": 0.31}})
        others = [run for run in read_all_runs(file) if run.record.hash != later.hash]
        write_runs(file, [*others, replace(kept["rankmax"], record=later)])
        (case,) = decide(read(root).done, [], read(root).cases)["findings"]["2"]
        assert case["supports"] is None

    def test_that_rest_on_records_that_are_gone(self, root: Path) -> None:
        write(root, [root / "mine"])
        file = root / RESULTS / "q1.jsonl"
        write_runs(file, [run for run in read_all_runs(file) if run.record.settings["loss"]["name"] != "rankmax"])
        assert "- The findings rest on 1 runs that are no longer among the records." in page(read(root))

    def test_that_cannot_be_read(self, root: Path) -> None:
        write_json(root / RESULTS / FINDINGS_FILE, {"runs": [], "findings": {"1": [{"nonsense": 1}]}})
        with pytest.raises(ManymaxError, match="does not hold findings"):
            read(root)
