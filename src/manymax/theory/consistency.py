"""Consistency: whether the minimiser of a member's conditional risk ranks the classes as a metric wants.

A loss is consistent with a metric if, for every distribution of label sets, the scores that minimise its conditional
risk (`manymax.theory.risk`) sort the classes by their gains (`manymax.theory.label_laws`), however ties are broken.
Here this is tried on random distributions; an inconsistent member is shown by the distribution with the largest regret.

References: Lapin, Hein, Schiele, CVPR 2016; Yang and Koyejo, ICML 2020 (Top-k calibration); Ravikumar, Tewari, Yang,
AISTATS 2011 (NDCG); Menon et al., NeurIPS 2019 (P@k and R@k by reductions).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manymax.engine.member import Member
from manymax.errors import check_choice
from manymax.ops.arguments import checked
from manymax.theory.label_laws import LabelLaw, random_law, random_probs, regret
from manymax.theory.risk import closed_form, minimisers, uniform_log_q

LABEL_SETS = ("single", "multi")
NEGLIGIBLE_REGRET = 1e-4  # counting nearly equal scores as tied can cost as much


@dataclass(frozen=True)
class Consistency:
    """What was found over random laws.

    holds: whether no regret was above the numerical error of a search.
    regret: the largest regret of any minimiser.
    law, scores, cutoff: the law, the minimiser (C,) and the cutoff with the largest regret: the counter-example if
        `holds` is False.
    trials: how many laws were tried.
    """

    holds: bool
    regret: float
    law: LabelLaw
    scores: Tensor
    cutoff: int
    trials: int


@checked(least={"num_classes": 2, "trials": 1, "num_negatives": 1})
def consistency(
    member: Member,
    metric: str = "dcg",
    *,
    labels: str = "single",
    multilabel: str = "sum",
    num_classes: int = 4,
    trials: int = 60,
    num_negatives: int = 2,
    uniform: bool = False,
    seed: int = 0,
    **settings: Any,
) -> Consistency:
    """Whether the minimiser of a member's risk ranks best, over random laws with ties and zeros, at every cutoff.

    With one label per example, "recall" is Top-k calibration for every k and "dcg" is DCG consistency.

    Args:
        member: a row of `FAMILY`.
        metric: "precision", "recall", "dcg" or "ndcg".
        labels: "single" for laws of one label per example, "multi" for laws of label sets.
        multilabel: "sum" over positives, or "normalized".
        num_classes: C.
        trials: how many laws to try. Every second one has ties, and zeros if the member has a closed form for them.
        num_negatives: k of a sampled member.
        uniform: a sampled member draws from the uniform proposal; otherwise from a random one in each trial.
        seed: of the laws.
        settings: settings of the member.

    Returns:
        The finding, with the law, the scores and the cutoff of the largest regret.

    Example:
        >>> from manymax.members import FAMILY
        >>> consistency(FAMILY["softmax"], "recall").holds, consistency(FAMILY["rankmax"], "recall").holds
        (True, False)
        >>> consistency(FAMILY["softmax"], "ndcg", labels="multi").holds
        False
    """
    check_choice("labels", labels, LABEL_SETS)
    generator = torch.Generator().manual_seed(seed)
    # A search needs positive weights, so laws have impossible classes only where the member has a closed form.
    one_impossible = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    zeros = closed_form(member, one_impossible, log_q=uniform_log_q(3), **settings) is not None
    worst = Consistency(True, -math.inf, LabelLaw.single(torch.ones(1)), torch.zeros(1), 1, trials)
    for trial in range(trials):
        law = random_law(num_classes, generator, labels=labels, ties=bool(trial % 2), zeros=zeros)
        log_q = uniform_log_q(num_classes) if uniform else random_probs(num_classes, generator).log()
        weights = law.class_weights(multilabel)
        for scores in minimisers(member, weights, log_q=log_q, num_negatives=num_negatives, **settings).scores:
            lost, cutoff = max((regret(scores, law, metric, k), k) for k in range(1, num_classes + 1))
            if lost > worst.regret:
                worst = Consistency(lost <= NEGLIGIBLE_REGRET, lost, law, scores, cutoff, trials)
    return worst
