"""LambdaRank, LambdaLoss and LambdaLoss@K against python loops over all pairs: the plain loss, and every back end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import manymax
from manymax import FAMILY
from manymax.distributed import ShardedHead
from manymax.engine import native_library
from manymax.errors import ArgumentError, ArgumentTypeError

INF = math.inf
BACKENDS = ("torch", *(f"native-{level}" for level in native_library.levels_here()))
VARIANTS = [(variant, k) for variant in ("distance", "lambdaloss", "lambdarank") for k in (0, 1, 3, 20)]


def discount(rank: int) -> float:
    return math.log2(1 + rank)


def delta(own: int, other: int, variant: str, k: int) -> float:
    """The weight of a pair, from the ranks of a positive and a negative."""
    if variant == "lambdarank":
        first, second = (0 if k and rank > k else 1 / discount(rank) for rank in (own, other))
        return abs(first - second)
    near = 1 / discount(abs(own - other))
    if variant == "lambdaloss":
        near -= 1 / discount(abs(own - other) + 1)
    lower = max(own, other)
    return near / (1 - 1 / discount(lower)) if k and lower > k else near


def ranks(scores: Sequence[float], positives: Sequence[int]) -> dict[int, int]:
    """{class: rank} of the classes that are not masked: of equal scores positives last, and lower numbers first."""
    live = [c for c, s in enumerate(scores) if s > -INF]
    return {c: rank for rank, c in enumerate(sorted(live, key=lambda c: (-scores[c], c in positives, c)), 1)}


def slow(
    scores: Sequence[float], positives: Sequence[int], weight: Sequence[float], variant: str, k: int, sigma: float
) -> tuple[float, list[float]]:
    """The loss of one row and its gradient, pair by pair."""
    rank = ranks(scores, positives)
    ideal = sum(1 / discount(i) for i in range(1, len(positives) + 1) if not k or i <= k) or 1.0
    loss, gradient = 0.0, [0.0] * len(scores)
    for y in positives:
        for j in set(rank) - set(positives):
            factor = weight[y] * delta(rank[y], rank[j], variant, k) / ideal
            d = sigma * (scores[j] - scores[y])
            small = math.exp(-abs(d))  # never overflows
            loss += factor * (max(d, 0.0) + math.log1p(small)) / math.log(2)
            slope = factor * sigma * (1 if d > 0 else small) / (1 + small) / math.log(2)
            gradient[j] += slope
            gradient[y] -= slope
    return loss, gradient


def slow_rows(scores: Tensor, lists: Sequence[Sequence[int]], weight: Tensor, **own: Any) -> list[Tensor]:
    """The losses of all rows, (rows,), and their gradients, (rows, C)."""
    found = [slow(row, ids, weight.tolist(), **own) for row, ids in zip(scores.tolist(), lists, strict=True)]
    return [torch.tensor([part[i] for part in found], dtype=torch.float64) for i in (0, 1)]


def padded(lists: Sequence[Sequence[int]]) -> Tensor:
    """Ids (rows, P) from one list per row."""
    width = max(1, *map(len, lists))
    return torch.tensor([[*row, *[-100] * (width - len(row))] for row in lists])


def agree(found: Tensor, leaf: Tensor, expected: list[Tensor], tolerance: float = 1e-10) -> None:
    """Fail unless losses (rows,), and the gradient of their sum in a leaf (rows, C), are those expected."""
    gradient = torch.autograd.grad(found.sum(), leaf)[0]
    for ours, theirs in zip((found.detach(), gradient), expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


@st.composite
def rows(draw: st.DrawFn) -> tuple[Tensor, list[list[int]]]:
    """Scores (rows, C) with ties, zeros of both signs and masks, and the positives of each row."""
    classes, count = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    number = st.integers(-3, 3).map(lambda n: n / 2) | st.sampled_from([-0.0, 1e4, -1e4, -INF]) | st.floats(-9, 9)
    values = draw(st.lists(st.lists(number, min_size=classes, max_size=classes), min_size=count, max_size=count))
    lists = draw(st.lists(st.sets(st.integers(0, classes - 1)), min_size=count, max_size=count))
    for row, positives in zip(values, lists, strict=True):
        for c in positives or {0}:
            row[c] = 0.25 if row[c] == -INF else row[c]
    return torch.tensor(values, dtype=torch.float64), [sorted(positives) for positives in lists]


@given(rows(), st.sampled_from(VARIANTS), st.sampled_from([0.5, 1.0, 2.0]))
@settings(max_examples=40)
def test_loss_and_gradient_are_those_of_loops_over_pairs(
    case: tuple[Tensor, list[list[int]]], variant: tuple[str, int], sigma: float
) -> None:
    scores, lists = case
    weight = 0.5 + torch.arange(scores.shape[1], dtype=torch.float64)
    own: dict[str, Any] = {"variant": variant[0], "k": variant[1], "sigma": sigma}
    expected = slow_rows(scores, lists, weight, **own)
    hot = torch.tensor([[c in row for c in range(scores.shape[1])] for row in lists])
    for target in (padded(lists), hot):
        leaf = scores.clone().requires_grad_()
        given: dict[str, Any] = {"weight": weight, "reduction": "none", **own}
        agree(manymax.lambda_loss(leaf, target, **given), leaf, expected)
        normalized = manymax.lambda_loss(scores, target, multilabel="normalized", **given)
        torch.testing.assert_close(normalized, expected[0] / (weight * hot).sum(1).clamp(min=0.5))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_heads_are_loops_over_pairs(dtype: torch.dtype, backend: str) -> None:
    """Rows of ties, of normal scores, of a few far away from all others, and sorted ones; with up to 30 positives."""
    random = torch.Generator().manual_seed(3)
    normal = torch.randn(150, generator=random).double()
    ties = torch.randint(-2, 3, (150,), generator=random).double()
    alone, apart = normal.clone(), normal.clone()
    alone[7], apart[140:] = 1e6, -1e7  # all others fall into one cell of the sort
    scores = torch.stack([normal, ties, 0 * ties, alone, apart, normal.sort().values, normal.sort().values.flip(0)])
    lists = [[3], [0, 4, 149], [], [7, 8], [2, 141], [*range(0, 150, 5)], [149]]
    weight = 0.5 + torch.arange(150, dtype=torch.float64) % 3
    for variant, k in VARIANTS:
        own: dict[str, Any] = {"variant": variant, "k": k, "sigma": 1.5}
        # Each query picks a column of the class vectors: these are the scores.
        vectors = scores.to(dtype).T.contiguous().requires_grad_()
        loss = manymax.linear_lambda_loss(
            torch.eye(len(scores), dtype=dtype),
            vectors,
            padded(lists),
            weight=weight.to(dtype),
            reduction="none",
            options={"backend": backend},
            **own,
        )
        values, gradients = slow_rows(scores.to(dtype), lists, weight, **own)
        agree(loss, vectors, [values, gradients.T], 1e-9 if dtype == torch.float64 else 3e-5)


def test_pairs_that_occur_twice_count_twice() -> None:
    users, items = torch.tensor([1, 0, 1, 1]), torch.tensor([2, 0, 2, 3])
    scores = torch.tensor([[0.5, 1.0, -1.0, 0.0, 2.0], [0.5, 0.25, -1.0, 1.0, 2.0]], dtype=torch.float64)
    _, target = manymax.group_pairs(users, items)
    twice = torch.tensor([1, 1, 2, 1, 1], dtype=torch.float64)
    expected = slow_rows(scores, [[0], [2, 3]], twice, variant="distance", k=20, sigma=1.0)[0].sum()
    found = manymax.linear_lambda_loss(torch.eye(2).double(), scores.T.contiguous(), target)
    torch.testing.assert_close(found, expected / 4)


def test_values_of_allrank() -> None:
    """Those of its `ndcgLoss2_scheme` and `lambdaRank_scheme`, sigma 1.5; it takes discounts in float32."""
    scores = torch.tensor([[0.5, -1.0, 2.0, 0.25, 1.5, -0.75]], dtype=torch.float64)
    gradient = [-0.5793881475, -0.189546847, 0.1948629616, 0.5743867251, 0.417984749, -0.4182994412]
    for variant, ids, value in (
        ("lambdaloss", [3], 1.263054321183885),
        ("lambdarank", [3], 2.914314315317864),
        ("lambdaloss", [0, 1, 5], 1.856549989601096),
        ("lambdarank", [0, 1, 5], 6.073440098722509),
    ):
        leaf = scores.clone().requires_grad_()
        loss = manymax.lambda_loss(leaf, torch.tensor([ids]), variant=variant, k=0, sigma=1.5, reduction="sum")
        assert loss.item() == pytest.approx(value, rel=1e-6)
        if variant == "lambdaloss" and len(ids) == 3:
            assert torch.autograd.grad(loss, leaf)[0][0].tolist() == pytest.approx(gradient, abs=1e-6)


def test_weights_beyond_k_are_those_of_the_paper() -> None:
    """By hand, for the ranks 1, 2, 3 and K = 1, where all scores are all but equal and each pair costs 1."""
    scores = torch.tensor([[2e-9, 1e-9, 0.0]], dtype=torch.float64)
    third = 1 / math.log2(3)
    pairs = {(1, 2): 1.0, (1, 3): (third - 0.5) / 0.5, (2, 3): (1 - third) / 0.5}
    for y, (first, second) in enumerate((((1, 2), (1, 3)), ((1, 2), (2, 3)), ((1, 3), (2, 3)))):
        loss = manymax.lambda_loss(scores, torch.tensor([y]), variant="lambdaloss", k=1)
        assert loss.item() == pytest.approx(pairs[first] + pairs[second], abs=1e-6)


def test_derivatives_away_from_ties() -> None:
    """Where no small step changes a rank, the gradient with ranks held constant is the derivative of the loss."""
    scores = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    target = torch.tensor([[0, 5, -100], [1, -100, -100], [2, 3, 4]])
    for variant, k in VARIANTS:
        own: dict[str, Any] = {"variant": variant, "k": k, "sigma": 0.7}

        def loss(s: Tensor, own: dict[str, Any] = own) -> Tensor:
            return manymax.lambda_loss(s, target, **own)

        assert torch.autograd.gradcheck(loss, scores, fast_mode=True)
        assert torch.autograd.gradgradcheck(loss, scores, fast_mode=True)


def hard_loss(places: Sequence[int], variant: str, k: int) -> float:
    """The loss, times IDCG, of positives at these ranks where pairs in the wrong order cost 1 and all others 0."""
    return sum(delta(y, j, variant, k) for y in places for j in range(1, y) if j not in places)


def lost(places: Sequence[int], k: int) -> float:
    """IDCG - DCG of positives at these ranks, of the first k places or, for 0, of all."""
    best = range(1, len(places) + 1)
    return sum(1 / discount(r) for r in best if not k or r <= k) - sum(
        1 / discount(r) for r in places if not k or r <= k
    )


@pytest.mark.parametrize(
    ("variant", "k"), [(variant, k) for variant in ("distance", "lambdaloss", "lambdarank") for k in range(6)]
)
def test_what_is_lost_of_dcg_is_at_most_the_pairs_in_the_wrong_order(variant: str, k: int) -> None:
    """Of all sets of up to 9 ranks. It is all of it for one positive, and needs one positive in LambdaLoss@K."""
    for places in itertools.chain(*(itertools.combinations(range(1, 10), size) for size in range(1, 10))):
        loss, cost = hard_loss(places, variant, k), lost(places, k)
        if len(places) == 1 and variant == "lambdaloss":
            assert loss == pytest.approx(cost)
        if len(places) == 1 or variant != "lambdaloss" or not k:
            assert loss >= cost - 1e-12


def test_the_pairs_of_positives_that_lambda_loss_at_k_leaves_out() -> None:
    """Six positives at the ranks 6 to 11 and K = 6: the loss is 0.35 less than 1 - NDCG@6 where scores all but tie."""
    scores, hits = -1e-9 * torch.arange(11, dtype=torch.float64), torch.arange(11) >= 5
    ideal = sum(1 / discount(i) for i in range(1, 7))
    least = 1 - (1 / discount(6)) / ideal - 0.35
    loss = manymax.lambda_loss(scores, hits, variant="lambdaloss", k=6, reduction="sum").item()
    assert hard_loss(range(6, 12), "lambdaloss", 6) / ideal == pytest.approx(least, abs=2e-3)
    assert loss == pytest.approx(least, abs=2e-3)  # no negative is below a positive


def test_what_it_refuses() -> None:
    scores, ids = torch.zeros(2, 3), torch.tensor([0, 1])
    queries, vectors = torch.zeros(2, 2), torch.zeros(3, 2)
    with pytest.raises(ArgumentError, match="`variant`"):
        manymax.lambda_loss(scores, ids, variant="lambdamart")
    with pytest.raises(ArgumentError, match="`k` must be an integer of at least 0; got -1"):
        manymax.LambdaLoss(k=-1)
    for keyword, value in (("decoupled", True), ("z_loss", 1.0)):
        with pytest.raises(ArgumentError, match=f"`{keyword}` has no meaning for lambda_loss: it has no"):
            manymax.linear_lambda_loss(queries, vectors, ids, **{keyword: value})
    with pytest.raises(ArgumentError, match="lambda_loss has no 'log_z'"):
        manymax.linear_lambda_loss(queries, vectors, ids, stats=("log_z",))
    with pytest.raises(ArgumentError, match="`exclude` lists a positive of a row with several"):
        manymax.linear_lambda_loss(queries, vectors, padded([[0, 1], [2]]), exclude=torch.tensor([[0], [1]]))
    with pytest.raises(
        ArgumentTypeError, match="lambda_loss cannot be split over ranks: a rank needs the scores of all"
    ):
        ShardedHead(manymax.LinearLambdaLoss(2, 3))
    assert FAMILY["lambda_loss"].class_name == "Lambda"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_positive_that_its_vector_masks_is_refused(backend: str) -> None:
    vectors = torch.tensor([[0.0], [-INF], [1.0]])
    with pytest.raises(ArgumentError, match="a masked class cannot be a positive"):
        manymax.linear_lambda_loss(torch.ones(1, 1), vectors, torch.tensor([[1, 2]]), options={"backend": backend})
