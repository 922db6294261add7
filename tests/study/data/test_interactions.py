"""The data types against plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manymax.errors import ArgumentError
from manymax.study.data.interactions import PADDING, Interactions, Lists, Split

PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=40)


@given(PAIRS, st.integers(1, 5), st.none() | st.integers(1, 4))
def test_lists_are_the_items_of_each_user_in_order(
    pairs: list[tuple[int, int]], repeats: int, length: int | None
) -> None:
    users, items = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T
    lists = Lists.from_pairs(users, items, 6)
    plain = [[item for user, item in pairs if user == u] for u in range(6)]
    assert [lists.items[a:b].tolist() for a, b in zip(lists.offsets, lists.offsets[1:], strict=False)] == plain
    assert lists.lengths.tolist() == list(map(len, plain))
    assert lists.users().tolist() == [u for u, row in enumerate(plain) for _ in row]
    asked = torch.arange(6).repeat(repeats).flip(0)
    padded = lists.padded(asked, length)
    rows = [plain[u] if length is None else plain[u][-length:] for u in asked.tolist()]
    assert padded.shape == (len(asked), max(1, *map(len, rows)))
    assert [[item for item in row if item != PADDING] for row in padded.tolist()] == rows
    assert [row[: len(short)] for row, short in zip(padded.tolist(), rows, strict=True)] == rows


def test_padded_refuses_users_it_does_not_have() -> None:
    with pytest.raises(ArgumentError, match="`users` must be below 2; got 2"):
        Lists.from_pairs(torch.tensor([0, 1]), torch.tensor([0, 0]), 2).padded(torch.tensor([2]))


def test_popularity_counts_training_alone() -> None:
    one = Lists.from_pairs(torch.tensor([0, 0]), torch.tensor([1, 1]), 1)
    other = Lists.from_pairs(torch.tensor([0]), torch.tensor([2]), 1)
    assert Split(one, other, other, 4).counts().tolist() == [0, 2, 0, 0]


@given(PAIRS.filter(bool), st.data())
def test_rows_keep_their_ids_under_new_numbers(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    users, items = torch.tensor(pairs).T
    names = np.array([f"u{u}" for u in range(6)], dtype=object)
    places = torch.arange(len(pairs))
    table = Interactions(users, items, names, np.arange(8) * 10, places.float(), places, places.to(torch.int8))
    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(pairs), max_size=len(pairs))))
    kept = table.rows(keep)
    wanted = [(f"u{u}", i * 10) for (u, i), k in zip(pairs, keep.tolist(), strict=True) if k]
    assert list(zip(kept.user_ids[kept.users.numpy()], kept.item_ids[kept.items.numpy()], strict=True)) == wanted
    assert set(kept.user_ids) == {u for u, _ in wanted}
    assert set(kept.item_ids) == {i for _, i in wanted}
    for values in (kept.ratings, kept.times, kept.parts):
        assert values is not None
        assert values.tolist() == places[keep].tolist()


def test_the_card_counts() -> None:
    table = Interactions(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), np.arange(2), np.arange(2))
    (step,) = table.with_step("raw", note="n").card
    assert step == {"step": "raw", "note": "n", "users": 2, "items": 2, "interactions": 3, "sparsity": 0.25}
    assert table.rows(torch.zeros(3, dtype=torch.bool)).counts()["sparsity"] == 1.0
