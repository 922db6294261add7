"""Bias and variance of what sampled softmax estimates, exactly, against k, and with `debias`."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from manymax import sampled_softmax_loss
from tests.losses.sampled_softmax_cases import Q4, bias, distribution, estimates, hessian, loss_of_classes, slope


def log_partition(name: str, scores: Tensor, q: Tensor, target: int, ids: Tensor) -> Tensor:
    """The estimate of log Z on samples ids (n, k), from the library's losses; importance sampling is computed here.

    "logq" is shifted by log q_y as in `estimates`, that is, log((k + 1) q_y) is still in it.
    """
    if name == "importance":
        return (scores[ids] - q.log()[ids]).logsumexp(-1) - math.log(ids.shape[-1])
    policy = "mask" if name == "partition" else "keep"
    loss = loss_of_classes(scores, torch.full((len(ids),), target), ids, q.log(), (name, policy, None))
    return loss + scores[target] - (q[target].log() if name == "logq" else 0)


@pytest.mark.parametrize("name", ["importance", "partition", "logq", "none"])
@pytest.mark.parametrize("num_negatives", [1, 2, 7])
def test_moments_by_quadrature_are_those_by_enumeration(name: str, num_negatives: int) -> None:
    scores, target = torch.tensor([1.0, -0.5, 2.0, 0.0], dtype=torch.float64), 1
    ids, weights = bias.all_samples(Q4, num_negatives)
    values = log_partition(name, scores, Q4, target, ids)
    mean = (weights * values).sum().item()
    variance = (weights * (values - mean) ** 2).sum().item()
    first, terms = estimates(scores, Q4, target, num_negatives)[name]
    assert bias.log_sum_moments(first, terms, Q4, num_negatives) == pytest.approx((mean, variance), rel=1e-9)


@pytest.mark.parametrize("name", ["importance", "partition", "logq", "none"])
@pytest.mark.parametrize("num_classes", [5, 60])
@pytest.mark.parametrize("proposal", ["uniform", "zipf", "reversed"])
def test_moments_agree_with_draws(name: str, num_classes: int, proposal: str, seed: int) -> None:
    draws = 20_000
    scores = 1.5 * distribution("zipf", num_classes).log()
    q, target = distribution(proposal, num_classes), num_classes // 2
    for num_negatives in (1, 6, 40):
        ids = torch.multinomial(q, draws * num_negatives, replacement=True).view(draws, num_negatives)
        values = log_partition(name, scores, q, target, ids)
        mean, variance = bias.log_sum_moments(*estimates(scores, q, target, num_negatives)[name], q, num_negatives)
        squares = (values - mean) ** 2
        assert abs(values.mean().item() - mean) <= 4 * math.sqrt(variance / draws) + 1e-9
        assert abs(squares.mean().item() - variance) <= 4 * squares.std().item() / math.sqrt(draws) + 1e-9


def predictions(scores: Tensor, q: Tensor, target: int, k: int) -> dict[str, tuple[float, float, float]]:
    """{estimate: (limit of the bias, its 1/k term, variance)} by the Delta method."""
    probs = scores.softmax(-1)
    ratio = probs / q
    chi2 = (q * (ratio - 1) ** 2).sum()
    others = torch.arange(len(q)) != target
    v = (others * probs**2 / q).sum() - (1 - probs[target]) ** 2
    weights = scores.exp()
    mean = (q * weights).sum()
    total = weights[target] + k * mean
    spread = k * (q * (weights - mean) ** 2).sum() / total**2
    logq = (ratio[target] - 1) / (k + 1) - k * chi2 / (2 * (k + 1) ** 2)
    table = {
        "importance": (0.0, -chi2 / (2 * k), chi2 / k),
        "partition": (0.0, -v / (2 * k), v / k),
        "logq": (math.log(k + 1), logq, k * chi2 / (k + 1) ** 2),
        "none": ((total / weights.sum()).log(), -spread / 2, spread),
    }
    return {name: tuple(float(part) for part in row) for name, row in table.items()}  # type: ignore[misc]


@pytest.mark.parametrize("name", ["importance", "partition", "logq", "none"])
def test_the_delta_method_inside_its_range(name: str) -> None:
    """They are within 12 % of the exact values if chi2 / k <= 0.2 and k q_j >= 20 for the likeliest class."""
    scores = 1.5 * distribution("zipf", 60).log()
    log_z, probs, inside, worst_outside = scores.logsumexp(-1).item(), scores.softmax(-1), 0, 0.0
    for proposal, k in itertools.product(("uniform", "zipf", "reversed"), (3, 30, 300, 3000, 60_000)):
        q, target = distribution(proposal, 60), 30
        mean, variance = bias.log_sum_moments(*estimates(scores, q, target, k)[name], q, k)
        limit, curvature, spread = predictions(scores, q, target, k)[name]
        # the bias of "logq" is a difference of two terms, so it is held to their size
        scale = max(abs(curvature), spread / 2)
        off = max(abs(mean - log_z - limit - curvature) / scale, abs(variance - spread) / spread)
        if bias.delta_holds(probs, q, k):
            inside += 1
            assert off < 0.12, (proposal, k)
        else:
            worst_outside = max(worst_outside, off)
    assert inside >= 5
    assert worst_outside > 0.5


def test_the_rule_of_thumb_is_no_guarantee() -> None:
    """The rule looks at the likeliest class and misses another one that makes up chi2 and is hardly ever drawn."""
    probs, q = bias.delta_pairs()["starved class"]
    exact, delta, _, _ = bias.delta_row(probs, q, 50)
    assert bias.delta_holds(probs, q, 50)
    assert delta / exact > 1.9


def test_the_rule_of_thumb_needs_both_halves() -> None:
    """Neither many draws of the likeliest class nor a small chi2 / k is enough alone."""
    probs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    starved, even = torch.tensor([[0.9, 0.0005, 0.0995], [0.4, 0.3, 0.3]], dtype=torch.float64)
    exact, delta, _, _ = bias.delta_row(probs, starved, 50)
    assert delta / exact > 2
    assert not bias.delta_holds(probs, starved, 50)
    assert not bias.delta_holds(probs, even, 40)
    assert bias.delta_holds(probs, even, 60)


def test_importance_sampling_at_one_negative_is_off_by_a_divergence() -> None:
    scores, q = distribution("zipf", 7).log(), distribution("reversed", 7)
    probs = scores.exp()
    means = [bias.log_sum_moments(*estimates(scores, q, 0, k)["importance"], q, k)[0] for k in (1, 2, 3, 10)]
    assert means[0] == pytest.approx((q * (probs / q).log()).sum().item(), rel=1e-9)  # -KL(q || P)
    assert means == sorted(means)
    assert means[-1] < 0


def test_the_partition_function_itself_is_unbiased() -> None:
    scores = torch.tensor([1.0, -0.5, 2.0, 0.0], dtype=torch.float64)
    for target, k in itertools.product(range(4), (1, 3)):
        ids, weights = bias.all_samples(Q4, k)
        mean = (weights * log_partition("partition", scores, Q4, target, ids).exp()).sum()
        torch.testing.assert_close(mean, scores.exp().sum())


FAIR = tuple(torch.tensor(values, dtype=torch.float64) for values in bias.PAIRS["fair"])
MILD = tuple(torch.tensor(values, dtype=torch.float64) for values in ((0.5, 0.3, 0.2), (0.3, 0.3, 0.4)))


@pytest.mark.parametrize(
    ("pair", "debias", "exponent"),
    [(MILD, None, -1), (FAIR, None, -1), (MILD, "delta", -2), (MILD, "jackknife", -2), (FAIR, "jackknife", -2)],
    ids=["mild", "fair", "mild-delta", "mild-jackknife", "fair-jackknife"],
)
def test_order_of_the_bias(pair: tuple[Tensor, Tensor], debias: str | None, exponent: int) -> None:
    """ "delta" on the fair pair is left out: its 1/k^2 term nearly cancels there, so it falls faster than that."""
    sizes = [24, 48, 96]
    values = [bias.partition_bias(*pair, k, debias) for k in sizes]
    assert slope(values, sizes) == pytest.approx(exponent, abs=0.06)


@pytest.mark.parametrize("debias", [None, "delta", "jackknife"])
@pytest.mark.parametrize("pair", ["fair", "poor"])
def test_constants_of_the_bias(debias: str | None, pair: str) -> None:
    """k (or k^2) times the bias tends to the constant of its leading term, after one step of extrapolation in 1/k."""
    probs, q = (torch.tensor(values, dtype=torch.float64) for values in bias.PAIRS[pair])
    power = 1 if debias is None else 2
    constant = sum(p * bias.next_orders(probs, q, y)[debias] for y, p in enumerate(probs.tolist()))
    scaled = [k**power * bias.partition_bias(probs, q, k, debias) for k in (45, 90)]
    size = sum(p * abs(bias.next_orders(probs, q, y)["jackknife"]) for y, p in enumerate(probs.tolist()))
    scale = abs(constant) if debias is None else size
    assert abs(2 * scaled[1] - scaled[0] - constant) < (0.02 if pair == "fair" else 0.25) * scale


@pytest.mark.parametrize("num_negatives", [2, 3, 9])
def test_mean_of_the_jackknife_is_what_resampling_promises(num_negatives: int) -> None:
    k, fewer = num_negatives, num_negatives - 1
    expected = k * bias.partition_bias(*FAIR, k, None) - fewer * bias.partition_bias(*FAIR, fewer, None)
    assert bias.partition_bias(*FAIR, k, "jackknife") == pytest.approx(expected, abs=1e-12)


def test_debias_brings_the_mean_nearer() -> None:
    for k in (2, 4, 8, 16, 32):
        plain, delta, jackknife = (abs(bias.partition_bias(*FAIR, k, debias)) for debias in bias.DEBIAS)
        assert delta < plain / 2
        assert jackknife < plain / 2


def test_debias_only_adds_and_is_not_convex(seed: int) -> None:
    def loss(scores: Tensor, log_q: Tensor, debias: str | None) -> Tensor:
        options: dict[str, Any] = {"hit_policy": "keep", "correction": "partition", "debias": debias}
        return sampled_softmax_loss(scores[0], scores[1:], log_q_negative=log_q, **options)

    lowest = dict.fromkeys(("delta", "jackknife"), 0.0)
    for _ in range(50):
        scores, log_q = 3 * torch.randn(4).double(), torch.rand(3).double().log()
        for debias in lowest:
            assert loss(scores, log_q, debias) >= loss(scores, log_q, None)
            curvature = torch.linalg.eigvalsh(hessian(loss)(scores, log_q, debias))[0].item()
            lowest[debias] = min(lowest[debias], curvature)
    assert max(lowest.values()) < -0.01


def test_what_the_page_says_of_variance() -> None:
    """At k = 2 on the fair pair, for y ~ P, the jackknife adds a third to the variance, and delta adds less."""
    probs, q = FAIR
    ids, weights = bias.all_samples(q, 2)
    spread = dict.fromkeys(bias.DEBIAS, 0.0)
    for debias, y in itertools.product(bias.DEBIAS, range(3)):
        values = loss_of_classes(probs.log(), torch.full((len(ids),), y), ids, q.log(), ("partition", "mask", debias))
        mean = (weights * values).sum()
        spread[debias] += (probs[y] * (weights * (values - mean) ** 2).sum()).item()
    assert spread["jackknife"] / spread[None] == pytest.approx(4 / 3, abs=0.02)
    assert 1 < spread["delta"] / spread[None] < 4 / 3


def test_what_the_page_says_of_the_rule() -> None:
    """Where the rule of thumb holds, the Delta method is right in every Zipf row of the table."""
    rows = [(name, k) for name in bias.delta_pairs() if name.startswith("Zipf") for k in (5, 50, 500, 5000)]
    inside = [(name, k) for name, k in rows if bias.delta_holds(*bias.delta_pairs()[name], k)]
    assert 0 < len(inside) < len(rows)
    for name, k in inside:
        exact, delta, variance, delta_variance = bias.delta_row(*bias.delta_pairs()[name], k)
        assert (delta, delta_variance) == pytest.approx((exact, variance), rel=0.03, abs=0)


def test_page_has_what_the_script_computes() -> None:
    text = bias.PAGE.read_text(encoding="utf-8")
    assert bias.with_tables(text) == text, "run `python benchmarks/bias.py`"


def test_what_the_page_says_of_gradients() -> None:
    """Noise above bias for every estimate but the default, which has the largest bias; labels that stand for y ~ P."""
    rows = [line.split(" | ") for line in bias.gradient_table((5, 50)).splitlines()[2:]]
    for row in rows:
        numbers = [float(cell.split(" ")[0]) for cell in row[2:]]
        own = {other[1]: float(other[2].split(" ")[0]) for other in rows if other[0] == row[0]}
        assert max(own.values()) == own["logq"]
        assert row[1] == "logq" or all(numbers[i] < numbers[i + 1] for i in (0, 2))
    probs = bias.delta_pairs()["Zipf 1, uniform"][0]
    labels, weights = bias.labels_of(probs)
    assert float(weights.sum()) == pytest.approx(8)
    below = torch.cat([torch.zeros(1), probs.cumsum(0)])
    assert all(below[y] <= (i + 0.5) / 8 <= below[y + 1] for i, y in enumerate(labels.tolist()))
