"""Arguments of the measurements of bias and variance: masks, shapes, dtypes, and errors."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from manymax import ClassTree, HuffmanTree
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.members.sampled_softmax.theory import ESTIMATES
from manymax.theory.approximations import approximations, tree_log_probs
from manymax.theory.bias_variance import deviation, drawn, estimate
from tests.theory.bias_helpers import DRAWN, SCORES, TARGET, Q, corrected


def test_masked_classes_change_nothing_unless_they_are_drawn() -> None:
    """A masked class with q = 0 changes nothing; one with q > 0 wastes draws, as the draws confirm."""
    mask = torch.tensor([[-math.inf]]).double().expand(2, 1)
    masked, proposal = torch.cat([SCORES, mask], -1), torch.cat([Q, Q.new_zeros(1)]).log()
    for name, correction in DRAWN:
        options: dict[str, Any] = {"num_negatives": 3, **corrected(correction)}
        with_mask = estimate(name, masked, log_q=proposal, **options)
        without = estimate(name, SCORES, log_q=Q.log(), **options)
        if correction != "none":  # the offset of "none" depends on the number of classes
            torch.testing.assert_close(with_mask.exact_bias, without.exact_bias)
        torch.testing.assert_close(with_mask.exact_variance, without.exact_variance)
    for name in ("rg", "taylor_softmax"):
        torch.testing.assert_close(estimate(name, masked).exact_bias, estimate(name, SCORES).exact_bias)
    drawn_mask = torch.cat([0.5 * Q, Q.new_tensor([0.5])]).log()
    found = estimate("ssm", masked, TARGET, log_q=drawn_mask, num_negatives=6, correction="partition")
    sampled = drawn(
        "ssm", masked, TARGET, log_q=drawn_mask, num_negatives=6, correction="partition", draws=4000,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert ((sampled.bias - found.exact_bias).abs() <= 4 * sampled.bias_error).all()


def test_shifts_dtypes_and_shapes() -> None:
    base = deviation("ssm", SCORES, num_negatives=5)
    torch.testing.assert_close(deviation("ssm", SCORES + 300, num_negatives=5), base)
    torch.testing.assert_close(deviation("ssm", SCORES.float(), num_negatives=5), base, rtol=1e-5, atol=0)
    torch.testing.assert_close(deviation("ssm", SCORES[0], num_negatives=5), base[:1])
    torch.testing.assert_close(
        deviation("ssm", SCORES, num_negatives=5, log_q=Q.log().expand(2, 4)),
        deviation("ssm", SCORES, num_negatives=5, log_q=Q.log()),
    )
    one = deviation("ssm", torch.zeros(2, 1), num_negatives=3)
    assert one.tolist() == pytest.approx([0.0, 0.0], abs=1e-15)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"scores": torch.zeros(2, 3, 4)}, ArgumentError, "`scores` must be"),
    ({"scores": torch.zeros(0, 4)}, ArgumentError, "`scores` must be"),
    ({"scores": torch.zeros(2, 4).long()}, ArgumentTypeError, "`scores`"),
    ({"scores": torch.full((2, 4), math.nan)}, ArgumentError, "nan"),
    ({"target": torch.tensor([0, 4])}, ArgumentError, "`target` ids"),
    ({"target": torch.tensor([0])}, ArgumentError, "`target` must have"),
    ({"target": torch.tensor([0.0, 1.0])}, ArgumentTypeError, "`target`"),
    ({"log_q": torch.zeros(4)}, ArgumentError, "sums to 4"),
    ({"log_q": torch.zeros(3)}, ArgumentError, "`log_q` must have shape"),
    ({"log_q": [0.5, 0.5]}, ArgumentTypeError, "`log_q`"),
    ({"log_q": torch.tensor([0.5, 0.5, 0.0, 0.0]).log()}, ArgumentError, "never drawn"),
    ({"num_negatives": 0}, ArgumentError, "`num_negatives`"),
    ({"num_negatives": 2.0}, ArgumentTypeError, "`num_negatives`"),
    ({"correction": "log_q"}, ArgumentError, "Did you mean 'logq'"),
    ({"order": 2}, ArgumentError, "`order` is no setting of sampled_softmax as an approximation; it has correction"),
    ({"member": "rg", "order": 2}, ArgumentError, "`order` is no setting of rg as an approximation; it has none"),
    ({"member": "taylor_softmax", "order": 3}, ArgumentError, r"`order` must be .* \(odd orders turn negative"),
    ({"member": "hsm"}, ArgumentTypeError, "`tree`"),
    ({"member": "hsm", "tree": torch.zeros(2, 3)}, ArgumentError, "`tree`"),
    ({"member": "hsm", "tree": HuffmanTree([1, 2])}, ArgumentError, "`tree`"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), BAD)
def test_bad_arguments(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        estimate(**{"member": "ssm", "scores": SCORES, "target": TARGET, **wrong})


def test_more_bad_arguments() -> None:
    masked = torch.tensor([[0.0, -math.inf]])
    with pytest.raises(ArgumentError, match="masked"):
        estimate("ssm", masked, torch.tensor([1]))
    with pytest.raises(ArgumentError, match="empty sum"):
        estimate("ssm", masked, torch.tensor([0]), correction="importance")
    with pytest.raises(ArgumentError, match="`draws`"):
        drawn("ssm", SCORES, TARGET, draws=1)
    with pytest.raises(ArgumentError, match=r"`log_q` must be \(C,\)"):
        drawn("ssm", SCORES, TARGET, log_q=Q.log().expand(2, 4))
    with pytest.raises(ArgumentError, match="`dim`"):
        tree_log_probs(SCORES, HuffmanTree([1, 1, 1, 1]), 0)
    with pytest.raises(ArgumentError, match="`tree`"):
        tree_log_probs(SCORES, ClassTree.from_paths([[0], [1]]), 1)


def test_every_correction_has_an_estimate_for_every_k() -> None:
    assert set(ESTIMATES) == {"none", "logq", "partition", "importance"}
    for name, k in itertools.product(approximations(drawing=True), (1, 2)):
        assert deviation(name, SCORES, num_negatives=k).shape == (2,)
