"""Batches: each epoch has every pair of the training part once, and grouping pairs does not change the loss."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import manymax
from manymax import ArgumentError
from manymax.engine.target import Target
from manymax.study.data.batches import Batch, Batches, training_batches
from manymax.study.data.interactions import Lists, Split
from manymax.study.seeds import generator

BY_ID, BY_HISTORY = SimpleNamespace(needs_history=False), SimpleNamespace(needs_history=True)
C = 30

items = st.lists(st.integers(0, C - 1), max_size=12)
ragged = st.lists(items, min_size=1, max_size=15).map(lambda lists: [*lists, [3, 8]])  # one with two items


def split_of(lists: list[list[int]]) -> Split:
    pairs = [(user, item) for user, items in enumerate(lists) for item in items]
    users, items = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T
    train, empty = Lists.from_pairs(users, items, len(lists)), torch.zeros(0, dtype=torch.long)
    nothing = Lists.from_pairs(empty, empty, len(lists))
    return Split(train, nothing, nothing, C)


def epoch(split: Split, reader: SimpleNamespace, batch_size: int = 8, seed: int = 0, **options) -> Batches:
    return training_batches(split, reader, batch_size=batch_size, generator=generator(seed, "shuffle"), **options)


def pairs_of(batch: Batch) -> Counter[tuple[int, int]]:
    """The (user, item) pairs of a grouped target, and how often each counts."""
    target = batch.target
    assert isinstance(target, Target)
    assert target.ids is not None
    found: Counter[tuple[int, int]] = Counter()
    for user, ids, weights in zip(batch.users, target.ids, target.weights, strict=True):
        for item, weight in zip(ids, weights, strict=True):
            if weight:
                found[int(user), int(item)] += int(weight)
    return found


@settings(max_examples=40)
@given(ragged, st.integers(1, 20), st.sampled_from(["pairs", "chunks", "users"]))
def test_an_epoch_holds_every_pair_once(lists: list[list[int]], batch_size: int, batches: str) -> None:
    found: Counter[tuple[int, int]] = Counter()
    for batch in epoch(split_of(lists), BY_ID, batch_size, batches=batches):
        assert batch.history is None
        assert batch.users.unique().numel() == batch.users.numel()
        found += pairs_of(batch)
    assert found == Counter((user, item) for user, items in enumerate(lists) for item in items)


@settings(max_examples=40)
@given(ragged, st.integers(1, 20))
def test_batches_of_pairs_are_full(lists: list[list[int]], batch_size: int) -> None:
    sizes = [pairs_of(batch).total() for batch in epoch(split_of(lists), BY_ID, batch_size)]
    assert all(size == batch_size for size in sizes[:-1])
    assert all(0 < size <= batch_size for size in sizes[-1:])


@settings(max_examples=40)
@given(ragged, st.integers(1, 5))
def test_chunks_hold_a_few_pairs_of_one_user_each(lists: list[list[int]], chunk: int) -> None:
    whole = epoch(split_of(lists), BY_ID, 1, batches="chunks", chunk=chunk)  # batches of one pair show the order
    order = [int(batch.users) for batch in whole]
    runs = [(user, len(list(group))) for user, group in itertools.groupby(order)]
    for user, items in enumerate(lists):
        mine = [length for owner, length in runs if owner == user]
        assert sum(mine) == len(items)
        assert len(mine) <= math.ceil(len(items) / chunk)  # two neighbouring chunks of one user look like one


@settings(max_examples=40)
@given(ragged, st.integers(2, 5))
def test_chunks_equal_those_of_a_slow_python_version(lists: list[list[int]], chunk: int) -> None:
    """The same two random draws in plain Python: the results in stored records depend on this order."""
    train, rng = split_of(lists).train, generator(0, "shuffle")
    users, by_user = train.users().tolist(), [[] for _ in lists]
    for pair in torch.randperm(len(users), generator=rng).tolist():
        by_user[users[pair]].append(pair)
    chunks = [pairs[i : i + chunk] for pairs in by_user for i in range(0, len(pairs), chunk)]
    places = torch.randperm(len(chunks), generator=rng).tolist()
    expected = [pair for _, each in sorted(zip(places, chunks, strict=True)) for pair in each]
    found = epoch(split_of(lists), BY_ID, len(users), batches="chunks", chunk=chunk).rows[0]
    assert found.tolist() == expected


def test_chunks_differ_between_seeds_and_do_not_follow_the_order_of_the_list() -> None:
    split = split_of([list(range(12))] * 3)
    seen = {tuple(int(b.target.ids[0, 0]) for b in epoch(split, BY_ID, 1, seed, batches="chunks")) for seed in range(5)}
    assert len(seen) == 5


@settings(max_examples=40)
@given(ragged, st.integers(1, 20))
def test_batches_of_users_keep_users_whole_and_have_about_as_many_pairs(lists: list[list[int]], size: int) -> None:
    found = [pairs_of(batch) for batch in epoch(split_of(lists), BY_ID, size, batches="users")]
    seen = [user for batch in found for user in {user for user, _ in batch}]
    assert len(seen) == len(set(seen))
    assert all(0 < batch.total() < size + max(map(len, lists)) for batch in found)
    assert len(found) <= math.ceil(sum(map(len, lists)) / size)


def test_rows_fill_a_batch_before_the_next_begins() -> None:
    users = split_of([[1, 2]] * 4)
    assert [pairs_of(batch).total() for batch in epoch(users, BY_ID, 4, batches="users")] == [4, 4]
    long = split_of([list(range(12))] * 4)
    assert [len(batch.target) for batch in epoch(long, BY_HISTORY, 4, max_length=2)] == [4, 4]


@pytest.mark.parametrize("batches", ["pairs", "users"])
def test_the_loss_of_a_batch_is_that_of_its_pairs(batches: str, seed: int) -> None:
    lists = [[1, 2, 3, 3], [4], [], [5, 6, 1, 2, 9, 3, 3, 3], [7, 8]]
    vectors, queries = torch.randn(C, 4), torch.randn(len(lists), 4)
    for batch in epoch(split_of(lists), BY_ID, 6, seed, batches=batches):
        pairs = torch.tensor(list(pairs_of(batch).elements()))
        expected = torch.nn.functional.cross_entropy(queries[pairs[:, 0]] @ vectors.T, pairs[:, 1])
        loss = manymax.linear_softmax_loss(queries[batch.users], vectors, batch.target)
        torch.testing.assert_close(loss, expected)


def rows_of(batch: Batch) -> list[tuple[int, tuple[int, ...]]]:
    assert batch.history is not None
    for row in batch.history.tolist():  # padding only at the end
        real = [item != -100 for item in row]
        assert real == sorted(real, reverse=True)
    return [
        (int(user), tuple(item for item in row if item != -100))
        for user, row in zip(batch.users, batch.history.tolist(), strict=True)
    ]


@settings(max_examples=40)
@given(ragged, st.integers(1, 20), st.integers(1, 6))
def test_all_positions_are_one_row_per_user(lists: list[list[int]], batch_size: int, max_length: int) -> None:
    found = {}
    for batch in epoch(split_of(lists), BY_HISTORY, batch_size, max_length=max_length):
        assert batch.every_position
        assert isinstance(batch.target, Tensor)
        targets = iter(batch.target.tolist())
        for user, history in rows_of(batch):
            assert user not in found
            found[user] = history, tuple(itertools.islice(targets, len(history)))
        assert next(targets, None) is None
        assert batch.target.numel() < batch_size + max_length
    expected = {}
    for user, items in enumerate(lists):
        latest = items[-(max_length + 1) :]
        if len(latest) > 1:
            expected[user] = tuple(latest[:-1]), tuple(latest[1:])
    assert found == expected


@settings(max_examples=40)
@given(ragged, st.integers(1, 20), st.integers(1, 6))
def test_windows_hold_every_position_once(lists: list[list[int]], batch_size: int, max_length: int) -> None:
    found: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)
    for batch in epoch(split_of(lists), BY_HISTORY, batch_size, positions="windows", max_length=max_length):
        assert batch.every_position
        assert isinstance(batch.target, Tensor)
        assert batch.target.numel() < batch_size + max_length
        targets = iter(batch.target.tolist())
        for user, history in rows_of(batch):
            found[user].append((history, tuple(itertools.islice(targets, len(history)))))
        assert next(targets, None) is None
    for user, items in enumerate(lists):
        expected = Counter(itertools.pairwise(items))
        assert Counter(pair for window in found[user] for pair in zip(*window, strict=True)) == expected
        assert all(history[1:] == targets[:-1] for history, targets in found[user])  # without a gap
        lengths = sorted(len(history) for history, _ in found[user])
        assert all(length == max_length for length in lengths[2:])  # only the first and the last may be shorter


def test_windows_are_cut_at_other_places_in_each_epoch() -> None:
    split = split_of([list(range(C)) for _ in range(20)])

    def lengths(seed: int) -> list[int]:
        batches = epoch(split, BY_HISTORY, 10, seed, positions="windows", max_length=4)
        return sorted(len(history) for batch in batches for _, history in rows_of(batch))

    assert lengths(1) != lengths(2)


@settings(max_examples=40)
@given(ragged, st.integers(1, 20), st.integers(1, 6))
def test_prefixes_are_one_row_per_item(lists: list[list[int]], batch_size: int, max_length: int) -> None:
    found: Counter[tuple[int, tuple[int, ...], int]] = Counter()
    sizes = []
    for batch in epoch(split_of(lists), BY_HISTORY, batch_size, positions="prefix", max_length=max_length):
        assert not batch.every_position
        assert isinstance(batch.target, Tensor)
        sizes.append(batch.target.numel())
        found.update((*row, target) for row, target in zip(rows_of(batch), batch.target.tolist(), strict=True))
    assert found == Counter(
        (user, tuple(items[max(0, place - max_length) : place]), items[place])
        for user, items in enumerate(lists)
        for place in range(1, len(items))
    )
    assert all(size == batch_size for size in sizes[:-1])


MODES = [
    (BY_ID, {"batches": "pairs"}),
    (BY_ID, {"batches": "users"}),
    (BY_HISTORY, {"positions": "all"}),
    (BY_HISTORY, {"positions": "windows"}),
    (BY_HISTORY, {"positions": "prefix"}),
]


@pytest.mark.parametrize(("reader", "options"), MODES)
def test_the_order_depends_on_the_generator_only(reader: SimpleNamespace, options: dict[str, str]) -> None:
    split = split_of([[(user * 7 + place) % C for place in range(9)] for user in range(20)])

    def users(seed: int) -> list[int]:
        return [user for batch in epoch(split, reader, 10, seed, **options) for user in batch.users.tolist()]

    assert users(1) == users(1)
    assert users(1) != users(2)


@pytest.mark.parametrize(("reader", "options"), MODES)
def test_a_batch_can_be_asked_for_by_its_number(reader: SimpleNamespace, options: dict[str, str]) -> None:
    split = split_of([[(user * 7 + place) % C for place in range(9)] for user in range(20)])
    batches = epoch(split, reader, 10, **options)
    listed = list(batches)
    assert len(listed) == len(batches) > 3
    for number, batch in enumerate(listed):
        assert torch.equal(batches[number].users, batch.users)


@settings(max_examples=20)
@given(
    ragged, st.integers(1, 20), st.sampled_from([*MODES, (BY_ID, {"batches": "chunks"}), (BY_ID, {"grouped": False})])
)
def test_numbered_pairs_are_places_in_the_training_part(
    lists: list[list[int]], size: int, mode: tuple[SimpleNamespace, dict[str, str]]
) -> None:
    split, (reader, options) = split_of(lists), mode
    owner, plain = split.train.users(), epoch(split, reader, size, max_length=3, **options)
    for batch, usual in zip(epoch(split, reader, size, max_length=3, numbered=True, **options), plain, strict=True):
        assert usual.pair_ids is None
        assert batch.pair_ids is not None
        grouped, same = batch.target, usual.target
        if isinstance(grouped, Target) and isinstance(same, Target):
            assert grouped.ids is not None and same.ids is not None  # noqa: PT018
            real = grouped.weights > 0
            target, users, numbers = grouped.ids[real], batch.users.repeat_interleave(real.sum(1)), batch.pair_ids[real]
            assert torch.equal(grouped.ids, same.ids)
        else:
            assert isinstance(grouped, Tensor) and isinstance(same, Tensor)  # noqa: PT018
            target, users, numbers = grouped, batch.users, batch.pair_ids
            if batch.every_position and batch.history is not None:
                users = users.repeat_interleave((batch.history >= 0).sum(1))
            assert torch.equal(grouped, same)
        assert torch.equal(split.train.items[numbers], target)
        assert torch.equal(owner[numbers], users)
        assert numbers.unique().numel() == numbers.numel()


def test_a_pair_has_the_same_number_in_every_epoch_and_no_other_pair_has_it() -> None:
    split = split_of([[3, 1, 4], [1, 5, 9, 2, 6], [5, 3]])
    whole = {"all": 3, "windows": 3, "prefix": 3, "pairs": 0, "users": 0, "chunks": 0}  # first items are no targets
    for mode, left_out in whole.items():
        reader, option = (BY_HISTORY, "positions") if left_out else (BY_ID, "batches")
        for seed in (0, 1):
            batches = epoch(split, reader, 4, seed, numbered=True, **{option: mode})
            numbers = torch.cat(
                [
                    batch.pair_ids[batch.target.weights > 0] if isinstance(batch.target, Target) else batch.pair_ids
                    for batch in batches
                ]
            )
            assert numbers.sort().values.tolist() == [i for i in range(10) if not left_out or i not in (0, 3, 8)]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"batches": "pair"}, "`batches` must be one of 'pairs', 'chunks', 'users'; got 'pair'"),
        ({"positions": "last"}, "`positions` must be one of 'all', 'windows', 'prefix'; got 'last'"),
        ({"batch_size": 0}, "`batch_size` must be at least 1; got 0"),
        ({"max_length": 0}, "`max_length` must be at least 1; got 0"),
    ],
)
def test_wrong_options_are_refused(options: dict, complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        epoch(split_of([[1, 2]]), BY_ID, **options)


@pytest.mark.parametrize(("reader", "options"), MODES)
def test_data_without_anything_to_learn_is_refused(reader: SimpleNamespace, options: dict[str, str]) -> None:
    lists = [[1], [2], []] if reader.needs_history else [[], []]
    with pytest.raises(ArgumentError, match="`split` has nothing to train on"):
        epoch(split_of(lists), reader, **options)
