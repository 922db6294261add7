"""Optimisers that update some rows of a table of class vectors at a time, from the gradient of these rows alone.

They are for heads whose gradient of the whole table never exists. Formulas and state are those of `torch.optim`:

    sgd             p -= lr g
    adagrad         a += g^2,                                     p -= lr g / (sqrt(a) + eps)
    adam            m += (1 - b1)(g - m), v += (1 - b2)(g^2 - v), p -= lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)
    adam, touched   as torch.optim.SparseAdam, whose eps is added before the correction: sqrt(v) + eps

A table in bfloat16 has 8 significant bits, and loses every update below 1/256 of a weight if sums are rounded to the
nearest number. Two ways keep them: "stochastic" rounds up or down at random, so that sums are right on average;
"kahan" keeps what rounding took away in a second bfloat16 table and adds it to the next update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manymax.errors import ArgumentError, ArgumentTypeError, check_choice

NEAREST, STOCHASTIC, KAHAN = "nearest", "stochastic", "kahan"
ROUNDINGS = (NEAREST, STOCHASTIC, KAHAN)
# Seeds of the steps of one table lie this far apart, so that the parts of one step can have seeds of their own.
PARTS_OF_A_STEP = 1 << 24


@dataclass(frozen=True)
class UpdateRates:
    """The numbers of an optimiser, as in torch.optim.

    lr: the learning rate.
    weight_decay: this times the weights is added to their gradient.
    betas: of "adam".
    eps: of "adagrad" and "adam".
    """

    lr: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "eps"):
            check_rate(name, getattr(self, name))
        pair = isinstance(self.betas, tuple | list) and len(self.betas) == 2
        if not pair or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in self.betas):
            raise ArgumentError(f"`betas` must be two numbers of at least 0 and below 1; got {self.betas!r}.")


def check_rate(name: str, value: object) -> None:
    """Raise unless a rate is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ArgumentError(f"`{name}` must be a finite number of at least 0; got {value!r}.")


# Each takes the gradient (n, ...) of some rows, their state in the order of `STATES`, the rates and the number of the
# step, from 1 on. It changes the state in place and returns what is subtracted from the rows.
Change = Callable[[Tensor, list[Tensor], UpdateRates, int], Tensor]


def _sgd(grad: Tensor, state: list[Tensor], rates: UpdateRates, step: int) -> Tensor:
    return rates.lr * grad


def _adagrad(grad: Tensor, state: list[Tensor], rates: UpdateRates, step: int) -> Tensor:
    (total,) = state
    total.addcmul_(grad, grad)
    return grad.div(total.sqrt().add_(rates.eps)).mul_(rates.lr)


def _moments(grad: Tensor, state: list[Tensor], rates: UpdateRates) -> tuple[Tensor, Tensor]:
    """The moments of Adam, moved towards a gradient and its square."""
    first, second = state
    beta1, beta2 = rates.betas
    return first.lerp_(grad, 1 - beta1), second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)


def _adam(grad: Tensor, state: list[Tensor], rates: UpdateRates, step: int) -> Tensor:
    first, second = _moments(grad, state, rates)
    left1, left2 = (1 - beta**step for beta in rates.betas)
    return first.div(second.sqrt().div_(math.sqrt(left2)).add_(rates.eps)).mul_(rates.lr / left1)


def _touched_adam(grad: Tensor, state: list[Tensor], rates: UpdateRates, step: int) -> Tensor:
    first, second = _moments(grad, state, rates)
    left1, left2 = (1 - beta**step for beta in rates.betas)
    return first.div(second.sqrt().add_(rates.eps)).mul_(rates.lr * math.sqrt(left2) / left1)


STATES = {"sgd": (), "adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq")}  # torch's names
OPTIMIZERS = tuple(STATES)
EPS = {"sgd": 0.0, "adagrad": 1e-10, "adam": 1e-8}  # torch's defaults


class TableUpdates(nn.Module):
    """The state of one table (C, ...) under an optimiser, and the update of some of its rows.

    All that a resumed run needs is in the state dict: the number of steps, the state of each row, what rounding took
    away, and the seed from which the random numbers of each step follow.

    Args:
        table: (C, ...), which `update` changes in place.
        optimizer: a name of `OPTIMIZERS`.
        all_rows: whether each step updates all rows, as torch.optim.Adam does, or those that a step touches, as
            torch.optim.SparseAdam.
        rounding: a name of `ROUNDINGS`; for a bfloat16 table.
        seed: of the random numbers of "stochastic".
    """

    step: Tensor
    seed: Tensor
    lost: Tensor | None
    change: Change

    def __init__(self, table: Tensor, optimizer: str, all_rows: bool, rounding: str, seed: int) -> None:
        super().__init__()
        check_choice("optimizer", optimizer, OPTIMIZERS)
        check_choice("rounding", rounding, ROUNDINGS)
        if table.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            raise ArgumentTypeError(f"class vectors must be float32, float64 or bfloat16; got {table.dtype}.")
        if rounding != NEAREST and table.dtype != torch.bfloat16:
            raise ArgumentError(f"`rounding` {rounding!r} is for class vectors in bfloat16; these are {table.dtype}.")
        changes: dict[str, Change] = {"sgd": _sgd, "adagrad": _adagrad, "adam": _adam if all_rows else _touched_adam}
        self.change, self.rounding = changes[optimizer], rounding
        # The state of a bfloat16 table is float32: a second moment in 8 bits would never move with a beta of .999.
        self.wide = torch.promote_types(table.dtype, torch.float32)
        self.states = STATES[optimizer]
        for name in self.states:
            self.register_buffer(name, torch.zeros_like(table, dtype=self.wide))
        self.register_buffer("lost", torch.zeros_like(table) if rounding == KAHAN else None)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.register_buffer("seed", torch.tensor(seed))

    @torch.no_grad()
    def update(self, table: Tensor, rows: slice | Tensor, grad: Tensor, rates: UpdateRates, part: int) -> None:
        """Update some rows of the table; `self.step` counts the step that this is a part of.

        Args:
            table: (C, ...).
            rows: a slice of its rows, or the ids of distinct ones (n,).
            grad: (n, ...) in the dtype of the arithmetic; used up.
            rates: of this step.
            part: the number of this part of the step, which random numbers depend on.
        """
        # Views for a slice, so that what follows changes the tables themselves; copies for ids, written back below.
        state = [getattr(self, name)[rows] for name in self.states]
        before = table[rows]
        if rates.weight_decay:
            grad = grad.add_(before, alpha=rates.weight_decay)
        change = self.change(grad.to(self.wide), state, rates, int(self.step))
        after, lost = self._subtract(before, change, rows, part)
        table[rows] = after
        if self.lost is not None and lost is not None:
            self.lost[rows] = lost
        if not isinstance(rows, slice):
            for name, value in zip(self.states, state, strict=True):
                getattr(self, name)[rows] = value

    def _subtract(self, rows: Tensor, change: Tensor, place: slice | Tensor, part: int) -> tuple[Tensor, Tensor | None]:
        """rows - change in the dtype of the table, and what rounding took away, where that is kept."""
        exact = rows.to(self.wide) - change
        if self.lost is not None:
            exact += self.lost[place]
            rounded = exact.to(rows.dtype)
            return rounded, (exact - rounded).to(rows.dtype)
        if self.rounding == STOCHASTIC:
            seed = (int(self.seed) * 1_000_003 + int(self.step)) * PARTS_OF_A_STEP + part
            return stochastically_rounded(exact, seed % (1 << 63)), None
        return exact.to(rows.dtype), None


def stochastically_rounded(values: Tensor, seed: int) -> Tensor:
    """float32 values in bfloat16, each rounded up or down at random so that it is right on average.

    Example:
        >>> found = stochastically_rounded(torch.full((10_000,), 1 + 2**-9), seed=0)  # a quarter of the way to the next
        >>> sorted(set(found.tolist())), 0.23 < (found > 1).float().mean().item() < 0.27
        ([1.0, 1.0078125], True)
    """
    # bfloat16 is the upper half of the bits of a float32. Adding a random number below 2^16 carries into the upper half
    # with the probability of what the lower half is worth, for negative numbers too: their bits count the magnitude.
    random = torch.Generator(values.device).manual_seed(seed)
    noise = torch.randint(1 << 16, values.shape, generator=random, device=values.device, dtype=torch.int32)
    bits = (values.contiguous().view(torch.int32) + noise).bitwise_and_(-(1 << 16)).view(torch.float32)
    # Infinities and nan have no neighbours to be rounded to, and their bits must not overflow.
    return torch.where(values.isfinite(), bits, values).bfloat16()
