"""The native kernels give the values of plain torch, for rows of every kind."""

from __future__ import annotations

import pytest
import torch

import manymax
from manymax.engine import native_library
from manymax.errors import ManymaxError
from tests.heads.plain import needs_library

SPARSE = {
    "sparsemax": manymax.linear_sparsemax_loss,
    "entmax": manymax.linear_entmax_loss,
    "rankmax": manymax.linear_rankmax_loss,
}


def gradients(name: str, scale: float, classes: int, positives: int = 3, **options: object) -> list[torch.Tensor]:
    """The loss and its gradients in queries and class vectors; larger scales have smaller supports."""
    random = torch.Generator().manual_seed(classes)
    queries, vectors = (torch.randn(n, 8, generator=random) for n in (40, classes))
    leaves = (scale * queries).requires_grad_(), vectors.requires_grad_()
    target = torch.randint(classes, (40, positives), generator=random)
    target[torch.rand(40, positives, generator=random) < 0.3] = -100
    loss = SPARSE[name](*leaves, target, options=options)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@needs_library
@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("scale", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("classes", [17, 1000, 5000])
def test_rows_of_every_kind(name: str, scale: float, classes: int) -> None:
    """Supports of a few classes, of a few percent and of all classes; in float32 and on several threads."""
    compiled_agrees(name, scale, classes)


@needs_library
@pytest.mark.parametrize("scale", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("positives", [1, 2, 16, 44, 60, 90])
def test_rankmax_with_many_positives(positives: int, scale: float) -> None:
    """Up to 32 positives of a row take a pass each, more take one search; about a third of them are padding."""
    compiled_agrees("rankmax", scale, 3000, positives)


def compiled_agrees(name: str, scale: float, classes: int, positives: int = 3) -> None:
    """Fail unless loss and gradients of the native kernel, at every level, are those of the plain torch kernel."""
    expected = gradients(name, scale, classes, positives, backend="torch")
    for level in native_library.levels_here():
        torch.set_num_threads(2)
        try:
            found = gradients(name, scale, classes, positives, backend=f"native-{level}")
        finally:
            torch.set_num_threads(1)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-6 * float(other.abs().max()))


@needs_library
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", SPARSE)
def test_scores_that_are_no_numbers_are_refused(name: str, bad: float) -> None:
    queries, vectors = torch.randn(3, 4), torch.randn(50, 4)
    queries[1, 2] = bad
    with pytest.raises(ManymaxError, match="`scores` must not hold"):
        SPARSE[name](queries, vectors, torch.tensor([0, 1, 2]), options={"backend": "native"})
