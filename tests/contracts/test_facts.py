"""Every fact that an exact member states is measured; and each measurement is shown to reject a false fact.

A check takes a case (a member with settings) and a fact, and raises AssertionError if the fact differs from what it
measures. It reads the claim from the fact's `value` or `fn`, never from the name of the member.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manymax.engine.member import Fact
from manymax.ops import operators, simplex
from manymax.theory.risk import closed_form
from tests.exact import Case, cases, normal
from tests.metric_bounds import check_bound

# Scores that sit on the kinks of sparsemax and rankmax, on both sides of the turning point of Taylor-softmax, and far
# apart.
LEVELS = [-30.0, -8.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0, 30.0]


def probes(num_classes: int, rows: int = 300) -> Tensor:
    """Scores to try a claim on, (2 rows, C): `rows` drawn from the levels, as many from normal laws of three scales."""
    generator = torch.Generator().manual_seed(num_classes)
    drawn = torch.tensor(LEVELS, dtype=torch.float64)[
        torch.randint(len(LEVELS), (rows, num_classes), generator=generator)
    ]
    spread = [normal(rows // 3, num_classes, seed=7, scale=scale) for scale in (0.1, 1.0, 5.0)]
    return torch.cat([drawn, *spread])


def rotating_labels(scores: Tensor) -> Tensor:
    """One label per row, (rows,), that runs through all classes in turn."""
    return torch.arange(len(scores)) % scores.shape[-1]


def rotating_positives(case: Case, scores: Tensor) -> Tensor:
    """One label per row; two, (rows, 2), for a member that has one loss of all positives of a row together."""
    first = rotating_labels(scores)
    return torch.stack([first, (first + 1) % scores.shape[-1]], -1) if case.member.joint else first


# Order preservation, convexity, shifts -----------------------------------------------------------


def check_order_preservation(case: Case, fact: Fact) -> None:
    """ "strict", "weak" or "none", from all pairs of classes."""
    scores = probes(5)
    probs = case.probs(scores, rotating_labels(scores))
    higher = scores[:, :, None] > scores[:, None, :]  # s_i > s_j
    gap = probs[:, :, None] - probs[:, None, :]
    # far below the top even a strict map rounds to ties: there only an inversion counts
    visible = probs[:, :, None] > 1e-14
    if (higher & (gap < -1e-12)).any():
        measured = "none"
    elif (higher & visible & (gap <= 0)).any() or (
        higher & (scores[:, :, None] > -20) & (probs[:, :, None] == 0)
    ).any():
        measured = "weak"
    else:
        measured = "strict"
    assert fact.value == measured


def gradients(case: Case, scores: Tensor, target: Tensor) -> Tensor:
    """The gradient of the summed loss in the scores."""
    leaf = scores.clone().requires_grad_()
    return torch.autograd.grad(case.loss(leaf, target, reduction="sum"), leaf)[0]


def check_fenchel_young(case: Case, fact: Fact) -> None:
    """Whether the gradient is map minus label, for each label."""
    scores = probes(4)
    target = rotating_positives(case, scores)
    labels = torch.nn.functional.one_hot(target.reshape(len(scores), -1), 4).sum(1)
    residual = labels.sum(1, keepdim=True) * case.probs(scores, target) - labels
    measured = bool(torch.allclose(gradients(case, scores, target), residual, rtol=0, atol=1e-9))
    assert fact.value is measured
    assert (case.member.foundation is not None) is measured


def check_convex(case: Case, fact: Fact) -> None:
    """Whether the loss at every midpoint is at most the mean of the losses at both ends."""
    ends = probes(3, 1500)
    first, second = ends, ends[torch.randperm(len(ends), generator=torch.Generator().manual_seed(0))]
    target = rotating_positives(case, ends)
    at_first, at_second, middle = (
        case.loss(s, target, reduction="none") for s in (first, second, (first + second) / 2)
    )
    measured = bool((middle <= (at_first + at_second) / 2 + 1e-9).all())
    assert fact.value is measured


def check_shift_invariant(case: Case, fact: Fact) -> None:
    """Whether map and loss stay the same when a constant is added to all scores of a row."""
    scores = probes(4)
    target = rotating_labels(scores)
    shift = normal(len(scores), 1, seed=3, scale=5)
    same_map = torch.allclose(case.probs(scores + shift, target), case.probs(scores, target), rtol=0, atol=1e-9)
    before, after = (case.loss(s, target, reduction="none") for s in (scores, scores + shift))
    assert fact.value is bool(same_map and torch.allclose(before, after, rtol=0, atol=1e-9))


# Calibration: minimise the conditional risk and compare the ranking with that of the probabilities -

# Laws: probabilities of the classes, from the most probable to the least.

LAWS = [[0.6, 0.22, 0.18], [0.5, 0.3, 0.2], [0.5, 0.45, 0.05], [0.7, 0.25, 0.05], [0.3, 0.28, 0.24, 0.18]]


def risk(case: Case, scores: Tensor, law: Tensor) -> Tensor:
    """The risk sum_y p_y l(y, s) of each row of scores under a law p, (rows,)."""
    return (case.singles(scores) * law).sum(-1)


def descend(case: Case, start: Tensor, law: Tensor) -> Tensor:
    """Scores (C,) at which a descent of the risk from `start` ends."""
    scores = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [scores], max_iter=200, tolerance_grad=1e-11, tolerance_change=1e-15, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = risk(case, scores, law)
        value.backward()
        return value

    optimizer.step(closure)
    return scores.detach()


def minimisers(case: Case, law: Tensor) -> Tensor:
    """Scores with the smallest risk that was found, (rows, C), by descents, on a grid of whole numbers, and with ties.

    The grid is for rankmax, whose risk has its minima at kinks, where a descent gets stuck.
    """
    if case.member.held is not None:  # a descent would follow what is not the derivative of the risk
        known = closed_form(case.member, law, **case.setting)
        if known is not None:
            return known
    num_classes = len(law)
    grid = torch.tensor(list(itertools.product([0.0, -1.0, -2.0], repeat=num_classes)), dtype=torch.float64)
    starts = torch.cat([normal(4, num_classes, seed=1), torch.log(law)[None], -3 - torch.log(law)[None]])
    # A risk that jumps where two classes swap ranks may be lower where neighbours tie.
    tied = torch.log(law).repeat(num_classes - 1, 1)
    for i, row in enumerate(tied):
        row[i : i + 2] = torch.log(law[i : i + 2].mean())
    candidates = torch.cat([grid, tied, torch.stack([descend(case, start, law) for start in starts])])
    risks = risk(case, candidates, law)
    return candidates[risks <= risks.min() + 1e-8]


def check_calibrated(case: Case, fact: Fact) -> None:
    """Whether every minimiser of the risk ranks the classes by their probabilities, without ties."""

    def ranked(law: Tensor) -> bool:
        # the probabilities of a law decrease: so must the scores, and by more than the error of the minimiser
        return bool((minimisers(case, law).diff(dim=-1) < -1e-3).all())

    assert fact.value is all(ranked(torch.tensor(law, dtype=torch.float64)) for law in LAWS)


# Smoothness: the largest curvature that a search finds --------------------------------------------


def curvatures(case: Case, scores: Tensor) -> Tensor:
    """Spectral norm of the Hessian of the loss for label 0, (rows,)."""
    label = torch.tensor(0)
    hessian = torch.vmap(torch.func.jacrev(torch.func.grad(lambda s: case.loss(s, label))))
    return torch.linalg.matrix_norm(hessian(scores), 2)


def secants(case: Case, scores: Tensor) -> Tensor:
    """|grad L(s + h) - grad L(s - h)| / |2 h| for tiny random h, (rows,): at a kink it is huge."""
    step = 1e-7 * torch.nn.functional.normalize(normal(*scores.shape, seed=11), dim=-1)
    target = torch.zeros(len(scores), dtype=torch.long)
    return (gradients(case, scores + step, target) - gradients(case, scores - step, target)).norm(dim=-1) / 2e-7


def three_levels(num_classes: int) -> Tensor:
    """Scores (rows, C) of at most three levels: one for the label, one for another class, one for all the others."""
    if num_classes == 2:
        fine = torch.cat(
            [torch.linspace(-4, 4, 81, dtype=torch.float64), torch.tensor([-30.0, 30.0], dtype=torch.float64)]
        )
        return torch.cartesian_prod(fine, fine)
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    if (
        num_classes > 10
    ):  # large Hessians, so fewer rows: the label, or it and one more class, above the others; or these at 0
        gaps = torch.linspace(0, 8, 161, dtype=torch.float64)
        above = torch.zeros(2, len(gaps), num_classes, dtype=torch.float64) - gaps[:, None]
        above[:, :, 0], above[1, :, 1] = 0, 0
        pairs = torch.cartesian_prod(levels, levels)
        return torch.cat([above.flatten(0, 1), torch.nn.functional.pad(pairs, (0, num_classes - 2))])
    label, other, rest = torch.cartesian_prod(levels, levels, levels).unbind(-1)
    return torch.stack([label, other, *[rest] * (num_classes - 2)], -1)


def search(case: Case, num_classes: int) -> float:
    """The largest curvature found: at the scores of `three_levels` and `probes`, then by random steps uphill."""
    scores = (
        three_levels(num_classes) if num_classes > 10 else torch.cat([three_levels(num_classes), probes(num_classes)])
    )
    found = curvatures(case, scores)
    best, top = scores[found.argmax()], float(found.max())
    for round_ in range(6 if num_classes <= 10 else 0):
        steps = best + normal(100, num_classes, seed=20 + round_, scale=0.5**round_)
        found = curvatures(case, steps)
        if found.max() > top:
            best, top = steps[found.argmax()], float(found.max())
    return top


def check_smoothness(case: Case, fact: Fact) -> None:
    """Whether no curvature is above the stated one and a search comes close to it; infinite where there are kinks."""
    assert fact.fn is not None
    assert fact.fn(num_classes=1, **case.setting) == 0
    for num_classes in (2, 4, 100):
        claimed = fact.fn(num_classes=num_classes, **case.setting)
        if math.isnan(claimed):
            assert "no constant is known" in fact.text
            continue
        assert fact.value in (None, claimed)
        jumps = secants(
            case,
            probes(num_classes) if num_classes > 10 else torch.cat([three_levels(num_classes), probes(num_classes)]),
        )
        if math.isinf(claimed):
            # Or a curvature that grows with the distance of another class.
            far = torch.zeros(1, num_classes, dtype=torch.float64)
            far[0, 0], far[0, -1] = -1, 1e8
            assert max(jumps.max(), secants(case, far).max()) > 1e4, "no kink: the loss is smooth"
            continue
        assert jumps.max() <= claimed * (1 + 1e-6) + 1e-6
        largest = search(case, num_classes)
        assert largest <= claimed * (1 + 1e-9)
        # the search comes within 4 % of a supremum; a text with "at most" states a bound, which need not be reached
        assert largest >= (0.75 if fact.text.startswith("at most") else 0.96) * claimed


# Cost: how many numbers the operations of one step read or write ----------------------------------


class Touched(TorchDispatchMode):
    """Counts the numbers that each operation touches; a sort of n numbers counts n log2 n.

    `topk` selects: it reads all numbers once and sorts at most those that it keeps.
    """

    SORTS = ("sort", "argsort", "msort")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        if func.is_view or not tensors:
            return result
        largest = max(tensors, key=Tensor.numel)
        name = func.overloadpacket.__name__
        self.count += largest.numel() * (math.log2(max(2, largest.shape[-1])) if name in self.SORTS else 1)
        if name == "topk":
            self.count += result[0].numel() * math.log2(max(2, result[0].shape[-1]))
        return result


def touched(case: Case, batch: int, num_classes: int) -> float:
    """Numbers touched by loss and gradient, on peaked and on flat rows."""
    halves = [normal(batch // 2, num_classes, seed=s, scale=scale) for s, scale in ((1, 30.0), (2, 1e-3))]
    scores, target = torch.cat(halves).requires_grad_(), torch.arange(batch) % 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "solve", simplex.solve)  # as operators they would hide the operations inside
        patch.setattr(operators, "apply", simplex.apply)
        with Touched() as mode:
            torch.autograd.grad(case.loss(scores, target), scores)
    return mode.count


def check_cost(case: Case, fact: Fact) -> None:
    """Whether the numbers touched grow with batch and classes as the stated cost does."""
    assert fact.fn is not None
    base = (8, 2**11)
    for batch, num_classes in [(8, 2**13), (8, 2**15), (32, 2**11)]:
        grown = touched(case, batch, num_classes) / touched(case, *base)
        sizes = [{"batch": b, "num_classes": c, **case.setting} for b, c in ((batch, num_classes), base)]
        claimed = fact.fn(**sizes[0]) / fact.fn(**sizes[1])
        assert abs(grown / claimed - 1) < 0.15
    if fact.value == "linear":
        assert fact.fn(batch=2, num_classes=10, **case.setting) * 15 == fact.fn(batch=6, num_classes=50, **case.setting)


CHECKS: dict[str, Callable[[Case, Fact], None]] = {
    "order_preservation": check_order_preservation,
    "fenchel_young": check_fenchel_young,
    "convex": check_convex,
    "calibrated": check_calibrated,
    "shift_invariant": check_shift_invariant,
    "smoothness": check_smoothness,
    "cost": check_cost,
    "bound": check_bound,
}


def stated(**kind: bool) -> list[Any]:
    """Each case with each of the facts that its member states."""
    return [
        pytest.param(parameter.values[0], name, id=f"{name}-{parameter.id}")
        for parameter in cases(**kind)
        for name, _ in parameter.values[0].member.facts.items()
    ]


@pytest.mark.parametrize(("case", "name"), stated())
def test_fact(case: Case, name: str) -> None:
    CHECKS[name](case, dict(case.member.facts.items())[name])


@pytest.mark.parametrize("case", cases(first=True))
def test_every_fact_has_a_check_and_says_where_it_comes_from(case: Case) -> None:
    for name, fact in case.member.facts.items():
        assert name in CHECKS
        assert fact.text
        assert fact.source
        assert fact.status in ("printed", "derived", "confirmed", "contradicted")
        assert (fact.status == "contradicted") == (fact.printed is not None)


# False facts are rejected -------------------------------------------------------------------------


def scaled(fn: Callable[..., float], factor: Callable[..., float]) -> Callable[..., float]:
    """The product of two functions of the sizes of a step."""
    return lambda **sizes: fn(**sizes) * factor(**sizes)


def false_versions(name: str, fact: Fact, setting: Mapping[str, Any]) -> list[Fact]:
    """False versions of a fact."""
    if name == "order_preservation":
        return [replace(fact, value=value) for value in ("strict", "weak", "none") if value != fact.value]
    if isinstance(fact.value, bool):
        return [replace(fact, value=not fact.value)]
    fn = fact.fn
    assert fn is not None
    if name == "bound":
        return [replace(fact, fn=lambda **given: 1.3 * fn(**given))]
    if name == "cost":
        factors: list[Callable[..., float]] = [
            lambda num_classes, **_: math.log2(num_classes),
            lambda num_classes, **_: num_classes,
            lambda num_classes, **_: 1 / num_classes,
            lambda batch, **_: 1 / batch,
        ]
        return [replace(fact, value=None, fn=scaled(fn, factor)) for factor in factors]
    if math.isinf(fn(num_classes=4, **setting)):
        return [replace(fact, value=None, fn=lambda num_classes, **_: 0.0 if num_classes == 1 else 5.0)]
    infinite = replace(fact, value=None, fn=lambda num_classes, **_: 0.0 if num_classes == 1 else math.inf)
    if math.isnan(fn(num_classes=4, **setting)):  # no constant is known: a tiny one is false
        return [replace(fact, value=None, fn=lambda num_classes, **_: 0.0 if num_classes == 1 else 1e-3), infinite]
    return [replace(fact, value=None, fn=scaled(fn, lambda f=f, **_: f)) for f in (0.75, 1.35)] + [infinite]


@pytest.mark.parametrize(("case", "name"), stated(first=True))
def test_a_false_fact_is_rejected(case: Case, name: str) -> None:
    for false_fact in false_versions(name, dict(case.member.facts.items())[name], case.setting):
        with pytest.raises(AssertionError):
            CHECKS[name](case, false_fact)


def test_the_bound_1_of_the_paper_is_rejected_as_a_supremum() -> None:
    """The smoothness of entmax is printed as 1: a bound for every alpha, reached by no alpha below 2 at a finite C."""
    for parameter in cases(foundation=True):
        case: Case = parameter.values[0]
        fact = case.member.facts.smoothness
        if fact.printed == "1":
            with pytest.raises(AssertionError):
                check_smoothness(case, replace(fact, fn=lambda num_classes, **_: float(num_classes > 1)))
