"""The ways to draw negatives that are compared: uniform, by popularity, half of each, from the batch, the hardest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_ROWS = 32  # of scores beside the sample: the popularity of fewer is largely that of single rows
POPULARITY_SCORES = 1 << 22  # that popularity is taken from, at most
HARD_NEGATIVES, POOL_SIZE = 100, 5  # the hardest 100 of 5 times as many candidates, unless a number is given


@dataclass(frozen=True)
class Proposal:
    """A way to draw negatives.

    log_q: (C,), the log-probabilities of a draw; None for negatives that are chosen by their scores.
    from_batch: whether the negatives are the other positives of the batch, the same for all rows.
    """

    log_q: Tensor | None
    from_batch: bool = False


def proposals(num_classes: int, log_popularity: Tensor | None, given: Tensor | None) -> Iterator[tuple[str, Proposal]]:
    """(name, proposal) of all that are compared, by the names of the samplers.

    Args:
        num_classes: C, of the sample.
        log_popularity: (C,), the log-probabilities of classes as positives; None where they are not known.
        given: (C,), the log-probabilities of the caller's own proposal; None if there is none.
    """
    uniform = torch.full((num_classes,), -math.log(num_classes))
    yield "uniform", Proposal(uniform)
    if given is not None:
        yield "given", Proposal(given)
    if log_popularity is not None:
        yield "popularity", Proposal(log_popularity)
        yield "mixed", Proposal(torch.logaddexp(uniform.to(log_popularity), log_popularity) - math.log(2))
        yield "in_batch", Proposal(log_popularity, from_batch=True)
    yield "dns", Proposal(None)


def popularity(scores: Tensor) -> Tensor | None:
    """log of the mean over rows of softmax(s), (C,): how popular classes are; None for fewer than `LEAST_ROWS` rows.

    Args:
        scores: (R, C), of rows that are not those of the sample, whose own classes would seem to be popular.
    """
    if len(scores) < LEAST_ROWS:
        return None
    rows = scores.double().log_softmax(1)
    return rows.logsumexp(0) - math.log(len(rows))
