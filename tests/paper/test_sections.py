"""What the page of a study says of the paper, and that it says so only where a command hands it in."""

from __future__ import annotations

from pathlib import Path

import pytest

from manymax.paper.page_sections import PAPER_SECTIONS, PUBLISHED_NUMBERS, findings, numbers
from manymax.study.report.formats import Cell, ReportTable
from manymax.study.report.page import PAGE_FILE, build, report
from manymax.study.report.runs import read_study
from manymax.study.report.tables import results
from manymax.study.report.trials import Trial, trials
from tests.study.report.generated import write_run


def made(folder: Path) -> list[Trial]:
    return trials(read_study(folder).done)


def row(table: ReportTable, *headers: str) -> tuple[Cell, ...]:
    (cells,) = [cells for names, cells in table.rows if names == headers]
    return cells


@pytest.mark.parametrize("settings", [{"data": "ml-1m"}, {"data": "b.csv", "preset": "paper-text"}])
def test_the_sections_of_the_paper_come_last(tmp_path: Path, settings: dict[str, str]) -> None:
    write_run(tmp_path, **settings)
    study = read_study(tmp_path)
    with_paper = [section.id for section in build(study, PAPER_SECTIONS, PUBLISHED_NUMBERS)]
    assert with_paper == [*(section.id for section in build(study)), "paper", "findings"]


def test_a_study_of_other_data_has_no_findings(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert not {"paper", "findings"} & {section.id for section in build(read_study(tmp_path), PAPER_SECTIONS)}


def test_without_them_the_page_does_not_speak_of_the_paper(tmp_path: Path) -> None:
    write_run(tmp_path / "study", data="ml-1m")
    pages = {}
    for name, more in (("with", {"extra": PAPER_SECTIONS, "published": PUBLISHED_NUMBERS}), ("without", {})):
        page = report(tmp_path / "study", tmp_path / name, images=False, **more)
        body = page.read_text(encoding="utf-8").partition("<header")[2].partition("<script>")[0]
        pages[name] = body.lower()
    assert "the paper" in pages["with"]
    assert "0.2661" in pages["with"]
    assert "paper" not in pages["without"]
    assert "0.2661" not in pages["without"]
    assert not (tmp_path / "without" / "tables" / "paper.csv").exists()
    assert (tmp_path / "without" / PAGE_FILE).is_file()


def test_every_finding_is_a_card_with_its_cases(tmp_path: Path) -> None:
    write_run(tmp_path, loss="rankmax")
    write_run(tmp_path, loss="softmax")
    section = findings(made(tmp_path))
    assert [card.title.partition(".")[0] for card in section.cards] == [str(number) for number in range(1, 10)]
    card = section.cards[1]
    assert (card.verdict, card.count, card.missing) == ("confirmed", 1, ())
    (whose, ours), (_, theirs) = card.cases
    assert whose == "Our runs"
    assert ours[0][0] is True
    assert ours[0][1].startswith("planted, mf: rankmax")
    assert theirs
    assert section.cards[0].missing


def test_the_papers_numbers_stand_beside_ours(tmp_path: Path) -> None:
    write_run(tmp_path, loss="softmax", data="ml-1m", lr=1e-3)
    write_run(tmp_path, loss="softmax", data="planted")
    write_run(tmp_path, loss="entmax", data="ml-1m", alpha=1.2)  # the paper has 1.5 alone
    write_run(tmp_path, loss="nce", data="ml-1m", num_negatives=50, lr=1e-4)
    write_run(tmp_path, loss="nce", data="gowalla", sampler="dns")
    write_run(tmp_path, loss="nce", data="electronics", sampler="dns", pool=50)
    write_run(tmp_path, loss="rg", data="ml-1m")
    write_run(tmp_path, loss="rg", data="ml-1m", solver="als")
    found = {names[:3]: cells[1].value for names, cells in numbers(made(tmp_path)).rows if "N@20" in names}
    assert found == {
        ("ml-1m", "mf", "softmax"): 0.2661,
        ("ml-1m", "mf", "nce"): 0.2409,
        ("gowalla", "mf", "nce"): 0.0599,
        ("ml-1m", "mf", "rg (solver=als)"): 0.2785,
    }
    beside = row(results(made(tmp_path), "mf", PUBLISHED_NUMBERS), "softmax", "N@20")
    assert {cell.paper for cell in beside} == {0.2661, None}
    softmax = next(t for t in made(tmp_path) if t.data == "ml-1m" and t.loss == "softmax")
    ours, paper, difference, _ = next(cells for names, cells in numbers([softmax]).rows if "N@20" in names)
    assert difference.value == pytest.approx(100 * (ours.value / paper.value - 1))


def test_a_doubtful_number_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, loss="nce", data="gowalla", lr=1e-2)  # no printed rate: the tables of k and proposals count
    (cells,) = [cells for names, cells in numbers(made(tmp_path)).rows if "N@20" in names]
    assert cells[1].value == 0.0518
