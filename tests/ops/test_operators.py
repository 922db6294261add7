"""The threshold search as an operator: the checks that torch has for operators, and vmap."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from manymax.ops import operators, simplex


@pytest.mark.parametrize("shape", [(), (3, 1)])
@pytest.mark.parametrize("classes", [5, 600])
def test_operators_are_registered_as_torch_wants_them(shape: tuple[int, ...], classes: int) -> None:
    scores = torch.randn(3, classes, generator=torch.Generator().manual_seed(0))
    alpha = torch.full(shape, 1.5)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(operators.solve, (scores, alpha), test_utils=checks)
    maximum, log_top, _ = simplex.solve(scores, alpha)
    torch.library.opcheck(operators.apply, (scores, alpha, maximum, log_top, torch.ones(3)), test_utils=checks)


@pytest.mark.parametrize("scores_dim", [0, 1, None])
@pytest.mark.parametrize("alpha_shape", [(), (4, 1)])
@pytest.mark.parametrize("alpha_dim", [0, None])
def test_vmap_equals_a_loop(scores_dim: int | None, alpha_shape: tuple[int, ...], alpha_dim: int | None) -> None:
    if scores_dim is None and alpha_dim is None:
        return
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    alpha = 1 + torch.rand(alpha_shape, generator=generator, dtype=torch.float64)
    if scores_dim is not None:
        scores = torch.stack([scores, 2 * scores, scores - 1], scores_dim)
    if alpha_dim is not None:
        alpha = torch.stack([alpha, (alpha + 1) / 2, (alpha + 2) / 2], alpha_dim)

    def run(scores: Tensor, alpha: Tensor, solve: Callable[..., Tensor], apply: Callable[..., Tensor]) -> Tensor:
        maximum, log_top, conjugate = solve(scores, alpha)
        return apply(scores, alpha, maximum, log_top, conjugate)

    mapped = torch.vmap(partial(run, solve=operators.solve, apply=operators.apply), (scores_dim, alpha_dim))(
        scores, alpha
    )
    for i in range(3):
        one = scores if scores_dim is None else scores.select(scores_dim, i)
        one_alpha = alpha if alpha_dim is None else alpha.select(alpha_dim, i)
        torch.testing.assert_close(mapped[i], run(one, one_alpha, simplex.solve, simplex.apply))
