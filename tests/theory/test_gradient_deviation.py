"""Gradients of sampled losses against the exact gradient: enumerated, drawn and predicted."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from manymax.engine.approximation import GradientCase, GradientEstimator, RatioOfSums
from manymax.errors import ArgumentError, ManymaxError
from manymax.members.sampled_softmax.gradients import DRIFT, GAMMAS
from manymax.theory.gradient_deviation import (
    exact_gradient,
    gradient_estimators,
    measured_gradient,
    predicted_gradient,
)

P, Q = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]], dtype=torch.float64)
ROWS, LABELS = P.log().expand(3, 3), torch.arange(3)
ESTIMATORS = gradient_estimators()
ONE_STEP = [name for name, each in ESTIMATORS.items() if each.steps == 1]
AVERAGED = [name for name, each in ESTIMATORS.items() if each.steps > 1]


def by_hand(name: str, label: int, ids: tuple[int, ...]) -> Tensor:
    """The gradient on one sample, from the weight of the positive and of each draw."""
    k, t = len(ids), P / Q
    misses = [j for j in ids if j != label]
    own, drawn = {
        "logq": (t[label], [(j, t[j]) for j in ids]),
        "partition": (P[label], [(j, t[j] / k) for j in misses]),
        "corrected_logq": (P[label], [(j, t[j] * (1 - Q[label]) / len(misses)) for j in misses]),
    }[name]
    shares = torch.zeros(3).double()
    shares[label] = own
    for j, weight in drawn:
        shares[j] += weight
    shares = shares / shares.sum()
    shares[label] -= 1
    return shares


@pytest.mark.parametrize("name", ONE_STEP)
def test_enumeration_is_the_mean_over_all_sequences_of_draws(name: str) -> None:
    found = measured_gradient(ESTIMATORS[name], ROWS, LABELS, log_q=Q.log(), num_negatives=3)
    for label in range(3):
        sequences = list(itertools.product(range(3), repeat=3))
        chances = torch.stack([Q[list(ids)].prod() for ids in sequences])
        gradients = torch.stack([by_hand(name, label, ids) for ids in sequences])
        mean, exact = chances @ gradients, P - torch.eye(3).double()[label]
        assert float(found.squared_bias[label]) == pytest.approx(float((mean - exact).square().sum()), rel=1e-9)
        noise = float(chances @ (gradients - mean).square().sum(1))
        assert float(found.squared_noise[label]) == pytest.approx(noise, rel=1e-9)
        assert float(found.squared_norm[label]) == pytest.approx(float(exact.square().sum()))
    assert (found.bias_error == 0).all()


def test_two_biases_that_are_known_exactly() -> None:
    """With q = P the mean gradient of "logq" is k / (k + 1) of the exact one, that of "corrected_logq" 1 - P_y^k."""
    options = {"log_q": P.log(), "num_negatives": 4}
    logq, corrected = (measured_gradient(ESTIMATORS[name], ROWS, LABELS, **options) for name in ("logq", ONE_STEP[-1]))
    torch.testing.assert_close((logq.squared_bias / logq.squared_norm).sqrt(), torch.full((3,), 0.2).double())
    torch.testing.assert_close((corrected.squared_bias / corrected.squared_norm).sqrt(), P**4)
    assert ONE_STEP[-1] == "corrected_logq"
    assert logq.bias() == pytest.approx(0.2)


@pytest.mark.parametrize("name", ONE_STEP)
@pytest.mark.parametrize("num_negatives", [1, 2, 7])
def test_exact_moments_are_those_of_enumeration(name: str, num_negatives: int) -> None:
    options = {"log_q": Q.log(), "num_negatives": num_negatives}
    exact, measured = (f(ESTIMATORS[name], ROWS, LABELS, **options) for f in (exact_gradient, measured_gradient))
    torch.testing.assert_close(exact.squared_bias, measured.squared_bias, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(exact.squared_noise, measured.squared_noise, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(exact.squared_norm, measured.squared_norm)


@pytest.mark.parametrize("name", ONE_STEP)
def test_predictions_are_what_enumeration_tends_to(name: str) -> None:
    options = {"log_q": Q.log(), "num_negatives": 80}
    measured, predicted = (
        f(ESTIMATORS[name], ROWS, LABELS, **options) for f in (measured_gradient, predicted_gradient)
    )
    assert predicted.bias(P) == pytest.approx(measured.bias(P), rel=0.04)
    assert predicted.noise(P) == pytest.approx(measured.noise(P), rel=0.02)
    torch.testing.assert_close(predicted.squared_bias.sqrt(), measured.squared_bias.sqrt(), rtol=0.05, atol=1e-5)


@pytest.mark.parametrize("name", AVERAGED)
def test_predictions_of_averages_are_what_is_drawn(name: str, seed: int) -> None:
    options = {"log_q": Q.log(), "num_negatives": 10}
    estimator, generator = ESTIMATORS[name], torch.Generator().manual_seed(seed)
    measured = measured_gradient(estimator, ROWS, LABELS, draws=1500, generator=generator, **options)
    predicted = predicted_gradient(estimator, ROWS, LABELS, **options)
    exact = exact_gradient(estimator, ROWS, LABELS, **options)
    assert measured.noise(P) == pytest.approx(exact.noise(P), rel=0.04)
    assert ((measured.squared_bias - exact.squared_bias).abs() < 5 * measured.bias_error).all()
    assert predicted.noise(P) == pytest.approx(exact.noise(P), rel=0.02)
    assert ((measured.squared_bias - predicted.squared_bias).abs() < 5 * measured.bias_error + 1e-4).all()
    partition = predicted_gradient(ESTIMATORS["partition"], ROWS, LABELS, **options)
    assert predicted.noise(P) > partition.noise(P)


def test_the_past_of_an_average_by_hand() -> None:
    ratio = RatioOfSums(1.0, Q, Q, 1, gamma=0.2, drift=math.log(1.5))
    torch.testing.assert_close(ratio.past(3), torch.tensor([0.2, 0.16 * 1.5, 0.64 * 2.25], dtype=torch.float64))
    assert ratio.past(1).tolist() == [1.0]


def test_what_an_average_wins_and_what_it_loses_while_scores_move() -> None:
    options = {"log_q": Q.log(), "num_negatives": 10}
    bias = {name: predicted_gradient(each, ROWS, LABELS, **options).bias(P) for name, each in ESTIMATORS.items()}
    slow, fast = (f"partition, compositional {gamma:g}" for gamma in GAMMAS)
    assert bias[slow] < bias["partition"] / 4
    assert bias[slow] < bias[fast] < bias["partition"]
    # Late by up to drift / gamma: the smaller gamma, the more.
    assert DRIFT / GAMMAS[0] / 2 < bias[f"{slow}, moving"] < DRIFT / GAMMAS[0]
    assert bias[f"{fast}, moving"] < bias[f"{slow}, moving"] / 2


def test_draws_agree_with_enumeration(seed: int) -> None:
    options = {"log_q": Q.log(), "num_negatives": 5}
    estimator, generator = ESTIMATORS["logq"], torch.Generator().manual_seed(seed)
    exact = measured_gradient(estimator, ROWS, LABELS, **options)
    drawn = measured_gradient(estimator, ROWS, LABELS, draws=4000, generator=generator, **options)
    assert ((drawn.squared_bias - exact.squared_bias).abs() < 5 * drawn.bias_error).all()
    assert drawn.squared_noise.tolist() == pytest.approx(exact.squared_noise.tolist(), rel=0.1)
    assert abs(drawn.bias(P) - exact.bias(P)) < 5 * drawn.standard_error(P)


def test_a_row_of_your_own(seed: int) -> None:
    """An estimate without noise, and one without bias: the exact gradient with coins of +-1 added to it."""

    def shifted(case: GradientCase, ids: Tensor) -> Tensor:
        return (case.exact + 0.1).expand(len(ids), -1)

    def noisy(case: GradientCase, ids: Tensor) -> Tensor:
        return case.exact + torch.where(ids[:, 0] == 0, 1.0, -1.0)[:, :1].double()

    def ratio(case: GradientCase) -> RatioOfSums:
        raise NotImplementedError

    log_q = torch.tensor([0.5, 0.25, 0.25]).log()
    bias = measured_gradient(GradientEstimator("shifted", shifted, ratio), ROWS, LABELS, num_negatives=2)
    torch.testing.assert_close(bias.squared_bias, torch.full((3,), 0.03).double())
    assert bias.squared_noise.tolist() == pytest.approx([0.0] * 3, abs=1e-12)
    own, generator = GradientEstimator("noisy", noisy, ratio), torch.Generator().manual_seed(seed)
    rows, labels = P.log().expand(100, 3), torch.zeros(100, dtype=torch.int64)
    noise = measured_gradient(own, rows, labels, log_q=log_q, draws=400, generator=generator)
    assert float(noise.squared_noise.mean()) == pytest.approx(3.0, rel=0.01)
    # The square of a mean of 400 has 3 / 400 of noise in it; products of different groups have none.
    assert float(noise.squared_bias.mean()) == pytest.approx(0, abs=4 * float(noise.bias_error.norm()) / 100)
    assert float(noise.bias_error.norm()) / 100 < 3 / 400 / 4


def test_bad_arguments() -> None:
    estimator = ESTIMATORS["logq"]
    for scores, target in ((ROWS[0], LABELS), (ROWS, LABELS[:2]), (ROWS, None)):
        with pytest.raises(ManymaxError, match=r"`target` must (name a label for every row|be a tensor)"):
            predicted_gradient(estimator, scores, target)
    with pytest.raises(ArgumentError, match="`log_q` must be finite, with one number for each of 3 classes"):
        predicted_gradient(estimator, ROWS, LABELS, log_q=torch.tensor([0.0, -math.inf, -math.inf]))
    for name, k in (("logq", 5000), (AVERAGED[0], 2)):
        with pytest.raises(ArgumentError, match="Pass draws=2000"):
            measured_gradient(ESTIMATORS[name], ROWS, LABELS, num_negatives=k)
    with pytest.raises(ArgumentError, match="`draws` must be an integer of at least 40"):
        measured_gradient(estimator, ROWS, LABELS, draws=39)
