"""The page of the reproduction, from records that are kept."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manymax.cli.app import app
from manymax.errors import ManymaxError
from manymax.paper import reproduction
from manymax.paper.findings import FINDINGS
from manymax.paper.method_comparisons import METHOD_COMPARISONS
from manymax.paper.reproduction import CAUSES, PAGE, RESULTS, drawings, page, read, write
from manymax.study.report.collect import collect
from manymax.study.report.trials import trials
from tests.study.report.generated import write_run
from tests.study.report.small_study import ML1M, row, section

ROOT = Path(__file__).parents[3]


class TestCommitted:
    def test_page_matches_records(self) -> None:
        assert (ROOT / PAGE).read_text(encoding="utf-8") == page(read(ROOT)), "run `make docs`"

    def test_figures_are_there_and_no_others(self) -> None:
        text = (ROOT / PAGE).read_text(encoding="utf-8")
        linked = {(ROOT / "docs" / link).resolve() for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)}
        assert linked == {path.resolve() for path in (ROOT / "docs/figures").glob("reproduction_*.svg")}

    def test_the_first_screen_sums_up(self) -> None:
        text = (ROOT / PAGE).read_text(encoding="utf-8").partition("## How to read the rest")[0]
        assert len(text.splitlines()) < 40
        assert {int(number) for number in re.findall(r"#finding-(\d)", text)} == {f.number for f in FINDINGS}
        rows = re.findall(
            r"^\| ([\w\\-]+) \| \**(0\.\d+)\** \| \**(0\.\d+) .*? \| \**(0\.\d+) .*\|$", text, re.MULTILINE
        )
        assert [row[0] for row in rows] == ["electronics\\_10core", "gowalla", "ml-1m"]
        above = [sum(float(row[column]) > float(row[1]) for row in rows) for column in (2, 3)]
        for kind, number in zip(("sparse", "sampled"), above, strict=True):
            assert f"The best {kind} loss is above softmax on {number} of 3 data sets" in text


class TestPage:
    def test_without_records(self, tmp_path: Path) -> None:
        text = page(read(tmp_path))
        sections = (
            "verdicts",
            "kinds of losses",
            "accuracy",
            "negatives",
            "pace",
            "models",
            *METHOD_COMPARISONS,
            "data",
            "origin",
        )
        assert text.count("Not enough runs") == len(sections) + len(FINDINGS)
        assert "- ml-1m, lightgcn: not enough runs, none yet." in text
        assert "confirmed" not in [row(text, str(f.number), f.claim)[2].strip("*") for f in FINDINGS]

    def test_ours_beside_the_paper(self, root: Path) -> None:
        text = section(page(read(root)), "### mf, ml-1m")
        runs = [run for run in read(root).done if run.settings["loss"] == "softmax"]
        best = next(trial for trial in trials(runs) if trial.lr == 1e-3)
        mean, spread = best.mean("ndcg@20"), best.spread("ndcg@20")
        assert mean is not None
        percent = 100 * (mean / 0.2661 - 1)
        cells = row(text, "softmax", "pairs", "0.001", "0.001", "2")
        assert cells[5:7] == [f"{mean:.4f} ± {spread:.4f} (0.2661)", f"{percent:+.1f}"]

    def test_tuned_settings_are_chosen_on_the_validation_part(self, root: Path) -> None:
        text = section(page(read(root)), "### mf, ml-1m")
        assert len(re.findall(r"^\| softmax ", text, flags=re.MULTILINE)) == 1
        assert [
            re.sub(r".*ridge=([\d.]+).*", r"\1", line) for line in text.splitlines() if line.startswith("| rg")
        ] == ["1.0"]

    def test_question_1_has_the_paper_s_number_of_negatives(self, root: Path) -> None:
        text = page(read(root))
        assert row(section(text, "### mf, ml-1m"), r"sampled\_softmax")[5].endswith("(0.2645)")
        sweep = section(text, "### mf, ml-1m: sampled losses")
        paper = [re.search(r"\((\d.\d+)\)", line)[1] for line in sweep.splitlines() if "num\\_negatives" in line]  # type: ignore[index]
        assert paper == ["0.2504", "0.2554", "0.2645"]

    def test_no_number_where_the_paper_has_none(self, tmp_path: Path) -> None:
        (tmp_path / "docs").mkdir()
        jackknife = {"correction": "partition", "debias": "jackknife"}
        for lr in (1e-3, 5e-4):
            folder = write_run(tmp_path / "mine", loss="sampled_softmax", **jackknife, **(ML1M | {"lr": lr}))
            collect([folder], tmp_path / RESULTS / "q1.jsonl")
        text = page(read(tmp_path))
        assert "(" not in row(section(text, "### mf, ml-1m"), r"sampled\_softmax")[5]
        assert "(0." not in section(text, "### mf: all learning rates")

    def test_another_form_of_a_set_is_compared(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "mine", loss="softmax", data="electronics_10core.parquet", quality=0.02)
        collect([folder], tmp_path / RESULTS / "q1.jsonl")
        assert row(section(page(read(tmp_path)), "### mf, electronics\\_10core"), "softmax")[5].endswith("(0.0235)")

    def test_large_differences_have_a_cause(self, root: Path) -> None:
        heading = "## Where ours differs from the paper by more than 5 percent"
        text = section(page(read(root)), heading)
        cause, line = (line for line in text.splitlines() if "sparsemax" in line or "cause" in line)
        assert cause == "Likely cause: not examined."
        assert "At lr=0.001 the paper prints N@20 0.2353" in line
        text = '[[cause]]\ndata="ml-1m"\nbackbone="mf"\nloss=["sparsemax", "softmax"]\ntext="""the\nrate."""\n'
        (root / CAUSES).write_text(text)
        cause, lines, *others = section(page(read(root)), heading).strip().split("\n\n")
        assert cause == "Likely cause: the rate."
        assert [line.partition(":")[0] for line in lines.splitlines()] == [
            "- ml-1m, mf, softmax",
            "- ml-1m, mf, sparsemax",
        ]
        assert "Likely cause: not examined." in others

    def test_two_causes_for_one_loss(self, root: Path) -> None:
        cause = '[[cause]]\ndata = "ml-1m"\nbackbone = "mf"\nloss = ["rg", "softmax"]\ntext = "the rate"\n'
        (root / CAUSES).write_text(cause + cause.replace('["rg", "softmax"]', '"softmax"'))
        with pytest.raises(ManymaxError, match="two causes for ml-1m, mf, softmax"):
            read(root)

    @pytest.mark.parametrize("text", ["[[cause]", '[[cause]]\ndata = "ml-1m"\n', "cause = 3\n"])
    def test_causes_that_cannot_be_read(self, root: Path, text: str) -> None:
        (root / CAUSES).write_text(text)
        with pytest.raises(ManymaxError, match="must hold"):
            read(root)

    def test_ways_of_computing_stand_apart(self, root: Path) -> None:
        for loss, way, seconds in (("softmax", "table", 8), ("softmax", "blocks", 2), ("sparsemax", "table", 80)):
            folder = write_run(root / "ways", loss=loss, computation=way, epochs=4, seconds_per_epoch=seconds, **ML1M)
            collect([folder], root / RESULTS / "computation.jsonl")
        text = page(read(root))
        assert "needed are runs that differ in `computation`, in" not in text
        cells = row(section(text, "## Ways of computing"), "ml-1m", "mf", "sparsemax", "table")
        assert cells[4:6] == ["80.0", "10.00"]
        assert "computation=" not in section(text, "## Question 1: accuracy")

    def test_ways_of_computing_are_drawn_where_early_stopping_ended_them(self, root: Path) -> None:
        for way, epochs in (("table", 4), ("blocks", 4), ("compiled", 1000)):
            folder = write_run(root / "ways", loss="sparsemax", computation=way, epochs=epochs, **ML1M)
            collect([folder], root / RESULTS / "computation.jsonl")
        (panel,) = next(figure for figure in drawings(read(root)) if figure.name == "computation").panels
        assert [line.name for line in panel.lines] == [
            "sparsemax (computation=blocks)",
            "sparsemax (computation=table)",
        ]
        assert "reproduction_computation.svg" in section(page(read(root)), "## Ways of computing")

    def test_ways_to_make_batches_stand_apart(self, root: Path) -> None:
        for batches, quality in (("pairs", 0.5), ("users", 0.4)):
            folder = write_run(root / "ways", loss="softmax", batches=batches, epochs=3, quality=quality, **ML1M)
            collect([folder], root / RESULTS / "batches.jsonl")
        text = page(read(root))
        cells = row(section(text, "## Ways to make batches"), "ml-1m", "mf", "softmax", "users")
        assert float(cells[5]) == pytest.approx(0.4, abs=0.02)
        assert "batches=" not in section(text, "## Question 1: accuracy")

    def test_a_number_is_of_the_batches_nearest_to_the_paper_s(self, root: Path) -> None:
        """Though others are better; rates are compared where there are most of them."""
        for lr, quality in ((1e-3, 0.45), (5e-4, 0.5), (1e-4, 0.4)):
            write_run(root / "more", loss="softmax", batches="users", quality=quality, **(ML1M | {"lr": lr}))
        collect([root / "more"], root / RESULTS / "q1.jsonl")
        text = page(read(root))
        assert float(row(section(text, "### mf, ml-1m"), "softmax", "pairs")[5][:6]) == pytest.approx(0.265, abs=0.02)
        every = section(text, "### mf: all learning rates")
        values = [float(cell.strip("*")[:4]) for cell in row(every, "softmax", "N@20")[2:]]
        assert values == pytest.approx([0.45, 0.5, 0.4], abs=0.02)
        pairs = r"sparsemax; rankmax; sampled\_softmax"
        assert f"Batches: pairs on ml-1m ({pairs}), users on ml-1m (softmax)." in every

    def test_ways_to_read_histories_stand_apart(self, root: Path) -> None:
        for positions in ("all", "windows"):
            folder = write_run(root / "ways", loss="softmax", backbone="sasrec", positions=positions, epochs=3, **ML1M)
            collect([folder], root / RESULTS / "positions.jsonl")
        text = page(read(root))
        assert row(section(text, "## Ways to read histories"), "ml-1m", "sasrec", "softmax", "windows")
        assert "positions=" not in section(text, "## Question 1: accuracy")

    def test_log_partitions_of_nce_stand_apart(self, root: Path) -> None:
        for log_z in (None, 0.0):
            folder = write_run(root / "ways", loss="nce", num_negatives=10, log_z=log_z, epochs=3, **ML1M)
            collect([folder], root / RESULTS / "log_z.jsonl")
        text = page(read(root))
        assert row(section(text, "## NCE and its log partition"), "ml-1m", "mf", "nce", "10", "0.0")
        assert "log\\_z=" not in section(text, "## Question 2: negatives")

    def test_a_run_of_two_studies_counts_once(self, root: Path) -> None:
        collect([root / "mine"], root / RESULTS / "q2.jsonl")
        assert len(read(root).done) == 10
        text = page(read(root))
        assert row(section(text, "### mf, ml-1m"), "softmax")[4] == "2"
        assert row(section(text, "### Hours"), "all, each run once")[1] == "11"  # and one that diverged

    def test_what_is_missing(self, root: Path) -> None:
        text = section(page(read(root)) + "## end\n", "## What is missing")
        assert "- ml-1m, mf: not enough runs, without entmax, nce, hierarchical_softmax." in text
        assert "- gowalla, sasrec: not enough runs, none yet." in text
        assert "- ml-1m, mf: not run of the paper's settings: softmax lr=0.0005; sparsemax lr=0.0005," in text
        assert "- ml-1m, mf, entmax, lr=0.5, seed 0: diverged." in text
        assert "- 10 runs have not been looked at for the findings yet." in text


class TestWrite:
    def test_twice_the_same(self, root: Path) -> None:
        written = write(root)
        assert {path.name for path in written} == {
            "reproduction.md",
            "reproduction_curves_epoch.svg",
            "reproduction_curves_seconds_train.svg",
        }
        first = {path: path.read_bytes() for path in written}
        assert {path: path.read_bytes() for path in write(root)} == first

    @pytest.mark.usefixtures("undrawn")
    def test_old_figures_go_and_others_stay(self, root: Path) -> None:
        folder = root / "docs/figures"
        folder.mkdir()
        for name in ("reproduction_old.svg", "mine.svg"):
            (folder / name).write_text("old")
        write(root)
        assert not (folder / "reproduction_old.svg").exists()
        assert (folder / "mine.svg").exists()

    @pytest.mark.usefixtures("undrawn")
    def test_an_error_leaves_the_old_page(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (root / PAGE).write_text("old")

        def fail(*_: object) -> str:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(reproduction, "page", fail)
        with pytest.raises(ManymaxError, match="No space left"):
            write(root)
        assert (root / PAGE).read_text() == "old"


@pytest.mark.usefixtures("undrawn")
class TestCommands:
    def test_records_and_reproduction(self, root: Path) -> None:
        said = CliRunner().invoke(app, ["records", str(root / "mine"), "--into", str(root / RESULTS / "again.jsonl")])
        assert (said.exit_code, said.output.partition(" in ")[0]) == (0, "11 runs")
        said = CliRunner().invoke(app, ["reproduction", "--root", str(root), "--runs", str(root / "mine")])
        assert said.exit_code == 0
        assert f"wrote {PAGE}" in said.output

    def test_wrong_folders(self, tmp_path: Path) -> None:
        said = CliRunner().invoke(app, ["records", str(tmp_path / "no"), "--into", str(tmp_path / "kept.jsonl")])
        assert "`folders` must be folders with runs" in str(said.exception)
        said = CliRunner().invoke(app, ["reproduction", "--root", str(tmp_path)])
        assert "`--root` must be the top folder" in str(said.exception)
