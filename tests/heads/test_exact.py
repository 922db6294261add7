"""Exact heads against the plain losses on the table of scores: value and every gradient, for all options and shapes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import manymax
from manymax.ops import simplex
from tests.heads.plain import (
    CASES,
    KINDS,
    REGIMES,
    TOLERANCE,
    HeadCase,
    Problem,
    agree,
    class_weights,
    compare,
    make_problem,
    make_target,
    option_sets,
    upstream,
    value_and_gradients,
)

DTYPES = [pytest.param(torch.float64, id="float64"), pytest.param(torch.float32, id="float32")]
SMOOTH = [case for case in CASES if case.values[0].member.takes.smoothing]


# Every option ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_every_option_of_the_plain_loss(case: HeadCase, kind: str, dtype: torch.dtype) -> None:
    """With small and large supports in a block, masked classes, ignored rows, batch dimensions, a class of weight 0."""
    if not case.takes(kind):
        pytest.skip("the plain loss takes no such target")
    problem = make_problem(3, 4, num_classes=301, masked=True)
    target = make_target(kind, 3, 4, num_classes=301)
    for options in option_sets(301, smoothing=case.member.takes.smoothing, odd=dtype == torch.float32):
        compare(case, problem, target, dtype=dtype, options={"block_rows": 7}, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("case", CASES)
def test_thin_and_wide_supports_in_blocks_of_any_size(case: HeadCase, regime: str, dtype: torch.dtype) -> None:
    problem = make_problem(20, num_classes=1003, regime=regime)
    target = make_target("ids", 20, num_classes=1003)
    for reduction, blocks in (("none", {"block_rows": 1}), ("mean", {"block_rows": 7}), ("mean", None)):
        compare(case, problem, target, dtype=dtype, reduction=reduction, options=blocks)


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_the_regimes_are_what_they_say(alpha: float) -> None:
    """Otherwise the tests above would cover only one of the two ways to compute a row."""
    few = {}
    for regime in REGIMES:
        scores = make_problem(20, num_classes=1003, regime=regime).scores()
        padded = torch.nn.functional.pad(scores, (0, 5), value=-torch.inf)
        _, wide, maximum = simplex.candidates(padded, alpha - 1)
        few[regime] = 1 - len(wide) / len(maximum)
    assert few["wide"] == 0
    assert few["thin"] > 0.8
    assert 0.3 < few["mixed"] < 0.7


@pytest.mark.parametrize("case", CASES)
def test_any_ignore_index(case: HeadCase) -> None:
    problem = make_problem(12, num_classes=40)
    for ignore_index, kind in itertools.product((-1, 0, 5, 1000), ("ids", "padded ids")):
        target = make_target(kind, 12, num_classes=40)
        target = torch.where(target == -100, ignore_index, target)
        compare(case, problem, target, ignore_index=ignore_index)


@pytest.mark.parametrize("label_smoothing", [1e-3, 1.0])
@pytest.mark.parametrize("case", SMOOTH)
def test_a_little_smoothing_and_nothing_but_smoothing(case: HeadCase, label_smoothing: float) -> None:
    problem = make_problem(12, num_classes=60, masked=True)
    for kind, (dtype, multilabel) in itertools.product(KINDS, ((torch.float64, "normalized"), (torch.float32, "sum"))):
        target = make_target(kind, 12, num_classes=60)
        compare(case, problem, target, dtype=dtype, label_smoothing=label_smoothing, multilabel=multilabel)


@pytest.mark.parametrize("order", [2, 4, 6, 8, 12, 20])
def test_taylor_orders(order: int) -> None:
    """Scores down to -10: the higher the order, the more its terms cancel below 0, which costs float32 digits."""
    case = HeadCase(manymax.FAMILY["taylor_softmax"], {"order": order})
    problem = make_problem(12, num_classes=60, regime="near", masked=True)
    problem = Problem(problem.input * 4, problem.linear_weight, problem.linear_bias)
    for reduction in ("mean", "none"):
        target = make_target("padded ids", 12, num_classes=60)
        compare(case, problem, target, dtype=torch.float32, reduction=reduction)


@settings(max_examples=150)
@given(st.data())
def test_any_combination(data: st.DataObject) -> None:
    """Sizes, supports, targets, options and blocks drawn together."""
    case = data.draw(st.sampled_from([case.values[0] for case in CASES]))
    num_classes, batch = data.draw(st.integers(1, 400)), data.draw(st.sampled_from([(), (0,), (1,), (9,), (2, 5)]))
    bias, masked = data.draw(st.booleans()), data.draw(st.booleans()) and num_classes > 4
    problem = make_problem(
        *batch,
        num_classes=num_classes,
        regime=data.draw(st.sampled_from(["wide", "near", "thin", "mixed"])),
        bias=bias,
        masked=masked,
        seed=data.draw(st.integers(0, 9)),
    )
    kind = data.draw(st.sampled_from([kind for kind in KINDS if case.takes(kind)]))
    smoothing = data.draw(st.sampled_from([0.0, 0.1, 0.5])) if case.member.takes.smoothing else 0.0
    sparse = data.draw(st.booleans()) and smoothing == 0
    compare(
        case,
        problem,
        make_target(kind, *batch, num_classes=num_classes, seed=data.draw(st.integers(0, 9))),
        dtype=data.draw(st.sampled_from([torch.float64, torch.float32])),
        reduction=data.draw(st.sampled_from(["mean", "sum", "none"])),
        multilabel=data.draw(st.sampled_from(["sum", "normalized"])),
        label_smoothing=smoothing,
        weight=class_weights(num_classes) if data.draw(st.booleans()) else None,
        options={"block_rows": data.draw(st.integers(1, 12)), "sparse_grad": sparse},
    )


# Alpha -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.5, 1.9, 2.0])
def test_gradient_in_alpha(alpha: float, dtype: torch.dtype) -> None:
    """Alpha as a learned tensor, whose gradient comes after those of queries, class vectors and bias."""
    problem = make_problem(3, 4, num_classes=301, masked=True)
    for kind, options in zip(
        itertools.cycle(KINDS), option_sets(301, smoothing=True, odd=dtype == torch.float32), strict=False
    ):
        target = make_target(kind, 3, 4, num_classes=301)
        results = []
        for function, kept in (("head", dtype), ("plain", torch.float64)):
            # Rounded to `dtype` first, so that head and plain loss see the same number.
            leaf = torch.tensor(alpha, dtype=dtype).to(kept).requires_grad_()
            case = HeadCase(manymax.FAMILY["entmax"], {"alpha": leaf})
            loss = getattr(case, function)
            results.append(value_and_gradients(loss, problem.leaves(kept), target, extra=(leaf,), **options))
        # Rows of both signs cancel: the sum has fewer correct digits than its terms.
        agree(*results, 10 * TOLERANCE[dtype], (kind, options))


@pytest.mark.parametrize("dtype", DTYPES)
def test_alphas_between_softmax_and_entmax(dtype: torch.dtype) -> None:
    """With a large power in p = u^(1 / (alpha - 1)), p leaves the range of the dtype long before u does."""
    problem, target = make_problem(12, num_classes=301, masked=True), make_target("ids", 12, num_classes=301)
    for alpha in (1.0001, 1.01, 1.03, 1.045, 1.1, 1.13, 1.17, 1.21, 1.24, 1.25):
        compare(HeadCase(manymax.FAMILY["entmax"], {"alpha": alpha}), problem, target, dtype=dtype)


@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradient_in_alpha_of_no_rows_is_zero(batch: int, reduction: str) -> None:
    alpha = torch.tensor(1.5, requires_grad=True)
    problem, target = make_problem(batch, num_classes=40), torch.full((batch,), -100)
    value = manymax.linear_entmax_loss(
        problem.input, problem.linear_weight, target, alpha=alpha, reduction=reduction
    ).sum()
    assert torch.autograd.grad(value, alpha)[0] == 0


def test_alpha_of_a_head_is_one_number() -> None:
    problem, target = make_problem(4, num_classes=40), make_target("ids", 4, num_classes=40)
    arguments = (problem.input, problem.linear_weight, target)
    with pytest.raises(manymax.ArgumentError, match=r"`alpha` of a head must be a number or a scalar.*\(4, 1\)"):
        manymax.linear_entmax_loss(*arguments, alpha=torch.full((4, 1), 1.5))
    with pytest.raises(manymax.ArgumentError, match=r"no gradient in `alpha` at alpha = 1"):
        manymax.linear_entmax_loss(*arguments, alpha=torch.tensor(1.0, requires_grad=True))
    for alpha in (0.9, 2.1):
        with pytest.raises(manymax.ArgumentError, match=r"`alpha` must be a number in \[1, 2\]"):
            manymax.linear_entmax_loss(*arguments, alpha=alpha)
    softmax = manymax.linear_softmax_loss(*arguments)
    assert torch.equal(manymax.linear_entmax_loss(*arguments, alpha=torch.tensor(1.0)), softmax)
    sparsemax = manymax.linear_sparsemax_loss(*arguments)
    assert torch.equal(manymax.linear_entmax_loss(*arguments, alpha=2), sparsemax)


# Shapes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_classes", [1, 2, 7, 15, 16, 17, 33])
@pytest.mark.parametrize("case", CASES)
def test_few_classes(case: HeadCase, num_classes: int) -> None:
    for kind, (dtype, bias) in itertools.product(KINDS, ((torch.float64, False), (torch.float32, True))):
        if case.takes(kind):
            problem = make_problem(6, num_classes=num_classes, bias=bias)
            compare(case, problem, make_target(kind, 6, num_classes=num_classes), dtype=dtype)


@pytest.mark.parametrize("batch", [(), (0,), (1,), (2, 0), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_batch_shapes(case: HeadCase, batch: tuple[int, ...]) -> None:
    problem = make_problem(*batch, num_classes=40)
    for kind, reduction in itertools.product(KINDS, ("none", "mean")):
        if case.takes(kind):
            target = make_target(kind, *batch, num_classes=40)
            value = compare(case, problem, target, reduction=reduction)[0]
            assert value.shape == (batch if reduction == "none" else ())


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("case", CASES)
def test_rows_that_are_all_ignored_give_zero(case: HeadCase, reduction: str) -> None:
    problem = make_problem(9, num_classes=40)
    for target, multilabel in itertools.product(
        (
            torch.full((9,), -100),
            torch.full((9, 2), -100),
            torch.zeros(9, 40, dtype=torch.bool),
            torch.ones(9, dtype=torch.long),  # the class without weight
        ),
        ("sum", "normalized"),
    ):
        options = {"weight": class_weights(40), "multilabel": multilabel, "reduction": reduction}
        results = compare(case, problem, target, **options)
        assert all((result == 0).all() for result in results)


@pytest.mark.parametrize("num_classes", [48, 301])
@pytest.mark.parametrize("case", CASES)
def test_strided_arguments(case: HeadCase, num_classes: int) -> None:
    """Transposed vectors, every second query, an expanded bias; 48 classes need no padding, 301 do."""
    problem = make_problem(20, num_classes=num_classes)
    strided = Problem(
        problem.input.repeat_interleave(2, 0)[::2],
        problem.linear_weight.T.contiguous().T,
        torch.ones((), dtype=torch.float64).expand(num_classes),
    )
    assert not strided.linear_weight.is_contiguous()
    compare(case, strided, make_target("ids", 20, num_classes=num_classes))


# Gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_some_arguments_only(case: HeadCase, wanted: tuple[int, ...]) -> None:
    problem = make_problem(20, num_classes=301)
    target = make_target("ids", 20, num_classes=301)
    for reduction in ("mean", "none"):
        value, *expected = value_and_gradients(case.plain, problem.leaves(), target, reduction=reduction)
        parts = [part.requires_grad_(i in wanted) for i, part in enumerate(problem.leaves().parts())]
        ours = case.head(Problem(*parts), target, reduction=reduction)
        grads = torch.autograd.grad(ours, [parts[i] for i in wanted], upstream(ours))
        agree([ours.detach(), *grads], [value, *(expected[i] for i in wanted)], TOLERANCE[torch.float64])


@pytest.mark.parametrize("case", CASES)
def test_without_gradients_the_value_is_the_same(case: HeadCase) -> None:
    problem, target = make_problem(20, num_classes=301), make_target("ids", 20, num_classes=301)
    for reduction in ("mean", "none"):
        value = case.head(problem, target, reduction=reduction)
        assert not value.requires_grad
        agree([value], [case.plain(problem, target, reduction=reduction)], TOLERANCE[torch.float64])


@pytest.mark.parametrize("case", [case for case in CASES if case.values[0].member.held is None])
def test_gradients_by_differences(case: HeadCase) -> None:
    """At scores near those of `make_problem`, which may be at a kink of sparsemax or at a cut of rankmax themselves."""
    random = torch.Generator().manual_seed(0)
    problem = make_problem(3, num_classes=6, seed=3).leaves()
    parts = [part.detach() + torch.rand(part.shape, generator=random) / 9 for part in problem.parts()]
    target = torch.tensor([[0, 4], [2, -100], [5, 1]])

    def rows(*parts: Tensor) -> Tensor:
        return case.head(Problem(*parts), target, reduction="none")

    def mean(*parts: Tensor) -> Tensor:
        return case.head(Problem(*parts), target)

    for loss in (rows, mean):
        assert torch.autograd.gradcheck(loss, [part.requires_grad_() for part in parts], fast_mode=True)
