"""RG from the moments of the class vectors, and wrong arguments of both forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import manymax
from manymax import (
    ArgumentError,
    ArgumentTypeError,
    class_moments,
    rg,
    rg_log_partition,
    rg_log_partition_from_moments,
    rg_loss,
)
from tests.losses.rg_cases import INF, direct_loss, high_precision_partition, loss_from_moments, mp, queries_and_classes


@pytest.mark.parametrize("bias", [False, True])
def test_moments_give_the_same_loss_and_gradients(bias: bool) -> None:
    arguments, target = queries_and_classes(bias), torch.tensor([0, 8, 3, 3, 5, 1])
    direct, quick = direct_loss(target, *arguments), loss_from_moments(target, *arguments)
    torch.testing.assert_close(quick, direct, rtol=1e-12, atol=1e-12)
    share = torch.arange(1.0, 7.0).double()  # so that the rows count differently
    gradients = [torch.autograd.grad((share * loss).sum(), arguments) for loss in (quick, direct)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_moments_in_50_digits(bias: bool) -> None:
    input, weight, *rest = (part.detach() for part in queries_and_classes(bias))
    values = rg_log_partition_from_moments(input, class_moments(weight, *rest))
    for x, value in zip(input.tolist(), values.tolist(), strict=True):
        offsets = rest[0].tolist() if bias else [0.0] * 9
        scores = [
            mp.fsum(mp.mpf(a) * mp.mpf(b) for a, b in zip(x, w, strict=True)) + mp.mpf(b0)
            for w, b0 in zip(weight.tolist(), offsets, strict=True)
        ]
        assert abs(value - high_precision_partition(scores)) <= 1e-12


@pytest.mark.parametrize("bias", [False, True])
def test_derivatives_of_the_moments_form(bias: bool) -> None:
    arguments, target = queries_and_classes(bias), torch.tensor([0, 8, 3, 3, 5, 1])
    loss = lambda *parts: loss_from_moments(target, *parts)  # noqa: E731
    assert gradcheck(loss, arguments)
    assert gradgradcheck(loss, arguments)


def test_shape_of_the_queries_is_kept() -> None:
    _, weight = queries_and_classes(False)
    moments = class_moments(weight)
    input = torch.randn(2, 4, 3).double()
    values = rg_log_partition_from_moments(input, moments)
    torch.testing.assert_close(values, rg_log_partition(input @ weight.T))
    torch.testing.assert_close(rg_log_partition_from_moments(input[0, 0], moments), values[0, 0])


class Largest(TorchDispatchMode):
    """Keeps the number of entries of the largest tensor that any operation returns."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else (out,):
            if isinstance(part, Tensor):
                self.entries = max(self.entries, part.numel())
        return out


def test_no_table_of_scores_is_made() -> None:
    batch, num_classes, dim = 50, 400, 4
    input = torch.randn(batch, dim, requires_grad=True)
    weight, bias = torch.randn(num_classes, dim, requires_grad=True), torch.randn(num_classes, requires_grad=True)
    target = torch.zeros(batch, dtype=torch.long)
    with Largest() as quick:
        loss_from_moments(target, input, weight, bias).sum().backward()
    with Largest() as direct:
        direct_loss(target, input, weight, bias).sum().backward()
    assert quick.entries == num_classes * (dim + 1)
    assert direct.entries >= batch * num_classes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_moments_in_half_precision(dtype: torch.dtype) -> None:
    input, weight, bias = (part.detach().to(dtype) for part in queries_and_classes(True))
    exact = rg_log_partition_from_moments(input.double(), class_moments(weight.double(), bias.double()))
    plain = rg_log_partition_from_moments(input, class_moments(weight, bias))
    torch.testing.assert_close(plain, exact.to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = rg_log_partition_from_moments(input, class_moments(weight, bias))
        single = rg_log_partition_from_moments(input.float(), class_moments(weight.float(), bias.float()))
    for value in (mixed, single):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, exact.float())


def test_moments_compile_in_one_graph() -> None:
    arguments, target = queries_and_classes(True), torch.tensor([0, 8, 3, 3, 5, 1])
    loss = lambda *parts: loss_from_moments(target, *parts).sum()  # noqa: E731
    value = torch.compile(loss, fullgraph=True, backend="aot_eager")(*arguments)
    torch.testing.assert_close(value, loss(*arguments))
    expected = torch.autograd.grad(loss(*arguments), arguments)
    torch.testing.assert_close(torch.autograd.grad(value, arguments), expected)


# --- bad input ---

ROWS = torch.zeros(2, 3)
BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: rg_loss(torch.tensor([0.0, math.nan, 1.0]), torch.tensor(0)), ArgumentError, "nan"),
    (lambda: rg_loss(torch.tensor([0.0, INF, 1.0]), torch.tensor(0)), ArgumentError, r"\+inf"),
    (lambda: rg_loss(torch.tensor([0.0, -INF, 1.0]), torch.tensor(1)), ArgumentError, "`target`"),
    (lambda: rg_loss(torch.full((3,), -INF), torch.tensor(1)), ArgumentError, "`scores`.*masked"),
    (lambda: rg(torch.tensor([0.0, math.nan, 1.0])), ArgumentError, "nan"),
    (lambda: rg(torch.full((3,), -INF)), ArgumentError, "masked"),
    (lambda: rg_log_partition(torch.tensor([0.0, math.nan, 1.0])), ArgumentError, "nan"),
    (lambda: rg_log_partition(torch.zeros(2, 0)), ArgumentError, "`scores`"),
    (lambda: rg(torch.zeros(3, dtype=torch.long)), ArgumentTypeError, "`scores`"),
    (lambda: rg_loss(ROWS, torch.zeros(3, dtype=torch.long)), ArgumentError, "`target`"),
    (lambda: rg_loss(ROWS, torch.tensor([0, 3])), ArgumentError, "`target`"),
    (lambda: rg_loss(ROWS, torch.tensor([0, 1]), weight=torch.ones(2)), ArgumentError, "`weight`"),
    (lambda: rg_loss(ROWS, torch.tensor([0, 1]), reduction="average"), ArgumentError, "`reduction`"),
    (lambda: rg_loss(ROWS, torch.tensor([0, 1]), multilabel="mean"), ArgumentError, "`multilabel`"),
    (lambda: rg_loss(ROWS, torch.tensor([0, 1]), label_smoothing=1.5), ArgumentError, "`label_smoothing`"),
    (lambda: class_moments(torch.zeros(3)), ArgumentError, "`linear_weight`"),
    (lambda: class_moments(torch.zeros(0, 3)), ArgumentError, "`linear_weight`"),
    (lambda: class_moments(torch.zeros(3, 2, dtype=torch.long)), ArgumentTypeError, "`linear_weight`"),
    (lambda: class_moments([[0.0]]), ArgumentTypeError, "`linear_weight`"),  # type: ignore[arg-type]
    (lambda: class_moments(torch.zeros(3, 2), torch.zeros(2)), ArgumentError, "`linear_bias`"),
    (lambda: class_moments(torch.zeros(3, 2), torch.zeros(3).long()), ArgumentTypeError, "`linear_bias`"),
    (lambda: rg_log_partition_from_moments(ROWS, class_moments(torch.zeros(5, 4))), ArgumentError, "`input`"),
    (lambda: rg_log_partition_from_moments(ROWS, class_moments(torch.zeros(5, 2))), ArgumentError, "`input`"),
    (
        lambda: rg_log_partition_from_moments(ROWS, class_moments(torch.zeros(5, 2), torch.zeros(5))),
        ArgumentError,
        "`input`",
    ),
    (
        lambda: rg_log_partition_from_moments(torch.tensor(0.0), class_moments(torch.zeros(5, 1))),
        ArgumentError,
        "`input`",
    ),
    (
        lambda: rg_log_partition_from_moments(ROWS.long(), class_moments(torch.zeros(5, 3))),
        ArgumentTypeError,
        "`input`",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_input(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_nan_stays_visible_where_values_cannot_be_checked() -> None:
    scores = torch.tensor([[0.0, math.nan, 1.0]])
    assert torch.vmap(rg_log_partition)(scores).isnan().all()


def test_moments_know_no_masks() -> None:
    with pytest.raises(ArgumentError, match="`linear_bias` must be finite"):
        class_moments(torch.ones(3, 2), torch.tensor([0.0, -torch.inf, 0.0]))


@pytest.mark.parametrize("multilabel", ["sum", "normalized"])
def test_the_head_gives_targets_and_class_weights_the_gradient_of_the_plain_loss(multilabel: str, seed: int) -> None:
    """RG's head is plain autograd, so it takes targets and class weights that want a gradient."""
    input, vectors = torch.randn(4, 3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    rows, weight = torch.rand(4, 6, dtype=torch.float64).softmax(1), torch.rand(6, dtype=torch.float64) + 0.5
    leaves = rows.requires_grad_(), weight.requires_grad_()
    options = {"weight": weight, "multilabel": multilabel}
    by_head = torch.autograd.grad(manymax.linear_rg_loss(input, vectors, rows, **options), leaves)
    plain = torch.autograd.grad(manymax.rg_loss(input @ vectors.T, rows, **options), leaves)
    for actual, expected in zip(by_head, plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_moments_of_vectors_that_are_no_numbers_are_refused(bad: float) -> None:
    with pytest.raises(ArgumentError, match="`linear_weight` must be finite"):
        class_moments(torch.tensor([[1.0, bad], [0.0, 0.0]]))
    with pytest.raises(ArgumentError, match="`input` must be finite"):
        rg_log_partition_from_moments(torch.tensor([[1.0, bad]]), class_moments(torch.ones(2, 2)))
