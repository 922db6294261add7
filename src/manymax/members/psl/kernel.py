"""PSL of a block of scores: for each positive a sum of h = g(s - s_y)^(1 / tau) over the classes of its row.

With r = g'(s - s_y) / g(s - s_y), the slope of log g, and H = sum h, the loss of a positive is log H and its gradient

    h r / (tau H)   at the other classes,   minus the sum of these at the positive itself

The positives are taken out of the table first: terms among positives are few, and are added in float64. What is left is
a pass over the table for each positive, on one rank or on many, in torch or in native code. A row with one positive has
h r written over its scores in that pass; of several, every one needs the scores, and a second pass writes the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manymax.engine import native_library
from manymax.engine.blocks import Block, BlockResult, Dense, Kernel, piece_size
from manymax.engine.cost import DOUBLE, EntryCost, NativeCost, Work, exact_cost, exact_traffic
from manymax.engine.positives import Positives, take_positives_
from manymax.engine.ranks import Ranks
from manymax.engine.statistics import target_statistics
from manymax.errors import ArgumentError
from manymax.members.psl.loss import ACTIVATIONS, log_activation
from manymax.ops.checks import visible
from manymax.ops.row_blocks import row_blocks

COST = exact_cost(
    EntryCost(Work(exponentials=2, passes=6), calls=150, tables=0.1, plain=9, each=True),
    native=NativeCost(Work(streamed=0.5), each=Work(exponentials=2)),
)
# Three exchanges per block, in float64: for each positive its score and weight; the maxima, of the row and of the terms
# of each positive, with their marks; for each positive two sums.
TRAFFIC = exact_traffic(sums=3, row=2 * DOUBLE, each=6 * DOUBLE)


def psl_kernel(activation: str = "relu", tau: float = 0.1) -> Kernel:
    """The kernel of the PSL loss.

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[0.5, 0.0]]), torch.tensor([[1.0, 0.0], [0.5, 5.0], [-1.5, 3.0]])
        >>> manymax.linear_psl_loss(input, vectors, torch.tensor([1]), tau=0.5)
        tensor(0.9410)
    """
    power = _Power(activation, tau)
    # The language of Triton has no arcus tangent.
    return Kernel(lambda block: _run(block, power), triton="" if activation == "atan" else f"psl, {activation}")


@dataclass(frozen=True)
class _Power:
    """Which function g, and tau."""

    activation: str
    tau: float

    @property
    def numbers(self) -> tuple[int]:
        """The number of g in kernel.cpp."""
        return (ACTIVATIONS.index(self.activation),)

    def terms(self, differences: Tensor) -> tuple[Tensor, Tensor]:
        """log h and the slope r of log g at score differences, which may be -inf."""
        log_g = log_activation(differences, self.activation)
        if self.activation == "tanh":
            slope = 2 * torch.sigmoid(-2 * differences)
        else:
            slope = torch.where(log_g > -torch.inf, (-log_g).exp(), 0)
            if self.activation == "atan":
                slope = slope / (1 + differences.square())
        return log_g / self.tau, slope


@dataclass(frozen=True)
class _Sums:
    """Sums over the classes of a table without its positives, (n, P) each in float64.

    reference: the largest log h, -inf where no class has h > 0. total, slopes: sum h and sum h r, relative to it.
    """

    reference: Tensor
    total: Tensor
    slopes: Tensor

    def of_all_ranks(self, ranks: Ranks, reference: Tensor) -> _Sums:
        """The sums over the classes of all ranks, from the largest reference of them."""
        factor = _exp_of_difference(self.reference, reference)
        total, slopes = ranks.sum(factor * torch.stack([self.total, self.slopes])).unbind(0)
        return _Sums(reference, total, slopes)


def _exp_of_difference(value: Tensor, reference: Tensor) -> Tensor:
    """e^(value - reference), and 0 where the value is -inf."""
    return torch.where(value > -torch.inf, value - reference, -torch.inf).exp()


def _run(block: Block, power: _Power) -> BlockResult:
    keywords, target, ranks, dtype = block.keywords, block.target, block.ranks, block.scores.dtype
    positives = take_positives_(block)
    positive = positives.weights != 0
    labels = torch.where(positive, positives.scores, torch.inf).to(dtype)
    top, here = _sums(block, labels, power)
    # A nan on one rank reaches all of them, so that all raise and none waits for the others.
    width = labels.shape[1]
    maximum, reference = ranks.maximum(torch.cat([top, here.reference], 1)).split([1, width], 1)
    positives.check(maximum)
    _check_differences(maximum, labels)
    others = here.of_all_ranks(ranks, reference)
    among = [_Among(positives, power, p, target.hit, not keywords.decoupled) for p in range(width)]
    log_others = others.reference + others.total.log()
    log_sums = torch.logaddexp(log_others, torch.cat([each.log_sum for each in among], 1))
    if visible(log_sums) and (positive & (log_sums == -torch.inf)).any():
        raise ArgumentError(
            "a row has no class left that its positive is compared with: every other one is excluded, or so far below"
            " that g is 0. Take scores of a smaller range, such as cosines / 2, or leave `decoupled` out."
        )
    log_sums = torch.where(positive, log_sums, 0)
    losses = positives.weights * (log_sums + keywords.z_loss * log_sums.square())
    result = BlockResult(losses.sum(1).to(dtype))
    found = target_statistics(keywords.stats, target, -log_sums, ranks.sum)
    result.stats = {name: value.to(dtype) for name, value in found.items()}
    if target.coefficient is None:
        return result
    # d loss / d log H / tau of each positive
    rate = target.factor.double().unsqueeze(1) * positives.weights * (1 + 2 * keywords.z_loss * log_sums) / power.tau
    own = -rate * _exp_of_difference(others.reference, log_sums) * others.slopes
    for p, each in enumerate(among):
        moved = rate[:, p : p + 1] * each.gradient(log_sums[:, p : p + 1])
        own += moved
        own[:, p] -= moved.sum(1)
    shares = (rate * _exp_of_difference(here.reference, log_sums)).to(dtype)
    written = width == 1 and not block.triton
    if not written:
        _write_gradient(block, labels, here.reference, shares, power)
    # The shares of several positives are in the table already.
    result.parts = [Dense(block.scores, shares[:, 0] if written else torch.ones_like(shares[:, 0]))]
    result.parts.append(positives.entries(own.to(dtype)))
    return result


def _check_differences(maximum: Tensor, labels: Tensor) -> None:
    """Raise where the largest score of a row, (n, 1), is further above a positive, (n, P), than their dtype can say."""
    if visible(labels) and (maximum.to(labels.dtype) - labels).isposinf().any():
        raise ArgumentError(
            f"`scores` of a row differ by more than the largest number of {labels.dtype}: scale them down, or normalise"
            " the vectors."
        )


class _Among:
    """The terms of one positive with all positives of its row, in float64: few numbers, the same on every rank."""

    def __init__(self, positives: Positives, power: _Power, p: int, hit: Tensor | None, coupled: bool) -> None:
        labels, counts = positives.scores, positives.weights != 0
        if hit is not None:  # excluded positives are in no sum but their own
            counts = counts & ~hit
        counts = counts.clone()
        counts[:, p] = False
        log_h, slope = power.terms(labels - labels[:, p : p + 1])
        self.log_h, self.slope = torch.where(counts, log_h, -torch.inf), slope
        # Its own term is g(0)^(1 / tau) = 1, and does not move with the scores.
        own = torch.zeros_like(labels[:, :1]) if coupled else torch.full_like(labels[:, :1], -torch.inf)
        self.log_sum = torch.logaddexp(self.log_h.logsumexp(1, keepdim=True), own)

    def gradient(self, log_sum: Tensor) -> Tensor:
        """h r / H at all positives, (n, P), from log H (n, 1)."""
        return _exp_of_difference(self.log_h, log_sum) * self.slope


def _sums(block: Block, labels: Tensor, power: _Power) -> tuple[Tensor, _Sums]:
    """The largest score of each row, (n, 1), and the sums for its positives, by the back end that serves."""
    if block.triton:
        from manymax.members.psl.kernel_triton import sums_triton

        how = power.tau, power.activation == "tanh"
        top, *sums = sums_triton(block.scores, block.num_classes, labels, *how)
        return top, _Sums(*sums)
    return (_sums_in_torch if block.level is None else _sums_in_native)(block, labels, power)


def _sums_in_torch(block: Block, labels: Tensor, power: _Power) -> tuple[Tensor, _Sums]:
    """The largest score of each row, (n, 1), and the sums for its positives; of one alone, h r replaces the scores.

    Args:
        labels: (n, P) the scores of the positives, +inf where there is none.
    """
    scores, (n, width) = block.scores, labels.shape
    top, found = scores.amax(1, keepdim=True), scores.new_zeros(3, n, width, dtype=torch.float64)
    for rows in row_blocks(
        len(scores), scores.shape[1], piece_size(scores)
    ):  # in pieces, which stay in cache between the passes
        for p in range(width):
            log_h, slope = power.terms(scores[rows] - labels[rows, p : p + 1])
            reference = log_h.amax(1, keepdim=True)
            h = log_h.sub_(torch.where(reference > -torch.inf, reference, 0)).exp_()
            moved = slope.mul_(h)
            sums = (reference.squeeze(1), h.sum(1), moved.sum(1))
            found[:, rows, p] = torch.stack(sums).double()
            if width == 1:
                scores[rows] = moved
    return top, _Sums(*found.unbind(0))


def _sums_in_native(block: Block, labels: Tensor, power: _Power) -> tuple[Tensor, _Sums]:
    """The same by kernel.cpp."""
    assert block.level is not None
    scores = block.scores
    top = scores.new_empty(len(scores), 1)
    reference, total, slopes = (torch.empty(labels.shape, dtype=torch.float64) for _ in range(3))
    table = scores, *scores.shape, block.num_classes
    more = labels.contiguous(), labels.shape[1], _exponent(power), top, reference, total, slopes
    native_library.call(block.level, "psl_sums", scores, *table, *more, numbers=power.numbers, threads=True)
    return top, _Sums(reference, total, slopes)


def _write_gradient(block: Block, labels: Tensor, reference: Tensor, shares: Tensor, power: _Power) -> None:
    """sum_p shares_p h r in place of the scores, with h relative to the references, (n, P) each."""
    scores = block.scores
    if block.triton:
        from manymax.members.psl.kernel_triton import write_gradient_triton

        how = power.tau, power.activation == "tanh"
        write_gradient_triton(scores, block.num_classes, labels, reference, shares, *how)
        return
    reference = torch.where(reference > -torch.inf, reference, 0).to(scores.dtype)
    if block.level is not None:
        table = scores, *scores.shape, block.num_classes
        more = labels.contiguous(), reference, shares.contiguous(), labels.shape[1], _exponent(power)
        native_library.call(block.level, "psl_gradients", scores, *table, *more, numbers=power.numbers, threads=True)
        return
    for rows in row_blocks(len(scores), scores.shape[1], piece_size(scores)):
        total = torch.zeros_like(scores[rows])
        for p in range(labels.shape[1]):
            log_h, slope = power.terms(scores[rows] - labels[rows, p : p + 1])
            total.addcmul_(log_h.sub_(reference[rows, p : p + 1]).exp_().mul_(slope), shares[rows, p : p + 1])
        scores[rows] = total


def _exponent(power: _Power) -> Tensor:
    """1 / tau as C reads it."""
    return torch.tensor(1 / power.tau, dtype=torch.float64)
