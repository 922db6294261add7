"""The data card as text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manymax.errors import ManymaxError
from manymax.study.data.card import CARD_HEADERS, card_notes, card_rows, describe, read_card
from manymax.study.data.prepare import prepare

COUNTS = {"users": 2, "items": 3, "interactions": 4, "sparsity": 1 / 3}


def test_every_step_has_a_row_of_its_own() -> None:
    card = prepare("planted-tiny", k_core=6, split="leave-one-out").card
    rows = card_rows(card)
    assert [row[0] for row in rows[:2]] == ["planted tiny, seed 0, all", "6-core"]
    assert rows[2][0].startswith("split leave-one-out: train ")
    assert all(len(row) == len(CARD_HEADERS) for row in rows)


def test_words() -> None:
    assert describe({"step": "rating", "min_rating": 3.0}) == "rating >= 3"
    assert describe({"step": "repeated pairs", "removed": 1234}) == "last of each pair, 1,234 rows removed"
    assert describe({"step": "raw", "data": "ml-1m"}) == "ml-1m, all"
    assert describe({"step": "something new"}) == "something new"


def test_notes() -> None:
    card = [{"step": "raw", "note": "a"}, {"step": "split", "users_in_train_only": 1200}]
    assert card_notes(card) == ["a", "1,200 users with fewer than 3 interactions are in training only"]


@pytest.mark.parametrize("asked", ["a.card.json", "a.parquet", ""])
def test_a_card_is_found_by_itself_its_table_and_its_folder(tmp_path: Path, asked: str) -> None:
    card = [{"step": "raw", "data": "a", **COUNTS}]
    (tmp_path / "a.card.json").write_text(json.dumps(card))
    assert read_card(tmp_path / asked) == card


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.card.json", "[", "a.card.json cannot be read"),
        ("a.card.json", '{"step": 1}', "a.card.json is not a data card"),
        ("a.card.json", '[{"step": "raw"}]', "a.card.json is not a data card"),
        ("a.csv", "user,item", "there is no data card at"),
    ],
)
def test_files_that_are_not_cards_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ManymaxError, match=message):
        read_card(tmp_path / name)


def test_a_folder_with_none_or_several(tmp_path: Path) -> None:
    with pytest.raises(ManymaxError, match="holds 0 data cards"):
        read_card(tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.card.json").write_text("[]")
    with pytest.raises(ManymaxError, match="holds 2 data cards"):
        read_card(tmp_path)
