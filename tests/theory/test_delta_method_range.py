"""The range of the Delta method: inside it predictions are right to a tenth, and few right ones are left outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import bias as enumeration
from manymax.engine.approximation import TOLERANCE
from manymax.members.sampled_softmax.theory import ESTIMATES
from manymax.theory.bias_variance import estimate
from tests.theory.bias_helpers import relative_error

# P and q, where the second class has P = 0.1 but is hardly ever drawn.
STARVED = torch.tensor([[0.5, 0.1, 0.4], [0.4, 0.001, 0.599]], dtype=torch.float64)


@pytest.mark.parametrize("correction", ["importance", "logq", "partition"])
def test_a_class_that_is_hardly_drawn_takes_the_delta_method_out_of_range(correction: str) -> None:
    """The rule of thumb, chi2/k <= 0.2 and k q_j >= 20 for the likeliest class, would wrongly trust the prediction."""
    probs, q = STARVED
    assert enumeration.delta_holds(probs, q, 50)
    options: dict[str, Any] = {"log_q": q.log(), "correction": correction}
    found = estimate("ssm", probs.log(), torch.tensor(2), num_negatives=50, **options)
    assert relative_error(found) > 0.4  # the prediction is about twice the truth
    assert not found.in_range
    assert estimate("ssm", probs.log(), torch.tensor(2), num_negatives=50_000, **options).in_range


def test_one_label_out_of_range_is_enough() -> None:
    """If the starved class is the label, its weight is not in the sum: only the other labels are out of range."""
    probs, q = STARVED
    options: dict[str, Any] = {"log_q": q.log(), "num_negatives": 50, "correction": "partition"}
    in_range = [bool(estimate("ssm", probs.log(), torch.tensor(y), **options).in_range) for y in range(3)]
    assert in_range == [False, True, False]
    assert not estimate("ssm", probs.log(), **options).in_range


def random_cases(seed: int, count: int) -> list[tuple[Tensor, Tensor, int, int]]:
    """Random (scores, log q, label, k): all spreads, proposals near P and far from it, some with a starved class."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    found = []
    for _ in range(count):
        num_classes = int(2 ** uniform(1, 7))
        scores = uniform(0.3, 4) * torch.randn(num_classes, generator=generator, dtype=torch.float64)
        noise = torch.randn(num_classes, generator=generator, dtype=torch.float64)
        proposal = uniform(0, 1) * scores + uniform(0, 2) * noise
        if uniform(0, 1) < 0.3:
            proposal[int(uniform(0, num_classes))] -= uniform(2, 10)
        target = int(torch.multinomial(scores.softmax(-1), 1, generator=generator))
        found.append((scores, proposal.log_softmax(-1), target, int(10 ** uniform(0, 5))))
    return found


@pytest.mark.parametrize("correction", ESTIMATES)
def test_inside_its_range_the_delta_method_is_within_a_tenth(correction: str, seed: int) -> None:
    inside, near, total = 0, 0, 150
    for scores, proposal, target, k in random_cases(seed, total):
        found = estimate("ssm", scores, torch.tensor(target), log_q=proposal, num_negatives=k, correction=correction)
        if found.variance < 1e-9:  # rounding errors are as large as that
            continue
        error = relative_error(found).item()
        assert not found.in_range or error <= 1.2 * TOLERANCE, (scores, proposal, target, k)
        inside += bool(found.in_range)
        near += error <= TOLERANCE
    assert inside >= 0.7 * near  # at least 7 in 10 of the right predictions are in range
    assert near <= 0.9 * total  # and some predictions are wrong


@given(
    logits=st.lists(st.tuples(st.floats(-8, 8), st.floats(-8, 8)), min_size=2, max_size=4),
    k=st.integers(1, 10**5),
    correction=st.sampled_from(ESTIMATES),
)
def test_few_classes_in_range_have_right_predictions(
    logits: list[tuple[float, float]], k: int, correction: str
) -> None:
    scores, proposal = torch.tensor(logits, dtype=torch.float64).T
    found = estimate(
        "ssm", scores, torch.tensor(0), log_q=proposal.log_softmax(-1), num_negatives=k, correction=correction
    )
    if found.variance > 1e-9 and found.in_range:
        assert relative_error(found) <= 1.2 * TOLERANCE
