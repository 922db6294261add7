"""The bias of sampled estimates of log Z and of gradients for small samples, computed exactly: nothing is drawn.

    python benchmarks/bias.py    writes the tables of docs/small_samples.md, in seconds

There are two ways to compute it, and neither covers all cases:

    enumeration   A loss on k draws depends only on how often each class was drawn, so its mean is a sum over all
                  vectors of counts. It works for every estimate, but only for few classes.
    quadrature    `manymax.ops.log_sums` works for any number of classes, but only for plain logarithms of sums.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

import torch
from torch import Tensor

from manymax import sampled_softmax_loss
from manymax.ops import log_sums
from manymax.ops.divergences import chi_square
from manymax.theory.gradient_deviation import exact_gradient, gradient_estimators, predicted_gradient

PAGE = Path(__file__).parents[1] / "docs" / "small_samples.md"
DEBIAS = (None, "delta", "jackknife")
PAIRS = {  # name: (P, q)
    "fair": ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5)),
    "poor": ((0.8, 0.15, 0.05), (0.1, 0.2, 0.7)),
}


def count_vectors(num_negatives: int, num_classes: int) -> Tensor:
    """All vectors of counts of k draws from C classes, (M, C); each sums to k."""
    if num_classes == 1:
        return torch.tensor([[num_negatives]])
    parts = [
        torch.nn.functional.pad(count_vectors(num_negatives - n, num_classes - 1), (1, 0), value=n)
        for n in range(num_negatives + 1)
    ]
    return torch.cat(parts)


def all_samples(q: Tensor, num_negatives: int) -> tuple[Tensor, Tensor]:
    """Class ids (M, k), one row per vector of counts, and the multinomial probabilities of the rows, (M,)."""
    counts = count_vectors(num_negatives, len(q))
    ids = torch.repeat_interleave(torch.arange(len(q)).repeat(len(counts)), counts.flatten()).view(-1, num_negatives)
    log_sequences = math.lgamma(num_negatives + 1) - torch.lgamma(counts.to(q.dtype) + 1).sum(-1)
    return ids, (log_sequences + (counts * q.log()).sum(-1)).exp()


def partition_bias(probs: Tensor, q: Tensor, num_negatives: int, debias: str | None) -> float:
    """E[sampled loss] - softmax loss with `correction="partition"`, for scores log(probs) and y ~ probs."""
    ids, weights = all_samples(q, num_negatives)
    scores, log_q = probs.log(), q.log()
    bias = 0.0
    for target, prob in enumerate(probs):
        loss = sampled_softmax_loss(
            scores[target].expand(len(ids)),
            scores[ids],
            log_q_negative=log_q[ids],
            hits=ids == target,
            correction="partition",
            debias=debias,
            reduction="none",
        )
        bias += float(prob * (weights * (loss + scores[target])).sum())  # the softmax loss is -log p
    return bias


def log_sum_moments(first: Tensor, terms: Tensor, q: Tensor, num_negatives: int) -> tuple[float, float]:
    """Mean and variance of log(first + sum of k terms), each drawn from terms (C,) with probabilities q (C,)."""
    mean, variance = log_sums.log_sum_moments(first, terms, q, num_negatives)
    return float(mean), float(variance)


def partition_terms(probs: Tensor, q: Tensor, target: int, num_negatives: int) -> tuple[Tensor, Tensor]:
    """(first, terms) of the partition estimate of Z = 1: p_y, and p_j / (k q_j) for all but y."""
    others = torch.arange(len(probs)) != target
    return probs[target], others * probs / (num_negatives * q)


def next_orders(probs: Tensor, q: Tensor, target: int) -> dict[str | None, float]:
    """{debias: leading constant c of the bias}: it is c / k without `debias` and c / k^2 with it."""
    terms = partition_terms(probs, q, target, 1)[1]
    centred = terms - (q * terms).sum()
    variance, third = float((q * centred**2).sum()), float((q * centred**3).sum())
    square = 3 * variance**2 / 4
    return {None: -variance / 2, "delta": square - 2 * third / 3, "jackknife": square - third / 3}


def delta_holds(probs: Tensor, q: Tensor, num_negatives: int) -> bool:
    """A rule of thumb for the range of the Delta method: chi2 / k <= 0.2, and k q_j >= 20 for the likeliest class j."""
    spread = float(chi_square(probs, q)) / num_negatives
    return spread <= 0.2 and num_negatives * float(q[probs.argmax()]) >= 20


def bias_table(num_negatives: tuple[int, ...] = (2, 4, 8, 16, 32, 64)) -> str:
    """Bias of the partition estimate against k, with and without `debias`, for y ~ P."""
    rows = []
    pairs = [tuple(torch.tensor(values, dtype=torch.float64) for values in pair) for pair in PAIRS.values()]
    for k in num_negatives:
        values = [partition_bias(probs, q, k, debias) for probs, q in pairs for debias in DEBIAS]
        rows.append([str(k), *(f"{value:.1e}" for value in values)])
    return table(["k", *(f"{name}: {debias or 'plain'}" for name in PAIRS for debias in DEBIAS)], rows)


def delta_pairs(num_classes: int = 200) -> dict[str, tuple[Tensor, Tensor]]:
    """{name: (P, q)}: Zipf distributions with two proposals each, and a pair with a class that is hardly ever drawn."""
    pairs = {}
    for power in (1.0, 2.0):
        probs = torch.arange(1, num_classes + 1, dtype=torch.float64) ** -power
        probs = probs / probs.sum()
        pairs[f"Zipf {power:g}, uniform"] = probs, torch.full_like(probs, 1 / num_classes)
        pairs[f"Zipf {power:g}, square root"] = probs, probs.sqrt() / probs.sqrt().sum()
    starved = torch.tensor([[0.5, 0.1, 0.4], [0.4, 0.001, 0.599]], dtype=torch.float64)
    return pairs | {"starved class": (starved[0], starved[1])}


def delta_row(probs: Tensor, q: Tensor, num_negatives: int) -> tuple[float, float, float, float]:
    """Of the partition estimate, with the last class as label: bias, Delta's bias, variance, Delta's variance."""
    target = len(probs) - 1
    bias, variance = log_sum_moments(*partition_terms(probs, q, target, num_negatives), q, num_negatives)
    predicted = next_orders(probs, q, target)[None] / num_negatives
    return bias, predicted, variance, -2 * predicted


def delta_table(num_negatives: tuple[int, ...] = (5, 50, 500, 5000)) -> str:
    """Exact bias and variance of the partition estimate beside those that the Delta method predicts."""
    rows = []
    for name, (probs, q) in delta_pairs().items():
        for k in num_negatives:
            values = [f"{value:.2g}" for value in delta_row(probs, q, k)]
            in_range = "yes" if delta_holds(probs, q, k) else "no"
            rows.append([name, f"{float(chi_square(probs, q)):.3g}", str(k), *values, in_range])
    return table(["P, q", "chi2", "k", "bias", "Delta", "variance", "Delta", "in range"], rows)


def labels_of(probs: Tensor, most: int = 8) -> tuple[Tensor, Tensor]:
    """Labels and weights that stand for y ~ P: all classes if they are few, else quantiles of P of equal weight."""
    if len(probs) <= most:
        return torch.arange(len(probs)), probs
    heights = (torch.arange(most, dtype=probs.dtype) + 0.5) / most
    return torch.searchsorted(probs.cumsum(0), heights), torch.ones_like(heights)


def gradient_table(num_negatives: tuple[int, ...] = (5, 10, 50)) -> str:
    """Bias and noise of every estimate of the gradient in percent of its length, exact and by the Delta method."""
    pairs = {name: tuple(torch.tensor(each, dtype=torch.float64) for each in pair) for name, pair in PAIRS.items()}
    pairs |= {name: pair for name, pair in delta_pairs().items() if name.startswith("Zipf 1")}
    rows = []
    for pair, (probs, q) in pairs.items():
        labels, weights = labels_of(probs)
        scores = probs.log().expand(len(labels), -1)
        for name, estimator in gradient_estimators().items():
            cells = []
            for k in num_negatives:
                case = (estimator, scores, labels)
                both = [f(*case, log_q=q.log(), num_negatives=k) for f in (exact_gradient, predicted_gradient)]
                for exact, predicted in zip(*((each.bias(weights), each.noise(weights)) for each in both), strict=True):
                    cells.append(f"{percent(exact)} ({percent(predicted)})")
            rows.append([pair, name, *cells])
    return table(["P, q", "estimate", *(f"{what}, k = {k}" for k in num_negatives for what in ("bias", "noise"))], rows)


def percent(share: float) -> str:
    """At least two digits, such as 120, 12, 1.2 or 0.12; a rounding error is 0."""
    return "0" if share < 1e-6 else f"{100 * share:.0f}" if share > 0.995 else f"{100 * share:.2g}"


def table(headers: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [headers, ["---"] * len(headers), *rows])


def with_tables(page: str) -> str:
    """The text of a page with all tables computed anew between their markers."""
    for name, text in (("bias", bias_table()), ("delta", delta_table()), ("gradients", gradient_table())):
        pattern = rf"(<!-- {name}: begin[^\n]*-->\n).*?(\n<!-- {name}: end -->)"
        page, found = re.subn(pattern, lambda match, text=text: match[1] + text + match[2], page, flags=re.DOTALL)
        if found != 1:
            raise ValueError(f"{PAGE.name} must have the markers of the table {name!r} once; found them {found} times.")
    return page


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the tables of {PAGE.name}")
