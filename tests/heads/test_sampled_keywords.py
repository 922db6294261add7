"""The shared keywords of sampled heads against plain sampled losses on the scores of the same draw."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

import manymax
from manymax import FAMILY, ArgumentError
from manymax.members import REFERENCE_LOSSES
from manymax.samplers import UniformSampler

ROWS, CLASSES, DIM, NEGATIVES = 5, 37, 4, 12
SAMPLED = [m for m in (*FAMILY.values(), *REFERENCE_LOSSES.values()) if m.kind == "sampled"]
PARTITION = {"correction": "partition", "hit_policy": "keep"}
CORRECTED = {"correction": "corrected_logq"}
# Members with settings, named by the member or by the setting.
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{member.name: (member, {}) for member in SAMPLED},
    CORRECTED["correction"]: (FAMILY["sampled_softmax"], CORRECTED),
}
CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": torch.tensor(0.6, dtype=torch.float64)},
    "normalize": {"normalize": True, "temperature": 0.3},
    "softcap": {"softcap": 1.5},
    "exclude": {"exclude": True},
    "negatives": {"negatives": True},
    "row_weight": {"row_weight": torch.tensor([1.0, 0.0, 2.0, 0.5, 3.0], dtype=torch.float64)},
    "num_items": {"num_items": 9},
    "decoupled": {"decoupled": True},
    "z_loss": {"z_loss": 0.3},
    "all": {"normalize": True, "softcap": 2.0, "exclude": True, "negatives": True, "decoupled": True},
}


class Problem:
    """Queries, class vectors of which one is zero, a bias, a target with an ignored row, and lists of ids."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        tensors = torch.randn(ROWS, DIM), torch.randn(CLASSES, DIM), torch.randn(CLASSES)
        self.input, self.vectors, self.bias = (tensor.double() for tensor in tensors)
        self.vectors[6] = 0.0
        self.leaves = [tensor.requires_grad_() for tensor in (self.input, self.vectors, self.bias)]
        self.target = torch.tensor([3, -100, 6, 30, 3])
        self.exclude = torch.randint(CLASSES, (ROWS, 9))
        self.negatives = torch.tensor([[1, 3], [0, 0], [-100, -100], [7, 8], [3, -100]])


def scores_of(problem: Problem, given: dict[str, Any]) -> Tensor:
    """The whole table of scores by the formulas of the keywords."""
    input, vectors = problem.input, problem.vectors
    if given.get("normalize"):
        input, norms = input / input.norm(dim=1, keepdim=True), vectors.norm(dim=1, keepdim=True)
        vectors = torch.where(norms > 0, vectors / torch.where(norms > 0, norms, 1), 0 * vectors.detach())
    scores = input @ vectors.T / given.get("temperature", 1.0) + problem.bias
    cap = given.get("softcap")
    return scores if cap is None else cap * torch.tanh(scores / cap)


def reference(member: Any, problem: Problem, given: dict[str, Any], shared: bool, settings: dict[str, Any]) -> Tensor:
    """The mean loss, one row after the other, over the draws that the head makes with the same generator."""
    scores, kept = scores_of(problem, given), (problem.target >= 0).nonzero().flatten()
    if "row_weight" in given:
        kept = kept[given["row_weight"][kept] != 0]
    classes = problem.target[kept]
    draw = UniformSampler(CLASSES)(
        NEGATIVES, target=classes, input=problem.input[kept].detach(), shared=shared, generator=generator()
    )
    losses, log_q = [], -math.log(CLASSES)
    for place, (n, y) in enumerate(zip(kept.tolist(), classes.tolist(), strict=True)):
        ids = draw.ids if shared else draw.ids[place]
        negative = scores[n, ids]
        listed = torch.zeros(NEGATIVES, dtype=torch.bool)
        if "exclude" in given:
            listed |= torch.isin(ids, problem.exclude[n])
        more = problem.negatives[n] if "negatives" in given else torch.empty(0, dtype=torch.long)
        more = more[(more >= 0) & (more != y)]
        listed |= torch.isin(ids, problem.negatives[n]) if "negatives" in given else False
        counted = log_q
        if settings == CORRECTED:  # the draws that are no hits, and their distribution
            listed |= ids == y
            counted += math.log(float((ids != y).double().mean())) - math.log(1 - 1 / CLASSES)
        negative = torch.where(listed, -torch.inf, negative)
        negative = torch.cat([negative, scores[n, more]])
        if given.get("decoupled") or "z_loss" in given:
            logits = torch.cat([negative[:NEGATIVES] - counted - math.log(NEGATIVES), negative[NEGATIVES:]])
            every = logits if given.get("decoupled") else torch.cat([logits, scores[n, y : y + 1]])
            loss = every.logsumexp(0) - scores[n, y]
            if settings == CORRECTED and not given.get("decoupled"):
                loss = in_doubt(logits.logsumexp(0) - scores[n, y])
            loss = loss + given.get("z_loss", 0.0) * every.logsumexp(0) ** 2
        else:
            each = torch.full((len(negative),), counted, dtype=torch.float64)
            each[NEGATIVES:] = -math.log(NEGATIVES)  # a given negative counts once: k q = 1
            loss = plain_loss(member, scores[n, y], negative, log_q, each, settings)
        losses.append(loss * (given["row_weight"][n] if "row_weight" in given else 1.0))
    weights = given["row_weight"][kept].sum() if "row_weight" in given else len(kept)
    return torch.stack(losses).sum() / given.get("num_items", weights)


def plain_loss(member: Any, positive: Tensor, negative: Tensor, log_q: float, each: Tensor, settings: Any) -> Tensor:
    """The plain loss of one positive and its negatives, of which the first `NEGATIVES` are draws."""
    if settings == CORRECTED:
        return in_doubt((negative - each - math.log(NEGATIVES)).logsumexp(0) - positive)
    if member.name == "sampled_softmax":
        # c = s - log(k q), where the number of draws is not the number of columns.
        logits = negative - each - (math.log(NEGATIVES) if settings.get("correction") == "partition" else 0.0)
        own = positive - (0.0 if settings.get("correction") == "partition" else log_q)
        return torch.cat([own.unsqueeze(0), logits]).logsumexp(0) - own
    if member.name == "nce":  # binary, positive against negatives, of s - log Z - log(k q)
        own = positive - math.log(CLASSES) - math.log(NEGATIVES) - log_q
        others = negative - math.log(CLASSES) - math.log(NEGATIVES) - each
        return softplus(-own) + softplus(others).sum()
    if member.name == "gbce":  # a sum, and k is the number of draws
        weight = 1 - 0.75 * (1 - NEGATIVES / (CLASSES - 1))
        return weight * softplus(-positive) + softplus(negative).sum()
    # Means over the negatives: each given one weighs 1 / k, as a draw does.
    own = softplus(-positive) if member.name == "bce" else 0.0
    loss = member.loss(positive.unsqueeze(0), negative.unsqueeze(0), **settings).squeeze()
    return own + (loss - own) * len(negative) / NEGATIVES


def in_doubt(difference: Tensor) -> Tensor:
    """(1 - P_y) (log Z' - s_y) of log Z' - s_y, with the weight held constant."""
    return difference.detach().sigmoid() * difference


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_keyword(name: str, case: str, shared: bool) -> None:
    problem, given = Problem(), dict(CASES[case])
    member, settings = SETTINGS[name]
    needs_partition = any(name in given for name in ("decoupled", "z_loss"))
    settings = settings or (PARTITION if needs_partition and member.log_partition else {})
    for name in ("exclude", "negatives"):
        if name in given:
            given[name] = getattr(problem, name)
    if isinstance(given.get("temperature"), Tensor):
        given["temperature"] = given["temperature"].clone().requires_grad_()
    wanted = [*problem.leaves, *(v for v in given.values() if isinstance(v, Tensor) and v.requires_grad)]

    def loss() -> Tensor:
        tensors = problem.input, problem.vectors, problem.target, UniformSampler(CLASSES), NEGATIVES
        how = {"linear_bias": problem.bias, "shared": shared, "generator": generator()}
        return manymax.linear_loss(member, *tensors, **how, **given, **settings)

    if needs_partition and not member.log_partition:
        with pytest.raises(ArgumentError, match="no meaning"):
            loss()
        return
    ours, theirs = loss(), reference(member, problem, given, shared, settings)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    for found, expected in zip(torch.autograd.grad(ours, wanted), torch.autograd.grad(theirs, wanted), strict=True):
        torch.testing.assert_close(found, torch.nan_to_num(expected), rtol=1e-7, atol=1e-9)
