"""The reductions none, mean and sum."""

from __future__ import annotations

import pytest
import torch

from manymax.ops.reduction import reduce

ROWS, DIVISOR = torch.tensor([[1.0, 2.0], [6.0, 0.0]]), torch.tensor([[1.0, 1.0], [0.5, 0.0]])


@pytest.mark.parametrize(("reduction", "expected"), [("none", ROWS.tolist()), ("sum", 9.0), ("mean", 3.6)])
def test_values(reduction: str, expected: object) -> None:
    torch.testing.assert_close(reduce(ROWS, DIVISOR, reduction), torch.tensor(expected))


@pytest.mark.parametrize("shape", [(), (2,), (0,), (0, 3)])
def test_mean_over_no_row_is_zero_with_zero_gradient(shape: tuple[int, ...]) -> None:
    rows = torch.zeros(shape, requires_grad=True)
    mean = reduce(rows, torch.zeros(shape), "mean")
    mean.backward()
    assert mean.item() == 0
    assert rows.grad is not None
    assert rows.grad.tolist() == torch.zeros(shape).tolist()
