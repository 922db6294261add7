"""The first screen of the page: the answer, one figure, common settings and warnings, within 1280 x 800 pixels."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from manymax.study.agenda import StudyAgenda
from manymax.study.report.answer import answers
from manymax.study.report.figures import FRONTIER, trade_off
from manymax.study.report.opening import common_settings, headlines
from manymax.study.report.page import report
from manymax.study.report.point_labels import sides
from manymax.study.report.runs import Study, read_study
from manymax.study.report.trials import trials
from tests.browser import browse, needs_chromium
from tests.study.report.generated import QUALITY, grid, write_run

SECONDS = {"softmax": 4.0, "rankmax": 6.0, "nce": 0.5}


@pytest.fixture
def study(tmp_path: Path) -> Study:
    for loss, seconds in SECONDS.items():
        for lr in (1e-2, 1e-3):
            write_run(tmp_path, loss=loss, lr=lr, seconds_per_epoch=seconds, dim=32, valid=lr + QUALITY[loss])
    return read_study(tmp_path)


def test_a_point_per_loss_with_its_interval_and_the_frontier(study: Study) -> None:
    (panel,) = trade_off(answers(study)).panels
    frontier, *points = panel.lines
    assert (frontier.name, list(frontier.x)) == (FRONTIER, [4.0, 32.0, 48.0])
    by_name = {line.name: line for line in points}
    assert by_name.keys() == SECONDS.keys()
    assert (by_name["softmax"].y, by_name["softmax"].spread) == ([0.0], None)  # the others are compared with it
    (answer,) = answers(study)
    gain = answer.winner.gain
    assert gain is not None
    assert by_name["rankmax"].y == [gain.value]
    assert by_name["rankmax"].spread == pytest.approx([(gain.high - gain.low) / 2])
    assert answer.quicker is answer.contenders[-1]
    assert answer.quicker.loss == "nce"


def test_the_verdict_is_that_of_the_answer(study: Study) -> None:
    (answer,), (verdict,) = answers(study), headlines(answers(study))
    assert (verdict.loss, verdict.chart) == ("rankmax", "trade_off-0")
    assert verdict.gain == f"{answer.winner.gain.value:+.1f} %"  # type: ignore[union-attr]
    assert "95 % interval" in verdict.sentence
    rows = dict(verdict.rows)
    assert rows["Settings"] == "lr=0.01"
    assert rows["Much faster"].startswith("nce: 12.0 times as fast, -")
    assert [*verdict.cautions, *verdict.folded] == [each.text for each in answer.cautions]


def test_common_settings_are_those_of_all_runs(study: Study) -> None:
    found = dict(common_settings(study, trials(study.done)))
    assert (found["dim"], found["seed"], found["users"]) == ("32", "0", "200")
    assert "lr" not in found
    assert "loss" not in found


def test_names_of_points_cover_neither_points_nor_names(tmp_path: Path) -> None:
    for index, loss in enumerate(QUALITY):
        write_run(tmp_path, loss=loss, seconds_per_epoch=1 + index)
    (panel,) = trade_off(answers(read_study(tmp_path))).panels
    assert len({side for side in sides(panel.lines) if side is not None}) > 1


def test_runs_that_never_started_are_counted(tmp_path: Path) -> None:
    done = write_run(tmp_path)
    agenda = StudyAgenda(tmp_path, "T", "A note.", [done.name, "0" * 16], searched=3)
    StudyAgenda(tmp_path, "", "", ["1" * 16], searched=1)  # another command with a part of the runs
    study = read_study(tmp_path)
    assert (study.title, study.note, study.never_started) == ("T", "A note.", 5)
    (answer,) = answers(study)
    assert "5 never started" in answer.cautions[0].text
    page = report(tmp_path, images=False).read_text(encoding="utf-8")
    assert "5 runs never started" in page
    assert "A note." in page
    agenda.whole()  # a search may have proposed some settings twice
    assert read_study(tmp_path).never_started == 1


MEASURE = """plotAll().then(() => { const box = (each) => { const r = each.getBoundingClientRect();
  return [each.className.baseVal ?? each.className, r.left, r.top, r.right, r.bottom]; };
  document.documentElement.dataset.boxes = JSON.stringify([...document.querySelectorAll(
  "h1, .tabs, .opening:not([hidden]) .answer, .opening:not([hidden]) .chart, .warnings, .chips")].map(box)
  .filter((each) => each[4] > 0)); document.documentElement.dataset.wide = document.documentElement.scrollWidth; });
</script>"""


def boxes(page: Path, *options: str) -> tuple[list[list], int]:
    """The places of what the first screen must hold, as [class, left, top, right, bottom], and the page's width."""
    copy = page.with_name("measured.html")
    text = page.read_text(encoding="utf-8")
    assert text.count("plotAll();\n</script>") == 1
    copy.write_text(text.replace("plotAll();\n</script>", MEASURE), encoding="utf-8")
    dom, log = browse(copy, *options)
    assert log == ""
    (found,) = re.findall(r'data-boxes="([^"]*)"', dom)
    (wide,) = re.findall(r'data-wide="(\d+)"', dom)
    return json.loads(found.replace("&quot;", '"')), int(wide)


@needs_chromium
@pytest.mark.extras
@pytest.mark.parametrize("many", [False, True], ids=["one data set", "many data sets and warnings"])
def test_the_first_screen_holds_all_of_it(tmp_path: Path, many: bool) -> None:
    data = [f"data-set-{index}.csv" for index in range(5 if many else 1)]
    grid(tmp_path, data=data, lr=(1e-2, 1e-3), backbone=("mf", "sasrec") if many else ("mf",))
    if many:
        write_run(tmp_path, status="diverged", reason="the loss is nan", lr=1.0)
        write_run(tmp_path, loss="softmax", lr=0.5, data=data[0], quality=0.4, num_users=20, limit=8)
        StudyAgenda(tmp_path, "A study with a long title, as people write them", "A note. " * 25, ["0" * 16], 0)
    found, wide = boxes(report(tmp_path, images=False), "--window-size=1280,800")
    assert {name for name, *_ in found} >= {"answer", "chart js-plotly-plot", "warnings", "chips"}
    assert wide <= 1280
    for name, left, top, right, bottom in found:
        assert 0 <= left < right <= 1280, name
        assert 0 <= top < bottom <= 800, name
    (chart,) = [each for each in found if each[0].startswith("chart")]
    assert chart[4] - chart[2] >= 250, "the figure is large enough to be read"


@needs_chromium
@pytest.mark.extras
def test_a_narrow_window_scrolls_in_one_direction_alone(tmp_path: Path) -> None:
    grid(tmp_path, data=("a-data-set-with-a-long-name.csv", "b.csv"))
    found, wide = boxes(report(tmp_path, images=False), "--window-size=500,900")
    assert wide <= 500
    assert all(right <= 500 for name, _, _, right, _ in found if name != "tabs")
