"""Interactions, models in all variants, and the objective of `RGFactorization` over the full table of scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from manymax.members.rg.als import RGFactorization

NUM_USERS, NUM_ITEMS, DIM = 9, 7, 4


PRIOR = torch.tensor([5.0, 1.0, 0.5, 8.0, 2.0, 1.0, 0.1])
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two_ridges": {"user_ridge": 0.3, "item_ridge": 2.0},
    "ridge_power": {"ridge_power": 1.0},
    "prior": {"prior": PRIOR},
    "prior_ridge_power": {"prior": PRIOR, "ridge_power": 0.5},
    "positive": {"positive_weight": 0.8},
    "positive_prior": {"positive_weight": 2.0, "prior": PRIOR, "ridge_power": -0.3},
}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def interactions(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Unsorted pairs, each given twice: user 3 has every item but one, user 5 a single one, user 8 and item 2 none."""
    table = torch.rand(NUM_USERS, NUM_ITEMS, generator=generator(seed)) < 0.4
    table[3], table[5], table[8], table[:, 2] = True, False, False, False
    table[5, 6] = True
    users, items = table.nonzero(as_tuple=True)
    permutation = torch.randperm(len(users), generator=generator(seed))
    return users[permutation].repeat(2), items[permutation].repeat(2)


def build(seed: int = 0, size: tuple[int, int, int] = (NUM_USERS, NUM_ITEMS, DIM), **keywords: Any) -> RGFactorization:
    keywords = {"init_std": 0.5, "dtype": torch.float64, "ridge": 0.5, "ridge_power": 0.0} | keywords
    return RGFactorization(*size, generator=generator(seed), **keywords)


def table_of(users: Tensor, items: Tensor, values: Tensor | None = None, size: tuple[int, int] | None = None) -> Tensor:
    table = torch.zeros(size or (NUM_USERS, NUM_ITEMS), dtype=torch.float64)
    if values is None:
        table[users, items] = 1
        return table
    return table.index_put((users, items), values.double(), accumulate=True)


def dense_objective(model: RGFactorization, table: Tensor, p: Tensor, q: Tensor, base: Tensor | None = None) -> Tensor:
    """The objective, computed from the full table of scores."""
    uniform = torch.full((q.shape[0],), 1 / q.shape[0], dtype=torch.float64)
    base = base if base is not None else uniform if model.prior is None else model.prior
    x = p @ q.T
    mean = (x * base).sum(1)
    variance = ((x - mean[:, None]).square() * base).sum(1)
    count = table.sum(1)
    rg = (count * (mean + variance / 2)).sum() - (table * (x + base.log())).sum()
    positive = model.positive_weight / 2 * (table * (x - 1).square()).sum()
    rows = [torch.where(total > 0, total, 1.0) ** model.ridge_power for total in (table.sum(1), table.sum(0))]
    user_norms = model.user_ridge * (rows[0] * p.square().sum(1)).sum()
    item_norms = model.item_ridge * (rows[1] * q.square().sum(1)).sum()
    return rg + positive + (user_norms + item_norms) / 2


def gradient_left(model: RGFactorization, table: Tensor, side: str) -> float:
    """Largest entry of the gradient in one side, relative to the terms that cancel in it, sum_i v_ri |z_i|."""
    vectors = {"user": model.user_vectors, "item": model.item_vectors}
    moved = vectors[side].clone().requires_grad_()
    scale = (table @ vectors["item"].abs() if side == "user" else table.T @ vectors["user"].abs()).max()
    vectors[side] = moved
    (gradient,) = torch.autograd.grad(dense_objective(model, table, vectors["user"], vectors["item"]), moved)
    return float(gradient.abs().max() / scale.clamp(min=1e-200))


def minimiser(function: Any, shape: tuple[int, int]) -> Tensor:
    """The minimiser of a quadratic function, from its gradient and Hessian at the origin."""
    origin = torch.zeros(shape, dtype=torch.float64)
    size = origin.numel()
    gradient = torch.autograd.functional.jacobian(function, origin).reshape(size)
    hessian = torch.autograd.functional.hessian(function, origin).reshape(size, size)
    return -torch.linalg.solve(hessian, gradient).reshape(shape)
