"""What a name or a path stands for, and the errors for those that stand for nothing."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from manymax.errors import ArgumentError, ManymaxError
from manymax.study.data.load import cache, load
from manymax.study.data.sources import SOURCES
from tests.study.data.reading import read, text


class TestLoad:
    @pytest.mark.parametrize(
        ("data", "options", "message"),
        [
            ("ml-1n", {}, "unknown data set 'ml-1n': did you mean 'ml-1m'.* There is no file of that name either"),
            ("nowhere/a.csv", {}, "nowhere/a.csv does not exist"),
            ("a.csv", {}, "a.csv does not exist"),
            ("planted", {"columns": {"user": "a"}}, "`columns` is for tables of your own; how planted is read"),
            ("ml-1m", {"size": "tiny"}, "`size` has a meaning for planted data only"),
            (
                "ml-1m",
                {"columns": {"user": "a"}},
                "`columns` is for tables of your own; how ml-1m is read",
            ),
        ],
    )
    def test_faults(self, data: str, options: dict, message: str) -> None:
        with pytest.raises(ManymaxError, match=message):
            load(data, **options)

    def test_a_name_is_preferred_to_a_folder_of_the_same_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("planted", "planted-tiny", "ml-1m"):
            (tmp_path / name).mkdir()
        assert load("planted-tiny").truth is not None
        with pytest.raises(ArgumentError, match=r"ml-1m has not been downloaded"):
            load("ml-1m", folder=tmp_path / "cache")
        with pytest.raises(ArgumentError, match=r"planted has no known format"):
            load("./planted")

    def test_unknown_formats(self, tmp_path: Path) -> None:
        (tmp_path / "a.xlsx").touch()
        for path in (tmp_path, tmp_path / "a.xlsx"):
            with pytest.raises(ArgumentError, match=r"has no known format: expected a table \(.csv, .tsv"):
                load(path)

    def test_the_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MANYMAX_CACHE", "/somewhere")
        assert cache() == Path("/somewhere")
        monkeypatch.delenv("MANYMAX_CACHE")
        assert cache().name == "manymax"

    def test_the_card_begins_with_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "own.csv.gz"
        path.write_bytes(gzip.compress(text().encode()))
        (step,) = read(path).card
        assert (step["step"], step["data"], step["interactions"]) == ("raw", "own", 3)
        (checksum,) = step["files"].values()
        assert len(checksum) == 64

    def test_every_source_has_a_title_terms_and_a_citation(self) -> None:
        for source in SOURCES.values():
            assert source.title
            assert not source.files or (source.read and source.terms and source.citation)
            for file in source.files:
                assert file.url.startswith("https://")
                assert os.path.basename(file.url) == file.name
                assert file.checksum is None or file.checksum.partition(":")[0] in ("md5", "sha256", "git")
