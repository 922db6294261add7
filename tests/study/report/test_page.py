"""The page of the report: complete and incomplete studies, hostile names, and how a browser draws it."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from manymax.errors import ManymaxError
from manymax.paper.page_sections import PAPER_SECTIONS, PUBLISHED_NUMBERS
from manymax.study.files import read_sealed, write_sealed
from manymax.study.report.page import build, report
from manymax.study.report.runs import read_study
from tests.browser import browse, needs_chromium
from tests.study.report.generated import QUALITY, grid, write_run

HOSTILE = '</script><script>document.title="taken"</script><img src=x onerror=alert(1)>"\'&$x_1$'


class Text(HTMLParser):
    """Collects the words of a page, its tags and its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] not in (["script"], ["style"]):
            self.words.append(data)


def parse(path: Path) -> Text:
    text = Text()
    text.feed(path.read_text(encoding="utf-8"))
    return text


def words(path: Path) -> str:
    return " ".join(" ".join(parse(path).words).split())


def charts(path: Path) -> dict[str, dict]:
    (found,) = re.findall(r"^const charts = (.*);$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return json.loads(found)


def full_study(folder: Path) -> None:
    """Write a study that fills every section of the page."""
    grid(folder)
    grid(folder, ("softmax", "nce"), data=("ml-1m",), backbone=("mf", "sasrec"), lr=(1e-3, 1e-4))
    for k in (5, 10):
        write_run(folder, loss="nce", num_negatives=k)
    write_run(folder, loss="nce", sampler="dns")
    for mean in (10, 40):
        sizes = {"users": 200, "items": 200, "train": 160 * mean}
        write_run(folder, data=f"planted-200x200x{mean}", regret=4 / mean, sizes=sizes)
    probed = write_run(folder, data="probed")
    row = {"member": "nce", "correction": None, "in_range": 0.5}
    row |= {f"{how}_{what}": 0.1 for what in ("bias", "variance") for how in ("predicted", "exact", "measured")}
    row |= {f"measured_{what}_error": 0.01 for what in ("bias", "variance")}
    content = {
        "gradients": [[0.5, 0.0], [0.1, 0.2]],
        "jacobian": [[1.0, 0.0], [0.0, 1e-9]],
        "zero_share": 0.25,
        "approximations": [row | {"num_negatives": k} for k in (5, 50)],
    }
    (probed / "probe.json").write_text(json.dumps(content), encoding="utf-8")
    write_run(folder, status="diverged", reason="the loss is nan", lr=1.0)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    full_study(folder)
    return report(folder, extra=PAPER_SECTIONS, published=PUBLISHED_NUMBERS)


def test_every_section_of_a_full_study_has_content(full: Path) -> None:
    study = read_study(full.parents[1])
    for section in build(study, PAPER_SECTIONS, PUBLISHED_NUMBERS):
        assert section.cards or section.figures or section.tables, section.title
    said = words(full)
    for title in ("Results", "Significance", "Curves", "Negatives", "Bayes ranking", "Gradients", "Cost"):
        assert title in said
    for name in (
        "The paper's findings",
        "Bias and variance",
        "Data card: ml-1m",
        "the loss is nan",
        "0.2661",
        *QUALITY,
    ):
        assert name in said


def test_tables_and_figures_are_files_too(full: Path) -> None:
    names = {path.stem for path in (full.parent / "tables").iterdir()}
    assert {"results_mf", "results_sasrec", "significance", "sweep_num_negatives", "cost", "paper", "runs"} <= names
    for name in names:
        assert {path.suffix for path in (full.parent / "tables").glob(f"{name}.*")} == {".md", ".csv", ".tex"}
    figures = {path.stem for path in (full.parent / "figures").iterdir()}
    assert figures == {
        "curves_epoch",
        "curves_seconds_train",
        "sweep_num_negatives",
        "sweep_sampler",
        "growth",
        "gradients",
        "jacobian",
        "bias_variance",
        "trade_off",
    }
    for name in figures:
        assert (full.parent / "figures" / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert "<svg" in (full.parent / "figures" / f"{name}.svg").read_text(encoding="utf-8")


def test_nothing_is_fetched(full: Path) -> None:
    page = parse(full)
    assert not {"link", "iframe", "img", "object"} & set(page.tags)
    assert not [value for name, value in page.attributes if name in ("src", "srcset", "data", "action")]
    assert {value for name, value in page.attributes if name == "href" and not str(value).startswith("#")} == set()


def test_it_has_a_dark_theme_and_fits_narrow_windows(full: Path) -> None:
    text = full.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_every_chart_has_its_place_and_its_data(full: Path) -> None:
    places = [value for name, value in parse(full).attributes if name == "data-chart"]
    found = charts(full)
    assert sorted(places) == sorted(found)  # type: ignore[type-var]
    for chart in found.values():
        assert all(trace.get("x") or trace.get("z") for trace in chart["data"])
    heat = found["gradients-0"]["data"][0]
    assert heat["z"][0][1] is None  # an entry that is exactly 0 is left out, so that the black behind it shows
    assert heat["zmax"] == pytest.approx(math.log10(0.5))
    assert found["growth-0"]["layout"]["yaxis"]["type"] == "log"


def test_a_line_looks_the_same_in_every_panel(tmp_path: Path) -> None:
    """A line has the same dashes in a panel with two variants of its loss and in a panel with it alone."""
    for data, counts in (("one", (5, 10)), ("two", (10,))):
        for k in counts:
            write_run(tmp_path, data=data, loss="nce", num_negatives=k)
    found = charts(report(tmp_path, images=False))
    looks = {(t["name"], t["line"]["dash"]) for n in (0, 1) for t in found[f"curves_epoch-{n}"]["data"]}
    assert looks == {("nce (num_negatives=5)", "solid"), ("nce (num_negatives=10)", "dash")}


def test_growth_joins_only_data_of_the_same_users_and_items(tmp_path: Path) -> None:
    """Runs are joined to a line only if they have the same numbers of users and items."""
    for size, train in (("200x200x10", 1600), ("200x200x40", 6400), ("900x300x10", 7200)):
        sizes = {"users": 200, "items": 200, "train": train}
        write_run(tmp_path, size=size, regret=400 / train, sizes=sizes)
    page = report(tmp_path, images=False)
    (panel,) = [chart for name, chart in charts(page).items() if name.startswith("growth")]
    assert panel["data"][0]["x"] == panel["layout"]["xaxis"]["tickvals"] == [1600, 6400]
    assert "mf, 200 users, 200 items" in words(page)


def test_the_same_records_give_the_same_files(tmp_path: Path) -> None:
    write_run(tmp_path / "study")
    first, second = (report(tmp_path / "study", tmp_path / name).parent for name in ("first", "second"))
    names = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert any(name.suffix == ".svg" for name in names)
    assert [name for name in names if (first / name).read_bytes() != (second / name).read_bytes()] == []


def test_one_run(tmp_path: Path) -> None:
    write_run(tmp_path)
    said = words(report(tmp_path, images=False, extra=PAPER_SECTIONS))
    assert "1 finished run · 1 loss · 1 backbone · 1 data set · 1 seed" in said
    assert "A test needs two losses" in said
    assert "no other loss was run" in said
    assert "findings" not in said


def test_failed_runs_only(tmp_path: Path) -> None:
    write_run(tmp_path, status="failed", reason="ArgumentError: no such file 'x.csv'")
    write_run(tmp_path, status="diverged", reason="the loss is inf", lr=2.0)
    said = words(report(tmp_path))
    assert "No run has finished: 1 diverged, 1 failed." in said or "No run has finished: 1 failed, 1 diverged." in said
    assert "no such file 'x.csv'" in said
    assert "the loss is inf" in said


def test_a_member_without_a_curve(tmp_path: Path) -> None:
    write_run(tmp_path, loss="softmax")
    write_run(tmp_path, loss="rg", curve=False)
    page = report(tmp_path, images=False)
    assert "No curve was recorded for rg." in words(page)
    assert [trace["name"] for trace in charts(page)["curves_epoch-0"]["data"]] == ["softmax"]


def test_runs_under_way_and_unreadable_ones_are_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    broken = write_run(tmp_path, seed=1)
    (broken / "record.json").write_text("{", encoding="utf-8")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "settings.json").write_text("{}", encoding="utf-8")
    said = words(report(tmp_path, images=False))
    assert "1 runs are under way or were interrupted (begun)" in said
    assert "record.json cannot be read" in said


def test_metrics_that_are_not_numbers(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    record = read_sealed(folder / "record.json")
    record["test"] = dict.fromkeys(record["test"])
    record["valid"] = {}
    write_sealed(folder / "record.json", record)
    report(tmp_path, images=False)


def test_names_from_data_are_escaped(tmp_path: Path) -> None:
    write_run(tmp_path, data=HOSTILE, name=HOSTILE)
    write_run(tmp_path, data=HOSTILE, name=HOSTILE, loss="nce")
    write_run(tmp_path, status="failed", reason=HOSTILE, lr=0.5)
    page = report(tmp_path, extra=PAPER_SECTIONS, published=PUBLISHED_NUMBERS)
    parsed = parse(page)
    assert parsed.tags.count("script") == 2
    assert "img" not in parsed.tags
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]
    assert HOSTILE in words(page)
    (curve, *_) = (chart for name, chart in charts(page).items() if name.startswith("curves"))
    assert curve["data"]


def test_a_report_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ManymaxError, match="cannot be written"):
        report(tmp_path, tmp_path / "file" / "report")


@needs_chromium
@pytest.mark.extras
@pytest.mark.parametrize(
    "options",
    [(), ("--window-size=400,800", "--blink-settings=preferredColorScheme=0")],
    ids=["wide and light", "narrow and dark"],
)
def test_a_browser_draws_every_chart_and_logs_nothing(full: Path, options: tuple[str, ...]) -> None:
    dom, log = browse(full, *options)
    assert log == ""
    assert '<html lang="en" data-charts="drawn">' in dom
    assert dom.count('class="main-svg"') >= len(charts(full))
    lines = sum(len(chart["data"]) for chart in charts(full).values() if chart["data"][0]["type"] == "scatter")
    assert dom.count('class="scatterlayer mlayer"') >= 1
    assert len(re.findall(r'class="trace scatter trace', dom)) == lines


@needs_chromium
@pytest.mark.extras
def test_hostile_names_in_a_browser(tmp_path: Path) -> None:
    write_run(tmp_path, data=HOSTILE, name=HOSTILE)
    dom, log = browse(report(tmp_path, images=False))
    assert log == ""
    assert "<title>taken</title>" not in dom
    assert "<img" not in dom.replace("&lt;img", "")


@needs_chromium
@pytest.mark.extras
def test_an_error_on_the_page_would_be_seen(full: Path, tmp_path: Path) -> None:
    text = full.read_text(encoding="utf-8").replace("plotAll();\n</script>", "plotAll(); nothing();\n</script>")
    broken = tmp_path / "broken.html"
    broken.write_text(text, encoding="utf-8")
    assert "nothing is not defined" in browse(broken)[1]
