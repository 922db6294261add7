"""Evaluation against loops over the whole table of scores."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import manymax
from manymax import ArgumentError
from manymax.study import evaluate as module
from manymax.study.backbones.mf import MF
from manymax.study.backbones.sasrec import SASRec
from manymax.study.data.batches import Batch
from manymax.study.data.interactions import Lists, Split
from manymax.study.evaluate import Evaluation, evaluate, known_lists, popularity

U, C, DIM = 25, 40, 5


def lists_of(rows: list[list[int]]) -> Lists:
    pairs = torch.tensor([(u, i) for u, items in enumerate(rows) for i in items], dtype=torch.long).reshape(-1, 2)
    return Lists.from_pairs(pairs[:, 0], pairs[:, 1], len(rows))


def some_split(seed: int) -> Split:
    """Lists of any length, some of them empty, without repetitions."""
    generator = torch.Generator().manual_seed(seed)
    parts: tuple[list[list[int]], ...] = ([], [], [])
    for user in range(U):
        items = torch.randperm(C, generator=generator).tolist()
        sizes = [0 if user == 3 else user % 9 + 1, user % 3, user % 4]
        for rows, size in zip(parts, sizes, strict=True):
            rows.append([items.pop() for _ in range(size)])
    return Split(*map(lists_of, parts), num_items=C)


def rows_of(lists: Lists) -> list[list[int]]:
    return [row[row >= 0].tolist() for row in (lists.padded(torch.tensor([user])) for user in range(len(lists)))]


def slow(scores: Tensor, split: Split, part: str, cutoff: int) -> dict[str, dict[int, float]]:
    """{metric: {user: value}} from scores (U, C) of all items."""
    found: dict[str, dict[int, float]] = {"ndcg": {}, "precision": {}, "recall": {}, "mrr": {}}
    train, valid, wanted = rows_of(split.train), rows_of(split.valid), rows_of(getattr(split, part))
    for user in range(U):
        seen = train[user] + (valid[user] if part == "test" else [])
        if not wanted[user]:
            continue
        order = [item for item in scores[user].argsort(descending=True).tolist() if item not in seen][:cutoff]
        ranks = [rank for rank, item in enumerate(order, start=1) if item in wanted[user]]
        ideal = sum(1 / math.log2(rank + 1) for rank in range(1, min(cutoff, len(wanted[user])) + 1))
        found["ndcg"][user] = sum(1 / math.log2(rank + 1) for rank in ranks) / ideal
        found["precision"][user] = len(ranks) / cutoff
        found["recall"][user] = len(ranks) / len(wanted[user])
        found["mrr"][user] = 1 / ranks[0] if ranks else 0.0
    return found


def assert_same(found: Evaluation, expected: dict[str, dict[int, float]], cutoff: int) -> None:
    for name, values in expected.items():
        assert found.users.tolist() == list(values)
        assert found.per_user[f"{name}@{cutoff}"].tolist() == pytest.approx(list(values.values()))
        assert found.mean[f"{name}@{cutoff}"] == pytest.approx(sum(values.values()) / len(values))


@pytest.mark.parametrize("block", [7, 1024])
@pytest.mark.parametrize("cutoff", [1, 4, 20, 60])
@pytest.mark.parametrize("part", ["valid", "test"])
def test_ranking_is_full_and_leaves_out_what_is_known(
    part: str, cutoff: int, block: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "USERS_AT_A_TIME", block)
    split, backbone = some_split(seed), MF(U, C, DIM)
    scores = (backbone.users.weight @ backbone.items.weight.T).detach() - 100  # all negative: order alone counts
    head = manymax.LinearSoftmaxLoss(None, C)
    found = evaluate(backbone, head, split, part, cutoffs=(2, cutoff))
    assert_same(found, slow(scores, split, part, cutoff), cutoff)
    assert_same(found, slow(scores, split, part, 2), 2)


def test_a_tree_ranks_by_its_own_vectors(seed: int) -> None:
    split, backbone = some_split(seed), MF(U, C, DIM)
    head = manymax.LinearHierarchicalSoftmaxLoss(DIM, C, manymax.HuffmanTree(torch.arange(1, C + 1)))
    scores = head.scores(backbone.users.weight).detach()
    assert_same(evaluate(backbone, head, split, "test", cutoffs=(5,)), slow(scores, split, "test", 5), 5)


@pytest.mark.parametrize("part", ["valid", "test"])
def test_a_history_is_all_that_is_known_and_dropout_is_off(part: str, seed: int) -> None:
    split, backbone = some_split(seed), SASRec(C, 6, max_length=4)
    scores = torch.empty(U, C)
    with torch.no_grad():
        for user, items in enumerate(rows_of(split.train)):
            latest = (items + (rows_of(split.valid)[user] if part == "test" else []))[-4:]
            history = torch.tensor([latest or [-100]])
            query = backbone.eval().queries(Batch(torch.tensor([user]), history), backbone.vectors())
            scores[user] = query[0] @ backbone.items.weight.T
    backbone.train()
    found = evaluate(backbone, manymax.LinearSoftmaxLoss(None, C), split, part, cutoffs=(6,))
    assert_same(found, slow(scores, split, part, 6), 6)
    assert backbone.training


def test_the_mode_of_training_comes_back_even_after_an_error(seed: int) -> None:
    backbone, head = SASRec(C, 6), manymax.LinearSoftmaxLoss(None, C)
    with pytest.raises(ArgumentError):
        evaluate(backbone.train(), head, some_split(seed), cutoffs=())
    assert backbone.training
    evaluate(backbone.eval(), head, some_split(seed))
    assert not backbone.training


def test_known_lists_keep_their_order() -> None:
    split = Split(lists_of([[5, 2], [], [7]]), lists_of([[9], [1], []]), lists_of([[0], [0], [0]]), 10)
    assert rows_of(known_lists(split, "valid")) == [[5, 2], [], [7]]
    assert rows_of(known_lists(split, "test")) == [[5, 2, 9], [1], [7]]


def test_repeated_interactions_count_once_and_known_ones_not_at_all() -> None:
    split = Split(lists_of([[0], [0]]), lists_of([[1], [1]]), lists_of([[2, 2, 0, 1], [0, 1]]), 4)
    found = popularity(split, "test", cutoffs=(1, 4))
    assert found.users.tolist() == [0]
    assert found.mean["recall@4"] == 1
    assert found.mean["precision@4"] == 1 / 4


def test_popularity_by_hand() -> None:
    """Counts 3, 2, 1, 0; user 0 knows item 0 and seeks 2, user 1 knows nothing and seeks 0 and 3."""
    split = Split(lists_of([[0], [], [0, 1], [0, 1, 2]]), lists_of([[2], [0, 3], [], []]), lists_of([[]] * 4), 4)
    found = popularity(split, "valid", cutoffs=(2,))
    assert found.users.tolist() == [0, 1]
    assert found.per_user["recall@2"].tolist() == [1, 1 / 2]
    assert found.per_user["mrr@2"].tolist() == [1 / 2, 1]
    assert found.mean["coverage@2"] == 3 / 4  # lists 1 2 and 0 1
    assert "coverage@2" not in found.per_user


class Law:
    """p(item | user), known."""

    def __init__(self, probs: Tensor) -> None:
        self.table = probs

    def probs(self, users: Tensor) -> Tensor:
        return self.table[users]


def test_regret_is_zero_for_the_true_ranking_alone(seed: int) -> None:
    split, backbone = some_split(seed), MF(U, C, DIM)
    head = manymax.LinearSoftmaxLoss(None, C)
    law = Law((backbone.users.weight @ backbone.items.weight.T).softmax(-1).detach())
    before = law.table.clone()
    for part in ("valid", "test"):
        ours = evaluate(backbone, head, split, part, cutoffs=(3, C + 5), truth=law)
        assert ours.per_user["regret@3"].abs().max() < 1e-6
        assert ours.per_user[f"regret@{C + 5}"].abs().max() < 1e-6
        worse = popularity(split, part, cutoffs=(3,), truth=law)
        assert worse.per_user["regret@3"].min() >= -1e-6
        assert worse.mean["regret@3"] > 0.1
    assert torch.equal(law.table, before)


def test_regret_by_loops(seed: int) -> None:
    split, law = some_split(seed), Law(torch.rand(U, C).softmax(-1))
    backbone = MF(U, C, DIM)
    found = evaluate(backbone, manymax.LinearSoftmaxLoss(None, C), split, "test", cutoffs=(4,), truth=law)
    scores = (backbone.users.weight @ backbone.items.weight.T).detach()
    for user, value in zip(found.users.tolist(), found.per_user["regret@4"].tolist(), strict=True):
        seen = rows_of(split.train)[user] + rows_of(split.valid)[user]
        free = [item for item in range(C) if item not in seen]
        p = law.table[user].tolist()

        def expected_dcg(order: list[int], p: list[float] = p) -> float:
            return sum(p[item] / math.log2(rank + 1) for rank, item in enumerate(order[:4], start=1))

        ours = expected_dcg(sorted(free, key=lambda item: -float(scores[user, item])))
        assert value == pytest.approx(1 - ours / expected_dcg(sorted(free, key=lambda item: -p[item])), abs=1e-5)


def test_metrics_can_be_chosen(seed: int) -> None:
    split = some_split(seed)
    assert list(popularity(split, metrics=["hr", "coverage"], cutoffs=(5,)).mean) == ["hit_rate@5", "coverage@5"]
    assert "regret@20" not in popularity(split).mean


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"part": "train"}, "`part` must be one of 'valid', 'test'; got 'train'"),
        ({"cutoffs": (0,)}, "`cutoffs` must hold numbers of at least 1"),
        ({"metrics": ["ndgc"]}, "unknown metric 'ndgc': did you mean 'ndcg'"),
        ({"metrics": ["regret"]}, "which needs `truth`"),
    ],
)
def test_wrong_arguments_are_refused(options: dict, complaint: str, seed: int) -> None:
    with pytest.raises(ValueError, match=complaint):
        evaluate(MF(U, C, DIM), manymax.LinearSoftmaxLoss(None, C), some_split(seed), **options)


def test_a_part_with_nothing_to_find_is_refused() -> None:
    split = Split(lists_of([[0]]), lists_of([[0]]), lists_of([[]]), 3)
    for part in ("valid", "test"):
        with pytest.raises(ArgumentError, match=f"nothing to find in its {part} part"):
            popularity(split, part)


def test_no_gradients_are_kept(seed: int) -> None:
    found = evaluate(MF(U, C, DIM), manymax.LinearSoftmaxLoss(None, C), some_split(seed))
    assert not any(value.requires_grad for value in found.per_user.values())
