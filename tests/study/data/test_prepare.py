"""Filters against plain loops, the steps on the card, and the counts of the paper's table."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manymax.errors import ArgumentError, ManymaxError, UnknownNameError
from manymax.study.data.card import read_card
from manymax.study.data.interactions import Interactions
from manymax.study.data.prepare import Prepared, core, last_of_each_pair, prepare, rated, save

PAIRS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=80)


def table(pairs: list[tuple[int, int]], **more: torch.Tensor) -> Interactions:
    users, items = torch.tensor(pairs).T
    return Interactions(users, items, np.arange(10), np.arange(10), name="own", **more)


def pairs_of(interactions: Interactions) -> list[tuple[int, int]]:
    users, items = interactions.user_ids[interactions.users.numpy()], interactions.item_ids[interactions.items.numpy()]
    return list(zip(users.tolist(), items.tolist(), strict=True))


@given(PAIRS.map(lambda pairs: list(dict.fromkeys(pairs))), st.integers(1, 4))
def test_the_core_equals_that_of_a_slow_loop(pairs: list[tuple[int, int]], k_core: int) -> None:
    left = list(pairs)
    while True:  # one user or item at a time, in any order: the core is unique
        users, items = Counter(u for u, _ in left), Counter(i for _, i in left)
        short = next(((u, i) for u, i in left if users[u] < k_core or items[i] < k_core), None)
        if short is None:
            break
        left.remove(short)
    assert pairs_of(core(table(pairs), k_core)) == left


def test_core_says_how_large_it_is() -> None:
    pairs = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1), (3, 3)]
    (step,) = core(table(pairs), 2).card
    assert step == {
        "step": "k-core", "k_core": 2, "rounds": 1, "users": 2, "items": 2, "interactions": 4, "sparsity": 0.0
    }  # fmt: skip
    with pytest.raises(ArgumentError, match="`k_core` must be at least 1; got 0"):
        core(table(pairs), 0)


@given(PAIRS, st.data())
def test_the_last_of_each_pair_stays(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    values = st.lists(st.integers(0, 2), min_size=len(pairs), max_size=len(pairs))
    times, parts = data.draw(st.none() | values), data.draw(st.none() | values)
    best: dict[tuple[int, int], int] = {}
    for row, pair in enumerate(pairs):

        def rank(r: int) -> tuple[int, int, int]:
            return (-parts[r] if parts else 0, times[r] if times else 0, r)

        if pair not in best or rank(row) > rank(best[pair]):
            best[pair] = row
    more = {name: torch.tensor(column) for name, column in (("times", times), ("parts", parts)) if column is not None}
    kept = last_of_each_pair(table(pairs, ratings=torch.arange(len(pairs)).float(), **more))
    assert kept.ratings is not None
    assert kept.ratings.long().tolist() == sorted(best.values())
    assert bool(kept.card) == (len(best) < len(pairs))
    assert not kept.card or kept.card[0]["removed"] == len(pairs) - len(best)


def test_ratings_at_the_threshold_stay() -> None:
    kept = rated(table([(0, 0), (0, 1), (1, 2)], ratings=torch.tensor([3.0, 2.5, 5.0])), 3)
    assert pairs_of(kept) == [(0, 0), (1, 2)]
    assert kept.card[-1]["min_rating"] == 3
    with pytest.raises(ArgumentError, match="`min_rating` needs ratings, and own has none"):
        rated(table([(0, 0)]), 3)


@pytest.fixture
def ratings(tmp_path: Path) -> Path:
    """8 users x 6 items, all rated 5, except by user 7, who rates all items 2."""
    path = tmp_path / "ratings.csv"
    lines = [f"u{u},i{i},{5 if u < 7 else 2},{i}" for u in range(8) for i in range(6)]
    path.write_text("\n".join(["user,item,rating,time", *lines]))
    return path


def test_steps_come_in_their_order(ratings: Path) -> None:
    prepared = prepare(ratings, min_rating=3, k_core=6, split="leave-one-out")
    assert [step["step"] for step in prepared.card] == ["raw", "rating", "k-core", "split"]
    assert [step["users"] for step in prepared.card] == [8, 7, 7, 7]
    assert prepared.split.test.items.tolist() == [5] * 7
    assert prepared.truth is None
    assert list(prepared.interactions.user_ids) == [f"u{u}" for u in range(7)]


def test_an_error_names_the_steps_if_nothing_is_left(ratings: Path) -> None:
    with pytest.raises(ArgumentError, match=r"no interaction is left after .*raw \(48 left\), k-core \(0 left\)"):
        prepare(ratings, k_core=9)


class TestPresets:
    def test_of_a_set_by_the_name_of_the_file(self, ratings: Path) -> None:
        path = ratings.rename(ratings.with_name("ml-1m.csv"))
        prepared = prepare(path, preset="paper-table")
        assert [(s["step"], s.get("min_rating"), s.get("k_core")) for s in prepared.card[1:3]] == [
            ("rating", 3, None),
            ("k-core", None, 5),
        ]

    def test_of_a_set_by_name(self, ratings: Path) -> None:
        prepared = prepare(ratings, preset="paper-text", name="movielens-1m", k_core=2)
        assert prepared.interactions.name == "ml-1m"
        assert prepared.card[1]["min_rating"] == 3
        assert prepared.card[2]["k_core"] == 2, "what is given besides a preset counts more"

    def test_refused_for_own_files_and_unknown_ones(self, ratings: Path) -> None:
        with pytest.raises(ArgumentError, match=r"'ratings' is not one of them. .* `min_rating` and `k_core`"):
            prepare(ratings, preset="paper-table")
        with pytest.raises(ArgumentError, match="'planted' is not one of them"):
            prepare("planted-tiny", preset="paper-table")
        with pytest.raises(UnknownNameError, match="unknown preset of ml-1m 'paper-tabel': did you mean 'paper-table'"):
            prepare(ratings, preset="paper-tabel", name="ml-1m")


class TestPlanted:
    def test_truth_follows_the_numbers_through_the_filters(self) -> None:
        whole, core = prepare("planted-tiny"), prepare("planted-tiny", k_core=12)
        assert core.interactions.num_items < whole.interactions.num_items
        assert whole.truth is not None
        assert core.truth is not None
        kept = np.isin(whole.interactions.item_ids, core.interactions.item_ids)
        rows = torch.from_numpy(np.flatnonzero(np.isin(whole.interactions.user_ids, core.interactions.user_ids)))
        among = whole.truth.probs(rows)[:, torch.from_numpy(kept)]
        expected = among / among.sum(-1, keepdim=True)
        torch.testing.assert_close(core.truth.probs(torch.arange(core.split.num_users)), expected)

    def test_sizes(self) -> None:
        assert prepare("planted", size="60x40x10").split.num_users == 60
        assert prepare("planted-60x40x10").split.num_users == 60
        assert prepare("planted", size="tiny").card == prepare("planted-tiny").card

    @pytest.mark.parametrize(
        ("data", "size", "message"),
        [
            ("planted-tiyn", None, "unknown data set 'planted-tiyn': did you mean 'planted-tiny'"),
            ("planted", "tniy", "unknown size 'tniy': did you mean 'tiny'"),
            ("planted-tiny", "small", "`size` 'small' is not the size in the name 'planted-tiny'"),
            ("planted", "10x10x9", "`size` must have .* twice as many items; got '10x10x9'"),
            ("planted-10x10x2", None, "`size` must have .* 5 interactions"),
        ],
    )
    def test_wrong_sizes(self, data: str, size: str | None, message: str) -> None:
        with pytest.raises(ManymaxError, match=message):
            prepare(data, size=size)


class TestSave:
    def same(self, one: Prepared, other: Prepared) -> None:
        assert pairs_of(one.interactions) == pairs_of(other.interactions)
        for part in ("train", "valid", "test"):
            lists, others = getattr(one.split, part), getattr(other.split, part)
            assert lists.offsets.equal(others.offsets)
            ids = one.interactions.item_ids[lists.items.numpy()], other.interactions.item_ids[others.items.numpy()]
            assert ids[0].tolist() == ids[1].tolist()

    @pytest.mark.parametrize("own", [True, False])
    def test_what_was_saved_is_read_again(self, own: bool, ratings: Path, tmp_path: Path) -> None:
        prepared = prepare(ratings if own else "planted-tiny", k_core=5, seed=3)
        path = save(prepared, tmp_path / "out")
        self.same(prepared, prepare(path))
        assert read_card(path) == prepared.card
        assert sorted(p.name for p in path.parent.iterdir()) == [f"{path.stem}.card.json", path.name]

    def test_a_folder_that_cannot_be_written_to(self, ratings: Path) -> None:
        with pytest.raises(ManymaxError, match=r"ratings.csv cannot be written to"):
            save(prepare("planted-tiny"), ratings)


@pytest.mark.realdata
class TestPaper:
    """The counts in the paper's table, and those that the filters in its text give."""

    @pytest.mark.parametrize(
        ("name", "preset", "counts"),
        [
            ("ml-1m", "paper-table", (6_038, 3_307, 835_789)),
            ("ml-1m", "paper-text", (6_033, 3_123, 834_449)),
            ("gowalla", "paper-table", (29_858, 40_981, 1_027_370)),
            ("gowalla", "paper-text", (29_857, 40_979, 1_027_343)),
        ],
    )
    def test_presets(self, name: str, preset: str, counts: tuple[int, int, int]) -> None:
        prepared = prepare(data_folder() / f"{name}.parquet", preset=preset)
        assert tuple(prepared.card[-1][key] for key in ("users", "items", "interactions")) == counts
        split = prepared.split
        assert len(split.train.items) + len(split.valid.items) + len(split.test.items) == counts[2]

    def test_distributed_splits(self) -> None:
        last = prepare(data_folder() / "gowalla.parquet").card[-1]
        assert (last["train"] + last["valid"], last["test"]) == (810_128, 217_242)
        finer = prepare(data_folder() / "gowalla.parquet", columns={"split": "part"}).card[-1]
        assert (finer["train"], finer["valid"], finer["test"]) == (719_081, 91_047, 217_242)
        electronics = prepare(data_folder() / "electronics_10core.parquet").card[-1]
        assert (electronics["train"] + electronics["valid"], electronics["test"]) == (182_398, 52_123)

    def test_repeated_visits(self) -> None:
        card = prepare(data_folder() / "gowalla_checkins_subset.parquet", k_core=10).card
        assert [step["interactions"] for step in card[:3]] == [507_197, 285_141, 232_776]

    def test_a_position_is_an_order(self) -> None:
        prepared = prepare(data_folder() / "electronics_sequences.parquet", split="leave-one-out")
        assert prepared.card[-1]["test"] == 9_699
        assert "note" not in prepared.card[-1]


def data_folder() -> Path:
    folder = os.environ.get("MANYMAX_DATA")
    if not folder:
        pytest.skip("MANYMAX_DATA does not name the folder of the data")
    return Path(folder)


@pytest.mark.parametrize("name", ["a/b", "..", "a\\b", ""])
def test_a_name_must_not_be_a_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "own.csv").write_text("user,item\na,b\n", encoding="utf-8")
    with pytest.raises(ArgumentError, match="`name` becomes part of file names"):
        prepare(tmp_path / "own.csv", name=name)
