"""Slow references of the losses of two towers: the whole table of scores in float64, and a loop over all pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from manymax import FAMILY
from manymax.ops.topk import kth_largest

DIM = 5
KEYS = ("queries", "documents", "hard", "log_q", "temperature", "bias")


def make_towers(count: int, hard: int, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Tensors of a batch: some documents occur twice, some pairs are of one group, and some of neither."""
    random = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    return {
        "queries": numbers(count, DIM),
        "documents": numbers(count, DIM),
        "hard": numbers(hard, DIM),
        "ids": torch.cat([torch.arange(count) % (count - 2), torch.arange(hard) + 1]),
        "groups": torch.where(torch.arange(count) < 2, -100, torch.arange(count) // 2),
        "log_q": numbers(count + hard) / 3 - 4,
        "temperature": torch.tensor(0.7, dtype=dtype),
        "bias": torch.tensor(-1.5, dtype=dtype),
    }


def left_out(ids: Tensor | None, groups: Tensor | None, rows: int, columns: int) -> Tensor:
    """(rows, columns) whether candidate j is no negative of query i, pair by pair; keys of -100 are like no other."""
    found = torch.zeros(rows, columns, dtype=torch.bool)
    for keys in (ids, groups):
        for i in range(rows if keys is not None else 0):
            for j in range(min(columns, len(keys))):
                found[i, j] |= i != j and int(keys[i]) == int(keys[j]) != -100
    return found


def slow_scores(batch: dict[str, Any], normalize: bool) -> tuple[Tensor, Tensor]:
    """Scores of queries and all candidates (N, C), and of documents and queries (N, N), with masks as -inf."""
    (scores, masked), (back, masked_back) = slow_tables(batch, normalize)
    return scores.masked_fill(masked, -torch.inf), back.masked_fill(masked_back, -torch.inf)


def slow_tables(batch: dict[str, Any], normalize: bool) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The same scores without masks, each with its mask."""
    queries, documents = batch["queries"].double(), batch["documents"].double()
    vectors = documents if batch.get("hard") is None else torch.cat([documents, batch["hard"].double()])
    if normalize:
        queries, documents, vectors = (x / x.norm(dim=1, keepdim=True) for x in (queries, documents, vectors))
    temperature, count = batch.get("temperature", 1.0), len(queries)
    scores, back = queries @ vectors.T / temperature, documents @ queries.T / temperature
    if batch.get("log_q") is not None:
        scores = scores - batch["log_q"]
    masked = left_out(batch.get("ids"), batch.get("groups"), *scores.shape)
    return (scores, masked), (back, masked[:, :count].T)


def slow_in_batch(
    batch: dict[str, Any], member: str, normalize: bool = False, symmetric: bool = False, **settings: Any
) -> Tensor:
    """The losses of the queries (N,)."""

    def losses(scores: Tensor, masked: Tensor) -> Tensor:
        given = dict(settings)
        if FAMILY[member].bounded:  # its list has all candidates, those that are no negatives too
            given["bound"] = kth_largest(scores, settings.get("k", FAMILY[member].setting("k").default)).squeeze(1)
        target = torch.arange(len(scores))
        return FAMILY[member].loss(scores.masked_fill(masked, -torch.inf), target, reduction="none", **given)

    forth, back = slow_tables(batch, normalize)
    return (losses(*forth) + losses(*back)) / 2 if symmetric else losses(*forth)


def slow_siglip(batch: dict[str, Any], normalize: bool = False) -> Tensor:
    """The losses of the queries (N,): -sum_j log sigma(z_ij (q_i . v_j / t + b))."""
    scores = slow_scores({**batch, "log_q": None}, normalize)[0] + batch["bias"]
    z = 2 * torch.eye(*scores.shape, dtype=torch.float64) - 1
    return -logsigmoid(z * scores).sum(1)


def leaves(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with its float tensors as new leaves that require a gradient."""
    return {
        name: value.detach().clone().requires_grad_() if name in KEYS and value is not None else value
        for name, value in batch.items()
    }


def agree(ours: Tensor, slow: Tensor, mine: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    """Values and the gradients of all leaves are equal; `backward` is run here."""
    torch.testing.assert_close(ours.double(), slow.double(), rtol=tolerance, atol=tolerance)
    ours.backward()
    slow.backward()
    for name in KEYS:
        if mine.get(name) is not None:
            expected = theirs[name].grad
            assert expected is not None, name
            assert mine[name].grad is not None, name
            torch.testing.assert_close(
                mine[name].grad.double(),
                expected.double(),
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m, n=name: f"{n}: {m}",
            )
