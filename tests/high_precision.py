"""Slow references in 50 digits: each function is the definition, written down as plainly as possible.

They take lists of floats (-inf masks a class) and return mpmath numbers or lists of them. A test of float32 rounds its
scores to float32 before it passes them here, so that only the arithmetic is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mpmath
import torch
from torch import Tensor

mp = mpmath.mp.clone()
mp.dps = 50
Number = Any  # mpmath has no types


def entmax(scores: Sequence[float], alpha: Number) -> list[Number]:
    """p_i = [1 + (alpha - 1)(s_i - level)]_+^(1/(alpha - 1)), with the level that makes them sum to 1."""
    alpha = mp.mpf(alpha)
    live = [mp.mpf(s) for s in scores if s != -math.inf]
    top = max(live)
    if alpha == 1:
        total = mp.fsum(mp.exp(s - top) for s in live)
        return [mp.exp(mp.mpf(s) - top) / total if s != -math.inf else mp.mpf(0) for s in scores]
    beta = alpha - 1

    def prob(score: Number, level: Number) -> Number:
        base = 1 + beta * (score - level)
        return mp.exp(mp.log(base) / beta) if base > 0 else mp.mpf(0)

    near = [s for s in live if 1 + beta * (s - top) > 0]  # the others are 0 at every level from `top` on

    def excess(level: Number) -> Number:
        return mp.fsum(prob(score, level) for score in near) - 1

    low, high = top, top + (1 - mp.mpf(len(near)) ** -beta) / beta  # the top class has probability 1, then 1/C
    level = low if excess(low) == 0 else high if excess(high) == 0 else mp.findroot(excess, (low, high), "anderson")
    assert abs(excess(level)) < mp.mpf(10) ** -40
    return [prob(mp.mpf(s), level) if s != -math.inf else mp.mpf(0) for s in scores]


def omega(probs: Sequence[Number], alpha: Number) -> Number:
    """sum (p^alpha - p) / (alpha (alpha - 1)), and its limit sum p log p at alpha = 1."""
    alpha = mp.mpf(alpha)
    live = [mp.mpf(p) for p in probs if p > 0]
    if alpha == 1:
        return mp.fsum(p * mp.log(p) for p in live)
    return mp.fsum(p**alpha - p for p in live) / (alpha * (alpha - 1))


def omega_slope(prob: Number, alpha: Number) -> Number:
    """The derivative of Omega in one probability."""
    prob, alpha = mp.mpf(prob), mp.mpf(alpha)
    if alpha == 1:
        return mp.log(prob) + 1 if prob > 0 else -mp.inf
    return (alpha * prob ** (alpha - 1) - 1) / (alpha * (alpha - 1))


def conjugate(scores: Sequence[float], alpha: Number) -> Number:
    """<p, s> - Omega(p) at p = entmax(s)."""
    probs = entmax(scores, alpha)
    inner = mp.fsum(p * mp.mpf(s) for p, s in zip(probs, scores, strict=True) if p > 0)
    return inner - omega(probs, alpha)


def entmax_loss(scores: Sequence[float], target: int, alpha: Number) -> Number:
    """Omega*(s) - s_y, because Omega is 0 at a vertex."""
    return conjugate(scores, alpha) - mp.mpf(scores[target])


def bregman(probs: Sequence[Number], other: Sequence[Number], alpha: Number) -> Number:
    """Omega(p) - Omega(q) - <grad Omega(q), p - q>."""
    pairs = [(mp.mpf(p), mp.mpf(q)) for p, q in zip(probs, other, strict=True)]
    linear = mp.fsum(omega_slope(q, alpha) * (p - q) for p, q in pairs if p != q)
    return omega(probs, alpha) - omega(other, alpha) - linear


def alpha_slope(function: Callable[[Number], Sequence[Number]], alpha: float) -> list[Number]:
    """d function(alpha) / d alpha by differences, to about 20 digits; one-sided at alpha = 1 and 2."""
    step = mp.mpf(10) ** -9 * (-1 if alpha == 2 else 1)
    if alpha in (1, 2):  # one-sided, with an error of step^4
        weights = [(0, mp.mpf(-25) / 12), (1, 4), (2, -3), (3, mp.mpf(4) / 3), (4, mp.mpf(-1) / 4)]
    else:
        weights = [(1, mp.mpf(2) / 3), (-1, mp.mpf(-2) / 3), (2, mp.mpf(-1) / 12), (-2, mp.mpf(1) / 12)]
        step = min(step, (mp.mpf(alpha) - 1) / 1000)
    values = [(weight, function(mp.mpf(alpha) + k * step)) for k, weight in weights]
    return [mp.fsum(weight * value[i] for weight, value in values) / step for i in range(len(values[0][1]))]


def rankmax(scores: Sequence[float], target: int) -> list[Number]:
    """u / sum u with u_j = max(0, s_j - s_y + 1)."""
    excess = [_excess(score, scores[target]) for score in scores]
    return [u / mp.fsum(excess) for u in excess]


def rankmax_loss(scores: Sequence[float], target: int) -> Number:
    """log sum_j max(0, s_j - s_y + 1)."""
    return mp.log(mp.fsum(_excess(score, scores[target]) for score in scores))


def rankmax_gradient(scores: Sequence[float], target: int) -> list[Number]:
    """(1_P - m e_y) / S with the strict support P = {j: s_j > s_y - 1} of m classes."""
    excess = [_excess(score, scores[target]) for score in scores]
    size, total = sum(u > 0 for u in excess), mp.fsum(excess)
    return [((u > 0) - (size if j == target else 0)) / total for j, u in enumerate(excess)]


def _excess(score: float, label: float) -> Number:
    return max(mp.mpf(0), mp.mpf(score) - mp.mpf(label) + 1) if score != -math.inf else mp.mpf(0)


def psl_loss(scores: Sequence[float], target: int, activation: str, tau: Number) -> Number:
    """log sum_j g(s_j - s_y)^(1 / tau)."""
    return mp.log(mp.fsum(_psl_terms(scores, target, activation, tau)))


def psl_gradient(scores: Sequence[float], target: int, activation: str, tau: Number) -> list[Number]:
    """h_j g'(d_j) / (tau g(d_j) H) at other classes, minus the sum of these at the label."""
    slopes = {"relu": lambda d: 1, "tanh": lambda d: 1 - mp.tanh(d) ** 2, "atan": lambda d: 1 / (1 + d * d)}
    terms = _psl_terms(scores, target, activation, tau)
    grads = []
    for score, h in zip(scores, terms, strict=True):
        moved = h > 0 and score != -math.inf
        d = mp.mpf(score) - mp.mpf(scores[target]) if moved else mp.mpf(0)
        rate = h * slopes[activation](d) / _psl_g(d, activation) if moved else mp.mpf(0)
        grads.append(rate / (mp.mpf(tau) * mp.fsum(terms)))
    grads[target] = mp.mpf(0)
    grads[target] = -mp.fsum(grads)
    return grads


def _psl_terms(scores: Sequence[float], target: int, activation: str, tau: Number) -> list[Number]:
    differences = [mp.mpf(s) - mp.mpf(scores[target]) if s != -math.inf else None for s in scores]
    return [mp.mpf(0) if d is None else _psl_g(d, activation) ** (1 / mp.mpf(tau)) for d in differences]


def _psl_g(d: Number, activation: str) -> Number:
    g = {"relu": lambda d: 1 + d, "tanh": lambda d: 1 + mp.tanh(d), "atan": lambda d: 1 + mp.atan(d)}[activation](d)
    return max(mp.mpf(0), g)


def taylor(score: float, order: int) -> Number:
    """1 + s + s^2/2! + ... + s^order/order!; 0 for a masked class."""
    return mp.fsum(mp.mpf(score) ** k / mp.factorial(k) for k in range(order + 1)) if score != -math.inf else mp.mpf(0)


def taylor_softmax(scores: Sequence[float], order: int) -> list[Number]:
    """f(s_i) / sum_j f(s_j)."""
    values = [taylor(score, order) for score in scores]
    return [value / mp.fsum(values) for value in values]


def taylor_loss(scores: Sequence[float], target: int, order: int) -> Number:
    """log F - log f(s_y)."""
    return mp.log(mp.fsum(taylor(score, order) for score in scores)) - mp.log(taylor(scores[target], order))


def taylor_gradient(scores: Sequence[float], target: int, order: int) -> list[Number]:
    """f'(s_j)/F - 1{j = y} f'(s_y)/f(s_y), where f' is the polynomial of one order less."""
    total = mp.fsum(taylor(score, order) for score in scores)
    label = taylor(scores[target], order - 1) / taylor(scores[target], order)
    return [taylor(score, order - 1) / total - (label if j == target else 0) for j, score in enumerate(scores)]


def one_hot(target: int, num_classes: int) -> list[int]:
    """The one-hot vector of the target."""
    return [int(j == target) for j in range(num_classes)]


def as_tensor(values: Number) -> Tensor:
    """A number of mpmath, or nested lists of them, as a float64 tensor."""
    return torch.tensor(_floats(values), dtype=torch.float64)


def _floats(values: Number) -> Any:
    return [_floats(value) for value in values] if isinstance(values, list) else float(values)
