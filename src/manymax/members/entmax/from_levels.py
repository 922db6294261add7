"""What follows from the levels of rows: probabilities, conjugates, and gradients in scores and alpha."""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.engine.blocks import Dense
from manymax.engine.row_target import RowTarget
from manymax.ops import levels


def conjugate_of(moment: Tensor, level: Tensor, alpha: float) -> Tensor:
    """Omega*(s) - max s = (sum_i u_i p_i - 1) / alpha - v, from the sum and the level in either form, (n,) each."""
    v = level if levels.level_is_v(alpha - 1) else (level - 1) / (alpha - 1)
    return (moment - 1) / alpha - v


def grad_alpha(target: RowTarget, slopes: Tensor | None) -> Tensor | None:
    """The gradient in alpha, (), from d Omega(p) / d alpha of the rows (n,); None where it is not wanted."""
    if slopes is None or target.coefficient is None:
        return None
    # d Omega*(s) / d alpha = -d Omega(p) / d alpha at fixed p, because p maximises <p, s> - Omega(p). On several ranks
    # this is the part of the classes of this one; the parts of all ranks are added up outside of the kernel.
    return -(target.row_coefficient * slopes).sum()


def dense_gradient(target: RowTarget, probs: Tensor, rows: Tensor) -> Dense:
    """The gradient of some rows from their probabilities (m, C'), in place of these."""
    # coefficient (total p - t) = coefficient total (p - t / total): the row factor goes on the queries (m, d) and not
    # on the table, which is C / d times as large.
    part = target[rows]
    part.subtract_(probs)
    return Dense(probs, part.row_coefficient, None if len(rows) == len(target.total) else rows)


def bases_and_probs_(d: Tensor, level: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """u, in a new table, and p = u^(1 / beta), which overwrites d."""
    return levels.power_bases(d, level, beta, torch.empty_like(d)), levels.probabilities_(d, level, beta)
