"""Classes that are ruled out by small integers: never one of the support, and the result is what it is without.

The first tests look at what engine/filter.py leaves of a row, on every level of native code, against probabilities in
float64. Scores there are near ties, or far apart in size; errors of rounding to integers are as large as their bound
allows; vectors have the largest integers everywhere, whose sums are the first to saturate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import manymax
from manymax.engine import filter as engine_filter
from manymax.engine import native_library
from manymax.engine.filter import Filter
from manymax.members.entmax import filter as entmax_filter
from manymax.members.entmax.filter import rule_out_below

LEVELS = native_library.levels_here()
FAST = tuple(level for level in LEVELS if native_library.find_level(level).products)
every_level = pytest.mark.parametrize("level", LEVELS)
needs_fast_level = pytest.mark.skipif(not FAST, reason="no level here has products of its own")
ALPHAS = {"sparsemax": 2.0, "entmax-1.5": 1.5, "entmax-1.3": 1.3}
CLASSES, ROWS = 1100, 12  # groups of 64 that are not full

Made = tuple[Tensor, Tensor, Tensor | None]  # queries, class vectors, bias
SMALL = 0.45 / 127  # of the largest number of a vector: 0 as an integer, and nearly a half of one


def rows(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def plain(d: int, seed: int) -> Made:
    return rows(ROWS, d, seed=seed), rows(CLASSES, d, seed=seed + 1) * (3 / d**0.5), None


def with_bias(d: int, seed: int) -> Made:
    """A bias that masks, and that is far larger than the products: sums are rounded to 1/8, near the top as well."""
    bias = rows(CLASSES, seed=seed + 2) * 64
    top = bias.topk(30).indices
    bias[top] = bias.max() + torch.arange(30) / 64
    bias[::7] = -torch.inf
    return *plain(d, seed)[:1], rows(CLASSES, d, seed=seed + 1) * 1e-3, 2.0**20 + (bias * 16).round() / 16


def near_ties(d: int, seed: int) -> Made:
    """Scores that differ by a few units of their last digit, or not at all."""
    one = rows(1, d, seed=seed).sign()
    return one.repeat(ROWS, 1) / d, one * (1 + rows(CLASSES, 1, seed=seed + 1).mul(3).round() * 2**-23), None


def one_dominates(d: int, seed: int) -> Made:
    queries, vectors, _ = plain(d, seed)
    vectors[seed % CLASSES] = 30 * queries[0]
    return queries, vectors, None


def sizes(d: int, seed: int) -> Made:
    """Norms from denormal numbers to the largest that are served, of queries and of class vectors."""
    queries, vectors, _ = plain(d, seed)
    powers = torch.linspace(-44, 11, ROWS).unsqueeze(1)
    mixed = torch.linspace(-44, 11, CLASSES)[rows(CLASSES, seed=seed).argsort()]
    return queries * 10.0**powers, vectors * 10.0 ** mixed.unsqueeze(1), None


def denormal(d: int, seed: int) -> Made:
    queries, vectors, _ = plain(d, seed)
    bias = rows(CLASSES, seed=seed + 2) * 2
    return queries * 1e-41, vectors * 1e-42, bias


def constant(d: int, seed: int) -> Made:
    """Every integer is the largest, of either sign; some classes have a little less."""
    signs = rows(ROWS, 1, seed=seed).sign()
    lengths = 1 - rows(CLASSES, 1, seed=seed + 1).abs() * 0.2
    return signs.repeat(1, d), lengths.repeat(1, d) / d, None


def query_lost(d: int, seed: int) -> Made:
    """The integers of the query lose all of the score of a few classes: the error is as large as its bound."""
    return _lost(d + 1, seed)


def class_lost(d: int, seed: int) -> Made:
    """The integers of a few classes lose all of their score."""
    queries, vectors, _ = _lost(d + 1, seed)
    few = vectors[:, 1] > 0
    one, rest = torch.eye(d + 1)[0], 1 - torch.eye(d + 1)[0]
    length = (queries[:1] @ vectors.T).squeeze(0)
    made = torch.where(few.unsqueeze(1), one + SMALL * rest, rest) / torch.where(few, d * SMALL, d).unsqueeze(1)
    return rest.repeat(ROWS, 1), made * length.unsqueeze(1), None


def _lost(d: int, seed: int) -> Made:
    one, rest = torch.eye(d)[0], 1 - torch.eye(d)[0]
    length = 1 - rows(CLASSES, 1, seed=seed).abs() * 0.2
    vectors = length * one
    vectors[1::100] = 1.1 * rest / (SMALL * (d - 1))
    return (one + SMALL * rest).repeat(ROWS, 1), vectors, None


MADE: tuple[Callable[[int, int], Made], ...] = (
    *(plain, with_bias, near_ties, one_dominates, sizes, denormal, constant, query_lost, class_lost),
)


def left_of(made: Made, alpha: float, level: str) -> tuple[Tensor, Tensor]:
    """How many classes are left of each row, and the rows themselves."""
    queries, vectors, bias = made
    rule_out = rule_out_below(alpha)
    assert rule_out is not None
    found = Filter.of(vectors, bias, level, rule_out)
    assert found is not None
    table = queries.new_empty(len(queries), -(-len(vectors) // 16) * 16)
    return rule_out(found, queries, table), table


def check_left(made: Made, alpha: float, level: str) -> int:
    """Compare what is left with the support in float64; returns the number of rows that were not given up."""
    queries, vectors, bias = made
    count, table = left_of(made, alpha, level)
    scores = queries.double() @ vectors.double().T + (0 if bias is None else bias.double())
    size = queries.double().norm(dim=1, keepdim=True) * vectors.double().norm(dim=1) + scores.abs().clamp(max=1e30)
    probs = manymax.entmax(scores, alpha)
    for r in (count >= 0).nonzero().squeeze(1).tolist():
        kept = count[r]
        ids = table[r].view(torch.int32)[table.shape[1] // 2 :][:kept].long()
        assert bool((ids[1:] > ids[:-1]).all()), "classes are ascending"
        missing = set((probs[r] > 0).nonzero().squeeze(1).tolist()) - set(ids.tolist())
        assert not missing, (made, r, sorted(missing), probs[r][sorted(missing)])
        error = (table[r, :kept].double() - scores[r, ids]).abs()
        assert bool((error <= 4e-7 * (queries.shape[1] + 4) * size[r, ids] + 1e-38).all())
    return int((count >= 0).sum())


@pytest.fixture(autouse=True)
def any_number_may_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to what the memory of a row can take; else tests would be of rows that are given up."""
    monkeypatch.setattr(entmax_filter, "FEW", 1)
    monkeypatch.setattr(entmax_filter, "MOST", 3)


@every_level
@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_no_class_of_the_support_is_ruled_out(make: Callable[[int, int], Made], level: str) -> None:
    served = 0
    for seed, d in enumerate((1, 3, 8, 33, 64)):
        for alpha in (2.0, 1.5):
            served += check_left(make(d, 10 * seed), alpha, level)
    # Where all scores are nearly equal every class is in the support.
    assert (served > 0) == (make is not near_ties), "a test of nothing"


@pytest.mark.slow
@every_level
@given(made=st.sampled_from(MADE), d=st.integers(1, 130), seed=st.integers(0, 10**6), alpha=st.floats(1.25, 2.0))
def test_no_class_of_the_support_is_ruled_out_anywhere(
    level: str, made: Callable[[int, int], Made], d: int, seed: int, alpha: float
) -> None:
    check_left(made(d, seed), alpha, level)


@every_level
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e13])
def test_numbers_that_integers_cannot_follow_are_left_to_others(bad: float, level: str) -> None:
    queries, vectors, bias = plain(8, 0)
    rule_out = rule_out_below(2.0)
    assert rule_out is not None
    for given_bias in (None, torch.zeros(CLASSES)):
        broken, given_bias = (vectors.clone(), None) if given_bias is None else (vectors, given_bias)
        (broken if given_bias is None else given_bias)[5] = bad
        assert Filter.of(broken, given_bias, level, rule_out) is None
    queries[3, 1] = bad
    count, _ = left_of((queries, vectors, bias), 2.0, level)
    assert count[3] == -1
    assert count[2] > 0


# Heads -------------------------------------------------------------------------------------------


class Seen:
    """Counts the blocks that went through the filter, and those that it gave up."""

    def __init__(self) -> None:
        self.used = self.given_up = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The filter for sizes that a test can afford, and how often it was used."""
    found, candidates = Seen(), Filter.candidates

    def counted(self: Filter, *given: Any) -> Any:
        result = candidates(self, *given)
        found.used += result is not None
        found.given_up += result is None
        return result

    monkeypatch.setattr(engine_filter, "WORTH_CLASSES", 1024)
    monkeypatch.setattr(engine_filter, "WORTH_ROWS", 2)
    monkeypatch.setattr(engine_filter, "MOST_BYTES", 100)
    monkeypatch.setattr(Filter, "candidates", counted)
    return found


def head(name: str, made: Made, target: Tensor, level: str, **keywords: Any) -> list[Tensor]:
    """Loss and gradients of a head."""
    queries, vectors, bias = (None if part is None else part.clone().requires_grad_() for part in made)
    options = {"backend": f"native-{level}", **keywords.pop("options", {})}
    alpha = {} if name == "sparsemax" else {"alpha": keywords.pop("alpha", ALPHAS[name])}
    function = manymax.linear_sparsemax_loss if name == "sparsemax" else manymax.linear_entmax_loss
    loss = function(queries, vectors, target, linear_bias=bias, options=options, **alpha, **keywords)  # type: ignore[operator]
    loss.sum().backward()
    grads = [part.grad for part in (queries, vectors, bias) if part is not None]
    return [loss.detach(), *(grad.to_dense() for grad in grads if grad is not None)]


def same_as_without(name: str, made: Made, target: Tensor, level: str, **keywords: Any) -> None:
    options = keywords.pop("options", {})
    with_it = head(name, made, target, level, options=options, **keywords)
    without = head(name, made, target, level, options={**options, "filter": False}, **keywords)
    for actual, expected in zip(with_it, without, strict=True):
        unit = float(expected.abs().max().clamp(min=1e-6))
        torch.testing.assert_close(actual, expected, rtol=0, atol=4e-6 * unit)


@needs_fast_level
@pytest.mark.parametrize("level", FAST)
@pytest.mark.parametrize("name", ALPHAS)
def test_heads_are_the_same_with_the_filter(name: str, level: str, seen: Seen) -> None:
    queries, vectors, _ = plain(24, 3)
    bias = rows(CLASSES, seed=7)
    bias[::5] = -torch.inf
    queries[4] *= 1e-3  # a row with a wide support among others
    target = torch.arange(ROWS) * 5 + 1
    many = torch.stack([target, target + 5, target + 10], 1)
    many[::3, 2] = -100
    for made in ((queries, vectors, None), (queries, vectors, bias)):
        same_as_without(name, made, target, level, options={"block_rows": 5})
        same_as_without(name, made, many, level, reduction="sum")
        same_as_without(name, made, target, level, weight=rows(CLASSES, seed=9).abs(), reduction="none")
        same_as_without(name, made, target, level, options={"sparse_grad": True})
    assert seen.used >= 8


@needs_fast_level
def test_a_learned_alpha_has_the_same_gradient(seen: Seen) -> None:
    queries, vectors, _ = plain(24, 3)
    grads = []
    for with_it in (True, False):
        alpha = torch.tensor(1.6, requires_grad=True)
        options = {"backend": f"native-{FAST[-1]}", "filter": with_it}
        manymax.linear_entmax_loss(queries, vectors, torch.arange(ROWS), alpha=alpha, options=options).backward()
        grads.append(alpha.grad)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=0)
    assert seen.used == 1


@needs_fast_level
def test_a_new_model_goes_without(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entmax_filter, "FEW", 32)
    queries, vectors, _ = plain(24, 3)
    made = queries, vectors * 1e-3, None
    target = torch.arange(ROWS)
    with_it, without = (
        head("entmax-1.5", made, target, FAST[-1], options={"filter": on, "block_rows": 4}) for on in (True, False)
    )
    for actual, expected in zip(with_it, without, strict=True):
        assert torch.equal(actual, expected), "not a bit differs"
    assert (seen.used, seen.given_up) == (0, 1), "one block is enough to know"


@needs_fast_level
def test_the_integers_take_no_more_memory_than_half_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_filter, "WORTH_CLASSES", 1024)
    monkeypatch.setattr(engine_filter, "WORTH_ROWS", 2)
    made, found = plain(24, 3), []
    monkeypatch.setattr(Filter, "of", lambda *_: found.append(1))
    for block_rows in (11, 12):
        head("sparsemax", made, torch.arange(ROWS), FAST[-1], options={"block_rows": block_rows})
    assert found == [1], "24 bytes of a class, 4 bytes of each of 12 scores"


@needs_fast_level
@pytest.mark.parametrize(
    "keywords",
    [
        {"label_smoothing": 0.1},
        {"softcap": 5.0},
        {"normalize": True},
        {"exclude": torch.zeros(ROWS, 1, dtype=torch.long)},
        {"stats": ("argmax",)},
    ],
    ids=lambda keywords: next(iter(keywords)),
)
def test_what_needs_every_score_goes_without(keywords: dict[str, Any], seen: Seen) -> None:
    queries, vectors, _ = plain(24, 3)
    options = {"backend": f"native-{FAST[-1]}"}
    manymax.linear_sparsemax_loss(queries, vectors, torch.arange(ROWS) + 1, options=options, **keywords)
    assert (seen.used, seen.given_up) == (0, 0)
