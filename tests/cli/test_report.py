"""`manymax report`: where it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from manymax.cli.app import app
from manymax.errors import ManymaxError
from tests.study.report.generated import write_run


def test_the_path_of_the_page_is_printed(tmp_path: Path) -> None:
    write_run(tmp_path)
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "pages"), "--no-images"])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"report: {tmp_path / 'pages' / 'report.html'}\n"
    assert (tmp_path / "pages" / "report.html").is_file()
    assert not (tmp_path / "pages" / "figures").exists()


def test_the_report_is_in_the_folder_of_the_study_by_default(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert CliRunner().invoke(app, ["report", str(tmp_path), "--no-images"]).exit_code == 0
    assert "<h2>Results</h2>" in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore")
def test_runs_for_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    write_run(tmp_path / "runs")
    arguments = ["report", tmp_path / "runs", "--no-images", "--tensorboard", tmp_path / "logs"]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.stdout.splitlines()[0] == f"tensorboard: 1 new runs in {tmp_path / 'logs'}"
    assert len(list((tmp_path / "logs").glob("softmax-*"))) == 1


@pytest.mark.parametrize("name", ["none", "."])
def test_a_folder_without_runs_is_refused(tmp_path: Path, name: str) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path / name)])
    assert isinstance(result.exception, ManymaxError)
    assert "manymax study" in str(result.exception)
