"""Class vectors in half precision: no whole copy of the table, float32 losses, gradients that are rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import manymax
from manymax import FAMILY
from manymax.engine import native_library
from manymax.engine.half import WIDENED, rounded
from manymax.engine.member import Member
from manymax.heads import head_function

EXACT = [member for member in FAMILY.values() if member.kind == "exact"]
BACKENDS = ("torch", *(f"native-{level}" for level in native_library.levels_here()))
CLASSES, DIM, ROWS = WIDENED + 300, 4, 12


class Wide(TorchDispatchMode):
    """Counts the tensors of the size of the class vectors that operations make in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        for result in out if isinstance(out, tuple | list) else (out,):
            if isinstance(result, Tensor) and result.shape == (CLASSES, DIM) and result.dtype == torch.float32:
                self.count += result.untyped_storage().data_ptr() not in given
        return out


def problem(half: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    queries = torch.randn(ROWS, DIM, generator=random).to(half)
    vectors = torch.randn(CLASSES, DIM, generator=random).to(half)
    return queries, vectors, torch.randint(CLASSES, (ROWS,), generator=random)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("member", EXACT, ids=lambda member: member.name)
def test_a_table_is_never_widened_as_a_whole(member: Member, half: torch.dtype, backend: str) -> None:
    queries, vectors, target = problem(half)
    options = {"backend": backend, "block_rows": 5}
    with Wide() as made, torch.no_grad():
        head_function(member)(queries, vectors, target, options=options)
        manymax.linear_topk(queries, vectors, 3)
    assert made.count == 0
    leaves = queries.clone().requires_grad_(), vectors.clone().requires_grad_()
    with Wide() as made:
        loss = head_function(member)(*leaves, target, options=options)
        grads = torch.autograd.grad(loss, leaves)
    assert made.count <= 1  # the sums of the gradient
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    expected = head_function(member)(*exact, target, options={"backend": "torch"})
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=1e-6)
    for ours, theirs in zip(grads, torch.autograd.grad(expected, exact), strict=True):
        assert ours.dtype == half
        # Rounded once, a number is the nearest one, unless its sum in float32 was next to the middle of two.
        float32_error = 2e-5 * theirs.abs().max()
        nearest = (theirs.to(half).double() - theirs).abs()
        assert ((ours.double() - theirs).abs() <= nearest + float32_error).all()
        assert (ours == theirs.to(half)).double().mean() > 0.97
        torch.testing.assert_close(ours.double(), theirs, rtol=torch.finfo(half).eps, atol=1e-7)


def test_sums_of_many_rows_are_finite() -> None:
    """8,192 losses of about 11 each: their sum is more than float16 holds."""
    queries, vectors = torch.zeros(8192, DIM, dtype=torch.float16), torch.zeros(60_000, DIM, dtype=torch.float16)
    target = torch.zeros(8192, dtype=torch.long)
    loss = manymax.linear_softmax_loss(queries, vectors, target, reduction="sum")
    torch.testing.assert_close(loss, 8192 * torch.tensor(60_000.0).log(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_rounding_in_place(half: torch.dtype) -> None:
    values = torch.randn(1 << 12, 300)  # more than are rounded at a time
    expected = values.to(half)
    result = rounded(values, half)
    assert torch.equal(result, expected)
    assert result.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
    part = torch.randn(10, 6)[:, :4]  # a view of other memory must stay as it is
    before = part.clone()
    assert torch.equal(rounded(part, half), before.to(half))
    assert torch.equal(part, before)
