"""The formulas of the shared keywords of heads, written out for one positive after the other, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

ROWS, CLASSES, DIM = 7, 83, 5


def reference(call: Any) -> Tensor:
    """The mean loss, by the formulas of the keywords, one positive after the other."""
    (input, vectors, bias), given, problem = call.tensors, call.given, call.problem
    if given.get("normalize"):
        input = input / input.norm(dim=1, keepdim=True)
        norms = vectors.norm(dim=1, keepdim=True)
        vectors = torch.where(norms > 0, vectors / torch.where(norms > 0, norms, 1), 0 * vectors.detach())
    scores = input @ vectors.T / given.get("temperature", 1.0) + bias
    if "softcap" in given:
        cap = given["softcap"]
        scores = torch.where(scores > -torch.inf, cap * torch.tanh(scores / cap), scores)
    losses, weights = [], []
    row_weight = given.get("row_weight", torch.ones(ROWS, dtype=torch.float64))
    for n, row in enumerate(problem.target.reshape(ROWS, -1)):
        if call.member.joint and (row >= 0).any():
            left_out = given["exclude"][n] if "exclude" in given else row[:0]
            losses.append(row_weight[n] * together(call, scores[n], row, left_out))
            weights.append(row_weight[n] * problem.weight[row[row >= 0].unique()].sum())
            continue
        for y in row[row >= 0].unique().tolist():
            left_out = set(given["exclude"][n].tolist()) - {y} if "exclude" in given else set()
            kept = [c for c in range(CLASSES) if c not in left_out]
            if call.member.log_partition:
                summed = [c for c in kept if c != y] if given.get("decoupled") else kept
                loss = compared(call, scores[n, summed], scores[n, y], bound(call, n, scores[n]))
            else:
                loss = call.member.loss(scores[n, kept], torch.tensor(kept.index(y)), reduction="none", **call.settings)
            losses.append(row_weight[n] * problem.weight[y] * loss)
            weights.append(row_weight[n] * problem.weight[y])
    return torch.stack(losses).sum() / given.get("num_items", torch.stack(weights).sum())


def bound(call: Any, row: int, scores: Tensor) -> Tensor:
    """What is given for a row, or the K-th largest of its scores (C,), those that its sums leave out among them."""
    if "bound" in call.given:
        return call.given["bound"][row]
    live = scores.detach()[scores > -torch.inf].sort(descending=True).values
    return live[min(call.settings.get("k", 1), len(live)) - 1]


def together(call: Any, scores: Tensor, row: Tensor, exclude: Tensor) -> Tensor:
    """The loss of a row with all of its positives, over the classes that are not excluded."""
    if call.member.log_partition:
        return blended(call, scores, row[row >= 0].unique().tolist(), set(exclude.tolist()))
    kept = [c for c in range(CLASSES) if c not in exclude]
    ids = torch.tensor([kept.index(y) for y in row[row >= 0].unique().tolist()])
    weight = call.problem.weight[kept]
    return call.member.loss(scores[kept], ids, weight=weight, reduction="none", **call.settings)


def blended(call: Any, scores: Tensor, ids: list[int], exclude: set[int]) -> Tensor:
    """BSL of a row, from the softmax loss of each positive, which may have a sum of its own."""
    losses = []
    for y in ids:
        summed = [c for c in range(CLASSES) if c == y or c not in exclude]
        if call.given.get("decoupled"):
            summed.remove(y)
        losses.append(compared(call, scores[summed], scores[y], scores[y]))
    tau = call.settings["tau"]
    return -call.problem.weight[ids].sum() * tau * (-torch.stack(losses) / tau).exp().mean().log()


def compared(call: Any, others: Tensor, own: Tensor, b: Tensor) -> Tensor:
    """The loss of a positive with the score `own`, compared with a sum over others, for softmax and its kin."""
    member, settings, factor = call.member, call.settings, torch.ones((), dtype=torch.float64)
    if "gate_temperature" in settings:
        factor = torch.sigmoid((own - b) / settings["gate_temperature"])
    if member.name == "talos":
        others, own = (log_h(s, b, settings["tau"]) for s in (others, own))
    if member.name == "psl":  # compared with the positive, whose own term is 1
        g = {"relu": lambda d: (1 + d).relu(), "tanh": lambda d: 1 + d.tanh(), "atan": lambda d: (1 + d.atan()).relu()}
        log_sum = (g[settings["activation"]](others - own) ** (1 / settings["tau"])).sum().log()
        return log_sum + call.given.get("z_loss", 0.0) * log_sum**2
    log_sum = others.logsumexp(0)
    return factor * (log_sum - own + call.given.get("z_loss", 0.0) * log_sum**2)


def log_h(scores: Tensor, b: Tensor, tau: float) -> Tensor:
    """log sigma(s - b) / tau, -inf at masked classes."""
    live = scores > -torch.inf
    return torch.where(live, logsigmoid(torch.where(live, scores, 0) - b) / tau, -torch.inf)
