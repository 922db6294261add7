"""Splits against a plain loop over users."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manymax.errors import ArgumentError
from manymax.study.data.interactions import Interactions, Split
from manymax.study.data.split import SPLITS, split_interactions


def table(users: list[int], times: list[int] | None = None, parts: list[int] | None = None) -> Interactions:
    """Row i is item i, so that an item tells its row."""
    count = len(users)
    return Interactions(
        torch.tensor(users),
        torch.arange(count),
        np.arange(max(users) + 1),
        np.arange(count),
        times=None if times is None else torch.tensor(times),
        parts=None if parts is None else torch.tensor(parts, dtype=torch.int8),
        name="own",
    )


def listed(split: Split) -> list[list[list[int]]]:
    """[user][part] -> items."""
    parts = (split.train, split.valid, split.test)
    return [[p.items[p.offsets[u] : p.offsets[u + 1]].tolist() for p in parts] for u in range(split.num_users)]


def in_time_order(rows: list[int], times: list[int] | None) -> list[int]:
    return rows if times is None else sorted(rows, key=lambda row: times[row])  # stable, as the tested code must be


# A few users with few rows, and one with 3 to 35.
USERS = st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(3, 35)).map(
    lambda drawn: [*drawn[0], *[5] * drawn[1]]
)


@given(USERS, st.data(), st.sampled_from(["ratio-time", "leave-one-out"]))
def test_in_time_order_the_last_are_held_out(users: list[int], data: st.DataObject, name: str) -> None:
    size = len(users)
    times = data.draw(st.none() | st.lists(st.integers(0, 3), min_size=size, max_size=size))  # with many ties
    split, _ = split_interactions(table(users, times), name)
    for user, parts in enumerate(listed(split)):
        rows = in_time_order([row for row, u in enumerate(users) if u == user], times)
        held = 0 if len(rows) < 3 else max(1, len(rows) // 10) if name == "ratio-time" else 1
        cuts = len(rows) - 2 * held, len(rows) - held
        assert parts == [rows[: cuts[0]], rows[cuts[0] : cuts[1]], rows[cuts[1] :]]


@given(USERS, st.data(), st.integers(0, 9))
def test_ratio_holds_out_a_tenth_of_each_user(users: list[int], data: st.DataObject, seed: int) -> None:
    size = len(users)
    times = data.draw(st.none() | st.lists(st.integers(0, 3), min_size=size, max_size=size))
    split, kept = split_interactions(table(users, times), "ratio", seed)
    assert kept.parts is not None
    for user, parts in enumerate(listed(split)):
        rows = [row for row, u in enumerate(users) if u == user]
        held = 0 if len(rows) < 3 else max(1, len(rows) // 10)
        assert sorted(row for part in parts for row in part) == rows
        assert list(map(len, parts)) == [len(rows) - 2 * held, held, held]
        assert parts == [in_time_order(sorted(part), times) for part in parts]
        assert all(kept.parts[row] == number for number, part in enumerate(parts) for row in part)


def test_ratio_chooses_every_row_equally_often(seed: int) -> None:
    """10 rows per user, one each for validation and test: a row is in each of them with probability 0.1."""
    users = 5000
    _, kept = split_interactions(table([user for user in range(users) for _ in range(10)]), "ratio", seed)
    assert kept.parts is not None
    parts = kept.parts.reshape(users, 10)
    for part in (1, 2):
        share = (parts == part).float().mean(0)
        assert ((share - 0.1).abs() < 4 * (0.1 * 0.9 / users) ** 0.5).all()


def test_the_seed_decides() -> None:
    users = [0] * 50 + [1] * 50
    one, again, other = (listed(split_interactions(table(users), "ratio", seed)[0]) for seed in (1, 1, 2))
    assert one == again != other


def test_a_given_split_is_kept() -> None:
    users, parts = [0, 1, 0, 1, 0], [2, 0, 1, 2, 0]
    split, kept = split_interactions(table(users, times=[9, 1, 2, 3, 4], parts=parts))
    assert listed(split) == [[[4], [2], [0]], [[1], [], [3]]]
    assert kept.card[-1]["split"] == "given"
    assert "note" not in kept.card[-1]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 0, 0, 2])), max_size=50), st.integers(0, 5))
def test_validation_is_taken_out_of_training_where_there_is_none(rows: list[tuple[int, int]], seed: int) -> None:
    users, parts = map(list, zip(*rows, (4, 0), (4, 0), (4, 2), strict=True))
    split, kept = split_interactions(table(users, parts=parts), "given", seed)
    for user, (train, valid, test) in enumerate(listed(split)):
        trained = [row for row, (u, part) in enumerate(zip(users, parts, strict=True)) if (u, part) == (user, 0)]
        assert len(valid) == (max(1, len(trained) // 10) if len(trained) >= 2 else 0)
        assert sorted(train + valid) == trained
        assert test == [row for row, (u, part) in enumerate(zip(users, parts, strict=True)) if (u, part) == (user, 2)]
    assert kept.card[-1]["note"] == "validation taken out of training"


def test_another_split_than_the_given_one_can_be_chosen() -> None:
    split, _ = split_interactions(table([0, 0, 0], parts=[2, 2, 2]), "leave-one-out")
    assert listed(split) == [[[0], [1], [2]]]


def test_the_card_says_what_was_done() -> None:
    _, kept = split_interactions(table([0, 0, 0, 1, 1, 2]), "leave-one-out")
    step = kept.card[-1]
    assert (step["train"], step["valid"], step["test"], step["users_in_train_only"]) == (4, 1, 1, 2)
    assert step["note"] == "no times: the order is that of the file"


@pytest.mark.parametrize(
    ("users", "parts", "split", "message"),
    [
        ([0, 0, 0], None, "given", "`split` 'given' needs a column .* own has none"),
        ([0, 0], None, "ratio", "own: split 'ratio' leaves no interaction for valid. Each user needs 3"),
        ([0, 0, 0], [2, 2, 1], None, "own: split 'given' leaves no interaction for train. The split column"),
        ([0, 0, 0], [0, 0, 0], None, "own: split 'given' leaves no interaction for test"),
        ([0, 0, 0], None, "ration", "`split` must be one of .* Did you mean 'ratio'"),
    ],
)
def test_data_that_cannot_be_split_is_refused(
    users: list[int], parts: list[int] | None, split: str | None, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        split_interactions(table(users, parts=parts), split)


def test_all_splits_are_named() -> None:
    assert SPLITS == ("ratio", "ratio-time", "leave-one-out", "given")
