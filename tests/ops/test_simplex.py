"""The threshold search against a plain bisection, in every way that it can take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manymax.ops import simplex

INF = float("inf")
ALPHAS = [1.0, 1.0001, 1.1, 1.24, 1.25, 1.5, 1.7, 2.0]


def bisection(scores: Tensor, alpha: float) -> Tensor:
    """p (rows, C) in float64, by halving an interval for log p_top until nothing changes."""
    d = scores.double() - scores.double().amax(-1, keepdim=True)
    low, high = d.new_full((len(d), 1), -torch.tensor(float(d.shape[1])).log().item() - 1e-9), d.new_zeros(len(d), 1)
    for _ in range(70):
        middle = (low + high) / 2
        above = _probs(d, middle, alpha).sum(-1, keepdim=True) > 1
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return _probs(d, low, alpha)


def _probs(d: Tensor, log_top: Tensor, alpha: float) -> Tensor:
    if alpha == 1:
        return (d + log_top).exp()
    beta = alpha - 1
    # u = p^beta = p_top^beta + beta d, written around 1 so that a small beta keeps its digits
    return ((beta * log_top).expm1() + beta * d).clamp(min=-1).log1p().div(beta).exp()


def probs_of(scores: Tensor, alpha: Tensor) -> Tensor:
    maximum, log_top, _ = simplex.solve(scores, alpha)
    return simplex.apply(scores, alpha, maximum, log_top, torch.ones_like(maximum))


def conjugate_of(probs: Tensor, scores: Tensor, alpha: float) -> Tensor:
    """<p, s - max s> - Omega(p), (rows,), in float64."""
    d = torch.where(probs > 0, scores.double() - scores.double().amax(-1, keepdim=True), 0)
    x = torch.where(probs > 0, probs, 1).log()
    omega = probs * x if alpha == 1 else probs * ((alpha - 1) * x).expm1() / (alpha * (alpha - 1))
    return (probs * d - omega).sum(-1)


def peaked(rows: int, classes: int, generator: torch.Generator) -> Tensor:
    """Scores as of a trained model: few classes close to the top."""
    return 6 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)


def fresh(rows: int, classes: int, generator: torch.Generator) -> Tensor:
    """Scores as of a new model: nearly equal, so that every class is in the support."""
    return 1e-4 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)


def medium(rows: int, classes: int, generator: torch.Generator) -> Tensor:
    """A support of about an eighth of the classes, where the search changes from candidates to whole rows."""
    return torch.rand(rows, classes, generator=generator, dtype=torch.float64) * 3


def mixed(rows: int, classes: int, generator: torch.Generator) -> Tensor:
    """Peaked, fresh and medium rows in turns."""
    kinds = [peaked, fresh, medium]
    return torch.cat([kinds[row % 3](1, classes, generator) for row in range(rows)])


def tied(rows: int, classes: int, generator: torch.Generator) -> Tensor:
    """Whole numbers and halves: many ties, many of them exactly at a threshold."""
    return torch.randint(-4, 5, (rows, classes), generator=generator).double() / 2


def last_on_top(rows: int, classes: int, generator: torch.Generator) -> Tensor:
    """The support is in the last classes, which fill no group."""
    scores = peaked(rows, classes, generator)
    scores[:, -(classes % simplex.GROUP_SIZE or 1) :] += 60
    return scores


def one_group(rows: int, classes: int, generator: torch.Generator) -> Tensor:
    """All the large scores are in one group of the search."""
    scores = peaked(rows, classes, generator) - 100
    width = max(1, classes // simplex.GROUP_SIZE)
    scores[:, :: width if width > 1 else 2] += 100
    return scores


KINDS: list[Callable[[int, int, torch.Generator], Tensor]] = [
    peaked,
    fresh,
    medium,
    mixed,
    tied,
    last_on_top,
    one_group,
]


@given(
    kind=st.sampled_from(KINDS),
    alpha=st.sampled_from(ALPHAS) | st.floats(1.0001, 2.0),
    classes=st.integers(1, 40) | st.integers(500, 3000),
    rows=st.integers(1, 4),
    masked=st.sampled_from([0.0, 0.3, 0.98]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 2**20),
)
def test_search_agrees_with_bisection(
    kind: Callable[[int, int, torch.Generator], Tensor],
    alpha: float,
    classes: int,
    rows: int,
    masked: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = kind(rows, classes, generator)
    hidden = torch.rand(rows, classes, generator=generator) < masked
    hidden[:, seed % classes] = False
    scores = torch.where(hidden, -INF, scores).to(dtype)
    expected = bisection(scores, alpha)

    probs = probs_of(scores, torch.tensor(alpha, dtype=torch.float64))
    conjugate = simplex.solve(scores, torch.tensor(alpha, dtype=torch.float64))[2]

    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(probs.double(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(
        conjugate.double(), conjugate_of(expected, scores, alpha), rtol=tolerance, atol=tolerance
    )
    assert (probs[hidden] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("classes", [9, 600])
def test_search_agrees_with_bisection_for_every_alpha(classes: int, dtype: torch.dtype) -> None:
    """A fault of rounding shows in small windows of alpha only: all of them, in steps of 1/200."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.cat([kind(1, classes, generator) for kind in (peaked, medium, tied)]).to(dtype)
    wrong = {}
    for alpha in [1 + i / 200 for i in range(201)]:
        error = (
            (probs_of(scores, torch.tensor(alpha, dtype=torch.float64)).double() - bisection(scores, alpha)).abs().max()
        )
        if not error <= (1e-12 if dtype == torch.float64 else 1e-6):
            wrong[alpha] = error.item()
    assert wrong == {}


@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0])
@pytest.mark.parametrize("offset", [1e4, -1e4, 1e6, -1e9])
@pytest.mark.parametrize("kind", [peaked, medium])
def test_no_class_is_lost_at_an_offset(kind: Callable[..., Tensor], offset: float, alpha: float) -> None:
    """Large float32 scores are coarse, so that many of them lie at or next to a threshold."""
    scores = (kind(60, 640, torch.Generator().manual_seed(2)) + offset).float()
    probs = probs_of(scores, torch.tensor(alpha, dtype=torch.float64))
    torch.testing.assert_close(probs.double(), bisection(scores, alpha), rtol=0, atol=1e-6)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("classes", [7, 1200])
def test_one_alpha_per_row_agrees_with_one_alpha_for_all(alpha: float, classes: int) -> None:
    scores = mixed(6, classes, torch.Generator().manual_seed(1))
    alphas = torch.tensor([1.5, alpha, 2.0, 1.0, alpha, 1.01], dtype=torch.float64)
    together = simplex.solve(scores, alphas[:, None])
    alone = [simplex.solve(scores[i : i + 1], alphas[i]) for i in range(6)]
    for column, parts in zip(together, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(column, torch.cat(parts), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_one_alpha_per_row_with_masked_classes(alpha: float) -> None:
    scores = torch.tensor([[1.0, 0.5, -INF, 0.2], [-INF, 2.0, 1.9, -INF]], dtype=torch.float64)
    probs = probs_of(scores, torch.tensor([[alpha], [1.5]], dtype=torch.float64))
    torch.testing.assert_close(probs[:1], bisection(scores[:1], alpha), rtol=0, atol=1e-12)
    torch.testing.assert_close(probs[1:], bisection(scores[1:], 1.5), rtol=0, atol=1e-12)


def test_each_way_of_searching_a_long_row_is_taken() -> None:
    scores = mixed(6, 2000, torch.Generator().manual_seed(0))
    parts, wide, _ = simplex.candidates(scores, 0.5)
    assert [part.rows.tolist() for part in parts] == [[0, 3]]
    assert wide.tolist() == [1, 2, 4, 5]
    scattered = torch.zeros(3, 4800)
    scattered[:, 47 * torch.arange(100)] = 10.0 + torch.linspace(0, 0.001, 100)  # each in a group of its own
    scattered[1, 5] = 20.0
    parts, wide, _ = simplex.candidates(scattered, 1.0)
    assert sorted(row for part in parts for row in part.rows.tolist()) == [0, 1, 2]
    assert [part.rows.tolist() for part in parts] == [[1], [0, 2]]
    assert len(wide) == 0


@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0])
def test_candidates_hold_the_whole_support(alpha: float) -> None:
    checked = 0
    for kind in (peaked, last_on_top, one_group, tied):
        scores = kind(5, 1000 + 7, torch.Generator().manual_seed(3))
        parts, wide, _ = simplex.candidates(scores, alpha - 1)
        support = bisection(scores, alpha) > 0
        assert sorted(torch.cat([part.rows for part in parts] + [wide]).tolist()) == list(range(5))
        for part in parts:
            for row, picked, classes in zip(part.rows, part.scores, part.ids, strict=True):
                assert torch.equal(scores[row, classes], picked)
                assert set(support[row].nonzero().flatten().tolist()) <= set(classes.tolist())
                assert len(set(classes.tolist())) == len(classes)
                checked += 1
    assert checked >= 5


@pytest.mark.parametrize("alpha", [1.0, 1.1, 1.5, 2.0])
def test_results_do_not_depend_on_the_blocks(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, alpha_tensor = mixed(9, 700, torch.Generator().manual_seed(0)), torch.tensor(alpha, dtype=torch.float64)
    whole = probs_of(scores, alpha_tensor)

    def pairs(rows: int, *_: int) -> list[slice]:
        return [slice(start, min(start + 2, rows)) for start in range(0, rows, 2)]

    monkeypatch.setattr(simplex, "row_blocks", pairs)
    torch.testing.assert_close(probs_of(scores, alpha_tensor), whole, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("classes", [4, 600])
def test_no_rows(classes: int) -> None:
    alpha = torch.tensor(1.5, dtype=torch.float64)
    assert [tuple(t.shape) for t in simplex.solve(torch.empty(0, classes), alpha)] == [(0,)] * 3
    assert probs_of(torch.empty(0, classes), alpha).shape == (0, classes)


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 2.0])
def test_scale_multiplies_each_row(alpha: float) -> None:
    scores, alpha_tensor = mixed(4, 9, torch.Generator().manual_seed(0)), torch.tensor(alpha, dtype=torch.float64)
    maximum, log_top, _ = simplex.solve(scores, alpha_tensor)
    scale = torch.tensor([2.0, -1.0, 0.0, 0.5], dtype=torch.float64)
    scaled = simplex.apply(scores, alpha_tensor, maximum, log_top, scale)
    torch.testing.assert_close(scaled, scale[:, None] * probs_of(scores, alpha_tensor))


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 2.0])
def test_vjp_is_the_jacobian_of_the_support(alpha: float) -> None:
    probs = bisection(mixed(4, 6, torch.Generator().manual_seed(0)), alpha)
    grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for p, g, out in zip(probs, grad, simplex.vjp(probs, alpha, grad), strict=True):
        a = torch.where(p > 0, p ** (2 - alpha), 0)
        jacobian = torch.diag(a) - torch.outer(a, a) / a.sum()
        torch.testing.assert_close(out, jacobian @ g)
