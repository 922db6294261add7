"""The contract of backbones, tested on every row of `BACKBONES` and on one that is written outside of the package."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manymax
from manymax import FAMILY, ArgumentError
from manymax.heads.build import head_class
from manymax.members import REFERENCE_LOSSES
from manymax.study.backbones import BACKBONES, Backbone, BackboneEntry, Vectors
from manymax.study.backbones.base import Settings, draw_weights
from manymax.study.data.batches import Batch, Batches, training_batches
from manymax.study.data.interactions import Lists, Split
from manymax.study.evaluate import evaluate, known_lists, popularity
from manymax.study.seeds import generator

U, C, DIM = 40, 24, 8


class MeanOfHistory(Backbone):
    """A backbone from outside of the package: the mean of the latest items, times a matrix."""

    needs_history = True

    def __init__(self, num_items: int, dim: int, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length
        self.items, self.turn = nn.Embedding(num_items, dim), nn.Linear(dim, dim)

    def vectors(self) -> Vectors:
        return Vectors(self.items.weight)

    def queries(self, batch: Batch, vectors: Vectors) -> Tensor:
        assert batch.history is not None
        real = (batch.history >= 0).float()
        sums = (self.items(batch.history.clamp(min=0)) * real.unsqueeze(-1)).cumsum(1)
        means = self.turn(sums / real.cumsum(1).clamp(min=1).unsqueeze(-1))
        return means[real.bool()] if batch.every_position else means[:, -1]


def make_own(split: Split, settings: Settings, generator: torch.Generator) -> MeanOfHistory:
    backbone = MeanOfHistory(split.num_items, settings.dim, settings.max_length)
    draw_weights(backbone, settings, generator)
    return backbone


OWN = BackboneEntry(name="own", title="Own", make=make_own, citation="this file", needs_history=True)
ENTRIES = [*BACKBONES.values(), OWN]

each = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)


@dataclass(frozen=True)
class Choice:
    """The settings of small backbones."""

    dim: int = DIM
    layers: int = 2
    attention_heads: int = 2
    hidden: int = 12
    dropout: float = 0.2
    max_length: int = 6
    init: str = "normal"
    init_scale: float = 0.1
    scale: str = "dot"
    temperature: float = 0.25


@pytest.fixture(scope="module")
def board() -> Split:
    """A checkerboard: users like the items of their parity, 7 in training, 1 to validate, 2 to test."""
    rng = torch.Generator().manual_seed(0)
    rows = [2 * torch.randperm(C // 2, generator=rng)[:10] + user % 2 for user in range(U)]
    parts = [torch.stack([row[start:stop] for row in rows]) for start, stop in ((0, 7), (7, 8), (8, 10))]
    users = torch.arange(U)
    lists = [Lists.from_pairs(users.repeat_interleave(part.shape[1]), part.flatten(), U) for part in parts]
    return Split(*lists, num_items=C)


def build(entry: BackboneEntry, split: Split, seed: int = 0, **settings: Any) -> Backbone:
    return entry.build(split, replace(Choice(), **settings), generator(seed, "init"))


def batches_of(backbone: Backbone, split: Split, batch_size: int = 64, **options: Any) -> Batches:
    length = backbone.max_length or 1
    return training_batches(
        split, backbone, batch_size=batch_size, max_length=length, generator=generator(0, "shuffle"), **options
    )


def asking(backbone: Backbone, split: Split, users: Tensor | None = None) -> Batch:
    """The batch with which users are evaluated: all that training knows of them, and no target."""
    users = torch.arange(U) if users is None else users
    known = known_lists(split, "test")
    return Batch(users, known.padded(users, backbone.max_length) if backbone.needs_history else None)


def scores_of(backbone: Backbone, split: Split) -> Tensor:
    with torch.no_grad():
        vectors = backbone.eval().vectors()
        return backbone.queries(asking(backbone, split), vectors) @ vectors.items.T


def heads() -> dict[str, Any]:
    """A head for every member of the family and every reference loss, for the vectors of a backbone."""
    made: dict[str, Any] = {}
    for member in (*FAMILY.values(), *REFERENCE_LOSSES.values()):
        tree = {"tree": manymax.HuffmanTree(torch.arange(1, C + 1))} if member.kind == "tree" else {}
        made[member.name] = head_class(member)(DIM if tree else None, C, **tree)
    return made


def loss_of(backbone: Backbone, head: nn.Module, batch: Batch) -> Tensor:
    vectors = backbone.vectors()
    queries = backbone.queries(batch, vectors)
    return head(queries, batch.target, vectors.for_head(head))


def train(backbone: Backbone, head: nn.Module, split: Split, steps: int = 60) -> None:
    """Train by steps on all positives at once."""
    optimizer = torch.optim.Adam([*backbone.parameters(), *head.parameters()], lr=0.05)
    batch = batches_of(backbone.train(), split, batch_size=split.train.items.numel())[0]
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(backbone, head, batch).backward()
        optimizer.step()


def right_colour(backbone: Backbone, head: Any, split: Split) -> float:
    """The share of the three best unseen items of all users that have the user's colour; 1/4 by chance."""
    vectors, users = backbone.eval().vectors(), torch.arange(U)
    queries, exclude = backbone.queries(asking(backbone, split), vectors), known_lists(split, "test").padded(users)
    ids = head.topk(queries, 3, vectors.for_head(head), exclude)[1]
    return float((ids % 2 == users.unsqueeze(1) % 2).double().mean())


# Shapes and weights ------------------------------------------------------------------------------


@each
def test_shapes(entry: BackboneEntry, board: Split) -> None:
    backbone = build(entry, board)
    vectors = backbone.vectors()
    assert vectors.items.shape == (C, DIM)
    assert vectors.users is None or vectors.users.shape == (U, DIM)
    assert backbone.queries(asking(backbone, board), vectors).shape == (U, DIM)
    assert (backbone.max_length is not None) == backbone.needs_history == entry.needs_history
    for options in ({"batches": "pairs", "positions": "all"}, {"batches": "users", "positions": "prefix"}):
        for batch in batches_of(backbone, board, **options):
            target = batch.target if isinstance(batch.target, Tensor) else batch.target.ids
            assert backbone.queries(batch, vectors).shape == (len(target), DIM)


@each
def test_gradients_reach_all_parameters(entry: BackboneEntry, board: Split) -> None:
    backbone = build(entry, board)
    for batch in batches_of(backbone, board):
        loss_of(backbone, manymax.LinearSoftmaxLoss(None, C), batch).backward()
    for name, parameter in backbone.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@each
def test_gradients_reach_the_items_of_a_history(entry: BackboneEntry, board: Split) -> None:
    backbone = build(entry, board).eval()
    if not backbone.needs_history:
        pytest.skip("reads no histories")
    batch = asking(backbone, board, torch.tensor([2]))
    (backbone.queries(batch, backbone.vectors()) @ torch.arange(DIM).float()).sum().backward()
    assert backbone.items.weight.grad.any(1).nonzero().flatten().tolist() == sorted(batch.history[0].tolist())


@each
@pytest.mark.parametrize("scale", ["dot", "cosine"])
def test_a_saved_and_loaded_backbone_scores_the_same(entry: BackboneEntry, scale: str, board: Split) -> None:
    backbone, other = build(entry, board, 1, scale=scale), build(entry, board, 2, scale=scale)
    assert not torch.equal(scores_of(backbone, board), scores_of(other, board))
    other.load_state_dict(backbone.state_dict())
    assert torch.equal(scores_of(backbone, board), scores_of(other, board))


@each
def test_first_weights_come_from_the_generator_alone(entry: BackboneEntry, board: Split) -> None:
    torch.manual_seed(1)
    first = build(entry, board, 5)
    torch.manual_seed(2)
    for one, two in zip(first.parameters(), build(entry, board, 5).parameters(), strict=True):
        assert torch.equal(one, two)


@each
def test_init_and_its_scale(entry: BackboneEntry, board: Split) -> None:
    """The standard deviation of n normal draws has a standard error of about 1 / sqrt(2 n)."""
    for settings, expected in (
        ({"init_scale": 0.02}, 0.02),
        ({"init_scale": 0.5}, 0.5),
        ({"init": "xavier"}, (2 / (C + DIM)) ** 0.5),
    ):
        items = build(entry, board, **settings).items
        assert isinstance(items, nn.Embedding)
        deviation = float(items.weight.detach().std()) / expected - 1
        assert abs(deviation) < 4 / (2 * C * DIM) ** 0.5


@each
def test_cosine_scores_are_those_of_unit_vectors(entry: BackboneEntry, board: Split) -> None:
    plain, scaled = build(entry, board), build(entry, board, scale="cosine", temperature=0.2)
    with torch.no_grad():
        vectors = plain.eval().vectors()
        queries = plain.queries(asking(plain, board), vectors)
    expected = nn.functional.cosine_similarity(queries.unsqueeze(1), vectors.items, dim=-1) / 0.2
    torch.testing.assert_close(scores_of(scaled, board), expected)
    assert scaled.needs_history == plain.needs_history
    assert scaled.max_length == plain.max_length


@each
def test_wrong_settings_are_refused(entry: BackboneEntry, board: Split) -> None:
    for settings, complaint in (
        ({"init": "uniform"}, "`init` must be one of 'normal', 'xavier'"),
        ({"scale": "cos"}, "`scale` must be one of 'dot', 'cosine'"),
        ({"scale": "cosine", "temperature": 0.0}, "`temperature` must be positive; got 0.0"),
    ):
        with pytest.raises(ArgumentError, match=complaint):
            build(entry, board, **settings)


# Rows --------------------------------------------------------------------------------------------


@each
def test_a_row_does_not_depend_on_the_others(entry: BackboneEntry, board: Split) -> None:
    backbone = build(entry, board).eval()
    vectors, users = backbone.vectors(), torch.tensor([7, 3, 30])
    together = backbone.queries(asking(backbone, board, users), vectors)
    for row, user in zip(together, users, strict=True):
        alone = backbone.queries(asking(backbone, board, user.unsqueeze(0)), vectors)
        torch.testing.assert_close(alone.squeeze(0), row)


@each
def test_each_position_knows_only_what_came_before(entry: BackboneEntry, board: Split) -> None:
    """The query of position t is that of the first t items alone, whatever follows and however much is padded."""
    backbone = build(entry, board).eval()
    if not backbone.needs_history:
        pytest.skip("reads no histories")
    histories = torch.tensor([[1, 2, 3, 4, 5], [6, 7, -100, -100, -100], [8, 9, 10, -100, -100]])
    lengths, vectors = (5, 2, 3), backbone.vectors()
    batch = Batch(torch.arange(3), histories, torch.zeros(10, dtype=torch.long), every_position=True)
    found = iter(backbone.queries(batch, vectors))
    for row, length in zip(histories, lengths, strict=True):
        for stop in range(1, length + 1):
            alone = backbone.queries(Batch(torch.arange(1), row[None, :stop]), vectors)
            torch.testing.assert_close(next(found), alone.squeeze(0))


@each
def test_evaluation_draws_nothing(entry: BackboneEntry, board: Split) -> None:
    backbone = build(entry, board, dropout=0.9)
    assert torch.equal(scores_of(backbone, board), scores_of(backbone, board))


# Learning ----------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("scale", ["dot", "cosine"])
def test_the_checkerboard_is_learned(entry: BackboneEntry, scale: str, board: Split) -> None:
    backbone, head = build(entry, board, scale=scale), manymax.LinearSoftmaxLoss(None, C)
    assert right_colour(backbone, head, board) < 0.5
    train(backbone, head, board)
    assert right_colour(backbone, head, board) > 0.85
    found = evaluate(backbone, head, board, "test", cutoffs=(4,)).mean["recall@4"]
    assert found > popularity(board, "test", cutoffs=(4,)).mean["recall@4"] + 0.2


@each
@pytest.mark.parametrize("loss", heads())
def test_every_loss_runs_on_every_backbone(entry: BackboneEntry, loss: str, board: Split) -> None:
    """A step has finite gradients, and some steps on one batch lower its loss."""
    torch.manual_seed(0)
    head, backbone = heads()[loss], build(entry, board, dropout=0.0)
    draws = head.generator = torch.Generator()
    batch = batches_of(backbone, board, batch_size=280)[0]
    parameters = [*backbone.parameters(), *head.parameters()]
    optimizer, values = torch.optim.Adam(parameters, lr=0.02), []
    for _ in range(15):
        draws.manual_seed(3)  # the same negatives in every step
        optimizer.zero_grad()
        value = loss_of(backbone, head, batch)
        value.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in parameters)  # a tree leaves item vectors alone
        optimizer.step()
        values.append(float(value.detach()))
    assert values[-1] < values[0] - 0.01
    assert evaluate(backbone, head, board, "test", cutoffs=(5,)).mean["ndcg@5"] > 0


@each
@pytest.mark.parametrize("loss", heads())
@pytest.mark.slow
def test_every_loss_learns_the_checkerboard_on_every_backbone(entry: BackboneEntry, loss: str, board: Split) -> None:
    torch.manual_seed(0)
    head, backbone = heads()[loss], build(entry, board)
    slow = getattr(head, "t", None) is not None  # the sum over 100 negatives of gBCE pushes all scores down at first
    if slow and not entry.factors:
        pytest.skip("so few steps at this rate are not enough for gBCE where queries share their weights")
    train(backbone, head, board, steps=120 if slow else 60)
    assert right_colour(backbone, head, board) > 0.6
