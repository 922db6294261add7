"""Optimisers for row-sparse gradients, whose steps cost what the touched rows cost and not what the table has."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from manymax.engine.native_library import SUFFIXES, call, resolve
from manymax.engine.row_sparse import distinct_rows
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.arguments import checked
from manymax.ops.checks import visible

__all__ = ["SparseAdam"]


class SparseAdam(torch.optim.SparseAdam):
    """`torch.optim.SparseAdam` with the same arguments, formulas and state, in one pass over the touched rows.

        m += (1 - beta1) (g - m),   v += (1 - beta2) (g^2 - v),   p -= lr_t m / (sqrt(v) + eps),
        lr_t = lr sqrt(1 - beta2^t) / (1 - beta1^t)

    for the rows that have a gradient; the others, and their moments, stay as they are. A state dict of either class
    loads into the other.

    On a CPU the native library updates a row of float32 or float64 while it is in the cache. Elsewhere, and where there
    is no native library, the same is done in plain torch, on copies of the touched rows.

    Args:
        params, lr, betas, eps, maximize: as in `torch.optim.SparseAdam`.

    Example:
        >>> import torch, manymax
        >>> vectors = torch.nn.Parameter(torch.ones(1000, 2))
        >>> optimizer = manymax.optim.SparseAdam([vectors], lr=0.5)
        >>> sampler, target = manymax.samplers.UniformSampler(1000), torch.tensor([7])
        >>> loss = manymax.linear_sampled_softmax_loss(torch.ones(1, 2), vectors, target, sampler, 5, sparse_grad=True)
        >>> loss.backward()
        >>> optimizer.step()
        >>> vectors.detach()[7]
        tensor([1.5000, 1.5000])

    References:
        Kingma and Ba (2015).
    """

    @checked
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
    ) -> None:
        if not isinstance(lr, Tensor) and not 0 < lr < math.inf:
            raise ArgumentError(f"`lr` must be positive and finite; got {lr}.")
        if not 0 < eps < math.inf:
            raise ArgumentError(f"`eps` must be positive and finite; got {eps}.")
        if len(betas) != 2 or not all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in betas):
            raise ArgumentError(f"`betas` must be two numbers in [0, 1); got {betas!r}.")
        try:
            super().__init__(params, lr, betas, eps, maximize)
        except (
            TypeError,
            ValueError,
            AttributeError,
        ) as error:  # of torch, which name no argument
            raise ArgumentTypeError(f"`params` or `lr` is nothing that torch can optimise with: {error}") from error

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the touched rows.

        Args:
            closure: computes the loss and its gradients anew; optional.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if not param.grad.is_sparse:
                    raise RuntimeError("SparseAdam does not support dense gradients, please consider Adam instead")
                self._update(param, param.grad, group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            # As torch makes it, so that a state dict fits both.
            moments = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            state.update({"step": 0, **moments})
        state["step"] += 1
        ids, values = distinct_rows(grad)
        if not values.numel():
            return
        beta1, beta2 = group["betas"]
        correction = math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
        numbers = 1 - beta1, 1 - beta2, group["eps"], float(group["lr"]) * correction
        values = -values if group.get("maximize", False) else values
        tables = param, state["exp_avg"], state["exp_avg_sq"]
        level = _level(ids, values, *tables)
        if level is None:
            _update_in_torch(*tables, ids, values, numbers)
        else:
            _update_natively(level, *tables, ids, values, numbers)


def _level(ids: Tensor, values: Tensor, *tables: Tensor) -> str | None:
    """The level of the native library that updates these tables; None for plain torch."""
    fits = all(table.dtype in SUFFIXES and table.is_contiguous() for table in tables)
    same = all(table.dtype == values.dtype for table in tables)
    # C code gets pointers: tensors on a CPU, with values, one sparse dimension.
    return resolve("auto") if fits and same and len(ids) == 1 and visible(ids, values, *tables) else None


def _update_natively(
    level: str,
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    ids: Tensor,
    values: Tensor,
    numbers: tuple[float, ...],
) -> None:
    """One step of Adam for the rows `ids` (1, U) with the gradients `values` (U, ...), in place."""
    # Sorted, so that the first and the last show whether all are rows of the table.
    if ids[0, 0] < 0 or ids[0, -1] >= len(param):
        raise IndexError(f"the gradient has rows outside of a table of {len(param)} rows.")
    ids, values = ids[0].contiguous(), values.contiguous()
    constants = torch.tensor(numbers, dtype=torch.float64)
    tables = param, exp_avg, exp_avg_sq
    call(level, "row_adam", param, *tables, param[0].numel(), ids, values, len(ids), constants, threads=True)
    # Autograd refuses a backward through a graph whose saved tensors were changed since: it has to hear of this change.
    torch.autograd.graph.increment_version(tables)


def _update_in_torch(
    param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, ids: Tensor, values: Tensor, numbers: tuple[float, ...]
) -> None:
    """The same on copies of the rows, for any device, dtype and number of sparse dimensions."""
    rate1, rate2, eps, step_size = numbers
    place = tuple(ids)
    first, second = exp_avg[place], exp_avg_sq[place]
    first += (values - first).mul_(rate1)
    second += values.square().sub_(second).mul_(rate2)
    exp_avg[place], exp_avg_sq[place] = first, second
    param[place] -= first.div_(second.sqrt_().add_(eps)).mul_(step_size)
