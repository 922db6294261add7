"""What is kept of runs: the committed files, and how the runs of a folder are added to a file."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manymax.cli.app import app
from manymax.cli.docs import planted_page, planted_runs
from manymax.errors import ArgumentError, ManymaxError
from manymax.paper.reproduction import RESULTS, read
from manymax.study.files import read_json, read_sealed, write_json, write_sealed
from manymax.study.record_files import read_all_runs, to_line, write_runs
from manymax.study.records import EPOCHS, RECORD, read_table
from manymax.study.report.collect import collect, portable
from manymax.study.report.runs import read_study
from tests.study.report.generated import write_run
from tests.study.report.small_study import ML1M, originals

ROOT = Path(__file__).parents[3]
KEPT = sorted((ROOT / "results").rglob("*.jsonl"))
OLD_STUDY = ROOT / "tests" / "fixtures" / "v0_1_0" / "study"


class TestCommitted:
    def test_the_index_lists_every_file_with_its_number_of_runs(self) -> None:
        index = {entry["file"]: entry for entry in read_json(ROOT / "results" / "index.json")}
        files = {path.relative_to(ROOT / "results").as_posix() for path in (ROOT / "results").rglob("*.*")}
        assert set(index) == files - {"index.json", "README.md"}
        counts = {path.relative_to(ROOT / "results").as_posix(): len(read_all_runs(path)) for path in KEPT}
        assert {file: entry["runs"] for file, entry in index.items() if "runs" in entry} == counts
        assert sum(counts.values()) >= 390

    def test_the_index_names_a_command_and_a_page_that_is_there(self) -> None:
        for entry in read_json(ROOT / "results" / "index.json"):
            assert re.match(r"manymax |python benchmarks/", entry["made_by"]), entry
            assert entry["read_by"] is None or (ROOT / entry["read_by"]).is_file(), entry

    def test_there_are_few_files(self) -> None:
        assert sum(path.is_file() for path in (ROOT / "results").rglob("*")) <= 60

    @pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
    def test_lines_are_small_sorted_and_name_no_folder(self, path: Path) -> None:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert max(map(len, lines)) < 200_000
        assert not re.search(r'"(/|[A-Z]:\\|~)', "".join(lines))
        runs = read_all_runs(path)
        assert [run.record.hash for run in runs] == sorted(run.record.hash for run in runs)
        assert lines == [to_line(run) for run in runs], "writing the file again would change it"

    def test_the_example_of_the_readme_runs(self, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
        monkeypatch.chdir(ROOT)
        text = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
        (example,) = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
        assert len([line for line in example.splitlines() if line]) <= 5
        exec(example, {})
        assert "'ndcg@20': 0.3" in capsys.readouterr().out

    def test_records_are_no_part_of_a_distribution(self) -> None:
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        included = re.search(r"^\[tool\.hatch\.build\.targets\.sdist\]\ninclude = (\[.*?\])$", project, re.M | re.S)
        packages = re.search(r"^\[tool\.hatch\.build\.targets\.wheel\]\npackages = (\[.*?\])$", project, re.M | re.S)
        assert included is not None
        assert packages is not None
        patterns = ast.literal_eval(included[1])
        assert "/src" in patterns
        # Without a slash in front a pattern matches in every folder, "README.md" that of results/ too.
        assert [pattern for pattern in patterns if not pattern.startswith("/")] == []
        assert not [pattern for pattern in patterns if pattern.startswith("/results")]
        assert ast.literal_eval(packages[1]) == ["src/manymax"]


class TestCollect:
    def test_only_outcomes_and_curves_of_ended_runs(self, tmp_path: Path) -> None:
        done = collect([originals(tmp_path / "mine")], tmp_path / "kept.jsonl")
        assert (len(done.new), len(done.replaced), done.left_out, done.total) == (11, 0, 1, 11)
        lines = (tmp_path / "kept.jsonl").read_text(encoding="utf-8").splitlines()
        assert {frozenset(json.loads(line)) for line in lines} == {frozenset({"record", "epochs"})}
        assert {json.loads(line)["record"]["status"] for line in lines} == {"done", "diverged"}
        assert "u17" not in "".join(lines)  # a user of the run folders

    def test_paths_are_gone_and_the_rest_is_kept(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "mine", loss="softmax", **ML1M)
        (run,) = collect([folder], tmp_path / "kept.jsonl").kept
        (line,) = (tmp_path / "kept.jsonl").read_text(encoding="utf-8").splitlines()
        before, after = read_sealed(folder / RECORD), json.loads(line)
        assert after["record"]["settings"]["data"]["source"] == "ml-1m.parquet"
        after["record"]["settings"]["data"]["source"] = before["settings"]["data"]["source"]
        assert after["record"] == before
        assert after["epochs"] == run.epochs == read_table(folder / EPOCHS).to_pydict()

    def test_path_of_windows(self, tmp_path: Path) -> None:
        content = read_sealed(write_run(tmp_path, loss="softmax", data=r"C:\me\ml-1m.parquet") / RECORD)
        assert portable(content, tmp_path).settings["data"]["source"] == "ml-1m.parquet"

    def test_probe_is_rounded(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "mine", loss="softmax", **ML1M)
        write_json(folder / "probe.json", {"zero_share": 0.123456789, "gradients": [[1 / 3, 0.0]]})
        collect([folder], tmp_path / "kept.jsonl")
        (run,) = read_study(tmp_path / "kept.jsonl").runs
        assert run.probe == {"zero_share": 0.1235, "gradients": [[0.3333, 0.0]]}

    def test_fields_of_another_version(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "mine", loss="softmax", **ML1M)
        content = read_sealed(folder / RECORD)
        write_sealed(folder / RECORD, content | {"extra": {}})
        assert collect([folder], tmp_path / "kept.jsonl").total == 1
        write_sealed(folder / RECORD, content | {"extra": {"a": 1}})
        with pytest.raises(ManymaxError, match="holds extra, which this version"):
            collect([folder], tmp_path / "kept.jsonl")

    @pytest.mark.parametrize("text", ["{", "{}", "[]", '{"settings": 3}', '{"settings": {}}'])
    def test_what_is_no_record(self, tmp_path: Path, text: str) -> None:
        (tmp_path / RECORD).write_text(text)
        with pytest.raises(ManymaxError, match=RECORD):
            collect([tmp_path], tmp_path / "kept.jsonl")
        assert not (tmp_path / "kept.jsonl").exists()

    def test_again_changes_nothing(self, root: Path) -> None:
        file = root / RESULTS / "q1.jsonl"
        before = file.read_bytes()
        done = collect([root / "mine"], file)
        assert (len(done.new), len(done.replaced), done.total) == (0, 11, 11)
        assert file.read_bytes() == before

    def test_a_later_run_of_the_same_settings_takes_the_place_of_the_first(self, root: Path) -> None:
        file = root / RESULTS / "q1.jsonl"
        (first,) = [path for path in (root / "mine").rglob(RECORD) if read_sealed(path)["settings"]["seed"] == 1]
        content = read_sealed(first)
        write_sealed(first, content | {"test": content["test"] | {"ndcg@20": 0.5}})
        write_run(root / "more", loss="softmax", seed=2, **ML1M)
        done = collect([first.parent, root / "more"], file)
        assert ([run.record.hash for run in done.replaced], done.total) == ([content["hash"]], 12)
        runs = {run.record.hash: run.record.test["ndcg@20"] for run in read_all_runs(file) if run.record.test}
        assert len(runs) == 11
        assert runs[content["hash"]] == 0.5

    def test_runs_of_version_0_1_0(self, tmp_path: Path) -> None:
        done = collect([OLD_STUDY], tmp_path / "kept.jsonl")
        folders = {read_json(path)["hash"]: path.parent for path in OLD_STUDY.rglob(RECORD)}
        assert len(done.new) + done.left_out == len(folders)
        for run in read_study(tmp_path / "kept.jsonl").runs:
            folder = folders[run.record.hash]
            before = read_sealed(folder / RECORD)
            assert run.record.test == before["test"]
            assert {**run.settings, "data": None} == {**run.settings, **before["settings"], "data": None}
            (own,) = read_study(folder).runs
            assert {name: values.tolist() for name, values in run.epochs.items()} == {
                name: values.tolist() for name, values in own.epochs.items()
            }

    def test_a_file_of_kept_runs_can_be_added_to_another(self, root: Path) -> None:
        write_run(root / "more", loss="softmax", seed=2, **ML1M)
        collect([root / "more"], root / "more.jsonl")
        assert collect([root / "more.jsonl"], root / RESULTS / "q1.jsonl").total == 12

    def test_a_damaged_file_is_not_written_over(self, root: Path) -> None:
        file = root / RESULTS / "q1.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines()
        damaged = "\n".join([*lines[:2], "<<<<<<< HEAD", *lines[2:]])
        file.write_text(damaged, encoding="utf-8")
        with pytest.raises(ManymaxError, match=r"q1\.jsonl, line 3, is damaged.*version control.*manymax records"):
            collect([root / "mine"], file)
        assert file.read_text(encoding="utf-8") == damaged

    def test_a_crash_while_writing_leaves_the_old_file(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = root / RESULTS / "q1.jsonl"
        before = file.read_bytes()
        write_run(root / "more", loss="softmax", seed=2, **ML1M)

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "replace", full)
        with pytest.raises(ManymaxError, match=r"q1\.jsonl cannot be written: No space left"):
            collect([root / "more"], file)
        assert file.read_bytes() == before
        assert [path.name for path in file.parent.iterdir()] == ["q1.jsonl"]

    def test_a_folder_is_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match=r"`into` must be a file that ends in \.jsonl"):
            collect([originals(tmp_path / "mine")], tmp_path / "kept")


class TestRead:
    def test_a_file_reads_as_the_folder_that_it_was_made_of(self, root: Path) -> None:
        folder, file = read_study(root / "mine"), read_study(root / RESULTS / "q1.jsonl")
        kept = {run.name: run for run in file.runs}
        assert (file.title, list(kept)) == ("q1", sorted(run.name for run in folder.runs if run.record.final))
        for run in folder.runs:
            if run.record.final:
                assert kept[run.name].record.test == run.record.test
                assert {k: v.tolist() for k, v in kept[run.name].epochs.items()} == {
                    k: v.tolist() for k, v in run.epochs.items()
                }
                assert kept[run.name].users("ndcg@20") is None

    def test_a_folder_of_files(self, root: Path) -> None:
        write_run(root / "more", loss="softmax", seed=2, **ML1M)
        collect([root / "more"], root / RESULTS / "q2.jsonl")
        assert len(read_study(root / RESULTS).runs) == 12

    def test_raw_data_beside_runs_is_left_alone(self, root: Path) -> None:
        (root / "mine" / "reviews.jsonl").write_text('{"rating": 5}\n', encoding="utf-8")
        study = read_study(root / "mine")
        assert (len(study.runs), study.unreadable) == (12, ())

    def test_a_damaged_line_is_named_and_the_others_are_read(self, root: Path) -> None:
        file = root / RESULTS / "q1.jsonl"
        lines = file.read_bytes().splitlines()
        file.write_bytes(b"\n".join([lines[0], lines[1][:-9], *lines[2:]]))
        study = read_study(file)
        assert len(study.runs) == 10
        (why,) = study.unreadable
        assert f"{file}, line 2, is damaged" in why
        with pytest.raises(ManymaxError, match="line 2, is damaged"):
            read(root)

    def test_folders_of_run_folders_are_studies_too(self, root: Path) -> None:
        (root / RESULTS / "q1.jsonl").rename(root / "away.jsonl")
        (root / "mine").rename(root / RESULTS / "q1")
        assert list(read(root).studies) == ["q1"]
        assert len(read(root).done) == 10

    def test_two_studies_of_one_name(self, root: Path) -> None:
        (root / "mine").rename(root / RESULTS / "q1")
        with pytest.raises(ManymaxError, match="two studies of one name"):
            read(root)

    def test_planted_runs_of_a_file_and_of_a_folder(self, tmp_path: Path) -> None:
        for loss, regret in (("softmax", 0.1), ("sparsemax", 0.2)):
            write_run(tmp_path / "results" / "planted", loss=loss, regret=regret)
        in_folder = planted_page(planted_runs(tmp_path))
        write_runs(tmp_path / "results" / "planted.jsonl", collect([tmp_path], tmp_path / "all.jsonl").kept)
        (tmp_path / "results" / "planted").rename(tmp_path / "gone")
        assert planted_page(planted_runs(tmp_path)) == in_folder


class TestCommands:
    def test_records_says_what_was_kept(self, root: Path) -> None:
        file = root / RESULTS / "q1.jsonl"
        write_run(root / "mine", loss="softmax", seed=2, **ML1M)
        said = CliRunner().invoke(app, ["records", str(root / "mine"), "--into", str(file)])
        assert said.exit_code == 0
        assert said.output == (
            f"12 runs in {file}: 1 new, 11 replaced; 1 left out, which have not ended. The file holds 12.\n"
        )

    def test_report_of_a_file(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(root)
        said = CliRunner().invoke(app, ["report", str(RESULTS / "q1.jsonl"), "--no-images"])
        assert said.exit_code == 0
        assert "rankmax" in (root / "q1_report" / "report.html").read_text(encoding="utf-8")
        assert [path.name for path in (root / RESULTS).iterdir()] == ["q1.jsonl"]
