"""When the values of tensors may be read, and the errors about them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.checks import check_finite, check_scores, visible, working


def test_plain_tensors_on_the_cpu_are_visible() -> None:
    assert visible(torch.zeros(2), torch.zeros(2, requires_grad=True))
    assert not visible(torch.zeros(2), torch.zeros(2, device="meta"))


def test_nothing_is_visible_inside_a_transform() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(visible(x))
        return x.sum()

    torch.vmap(look)(torch.zeros(2, 2))
    torch.func.grad(look)(torch.zeros(2))
    torch.compile(look, backend="eager", fullgraph=True)(torch.zeros(2))
    assert seen[:2] == [False, False]
    assert not any(seen)


@pytest.mark.parametrize(
    ("scores", "error", "words"),
    [
        ([1.0, 2.0], ArgumentTypeError, "list"),
        (torch.tensor([1, 2]), ArgumentTypeError, "torch.int64"),
        (torch.tensor([1.0 + 1j]), ArgumentTypeError, "torch.complex64"),
        (torch.tensor(1.0), ArgumentError, r"shape \(\)"),
        (torch.zeros(3, 0), ArgumentError, r"shape \(3, 0\)"),
    ],
)
def test_scores_that_cannot_be_used(scores: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        check_scores(scores)  # type: ignore[arg-type]
    assert "`scores`" in str(caught.value)


@pytest.mark.parametrize(("value", "words"), [(torch.nan, "nan"), (torch.inf, r"\+inf"), (-torch.inf, "masked")])
def test_row_maxima_that_cannot_be_used(value: float, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        check_finite(torch.tensor([0.0, value]))
    check_finite(torch.tensor([0.0, 1e30]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_arithmetic_runs_in_float32_at_least(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    work, result = working(torch.zeros(2, dtype=dtype))
    assert (work.dtype, result) == (wide, dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert working(torch.zeros(2, dtype=dtype))[1] == wide
