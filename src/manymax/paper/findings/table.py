"""The nine findings: what the paper claims, the rule in words and as a function, and the runs that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from manymax.paper.findings.accuracy_rules import (
    COMPLEX_BACKBONES,
    SIMPLE_BACKBONE,
    SPARSE_LOSSES,
    larger_rates,
    non_sampling_approximations,
    rankmax_on_top,
    sparse_falls_behind,
)
from manymax.paper.findings.cases import FindingCase
from manymax.paper.findings.points import PointSet
from manymax.paper.findings.sampling_rules import (
    NEGLIGIBLE,
    better_proposals,
    more_negatives,
    sampled_softmax_above_nce,
)
from manymax.paper.findings.time_rules import COMPETITIVE, OVERHEAD, few_epochs, overhead
from manymax.paper.printed import SAMPLED
from manymax.study.report.pace import NEAR_BEST
from manymax.study.report.significance import SIGNIFICANCE_LEVEL


@dataclass(frozen=True)
class Need:
    """The runs without which a part of a finding has no case: these losses, under these conditions."""

    losses: tuple[str, ...]
    where: str = "on the same data and backbone"

    def __str__(self) -> str:
        *first, last = self.losses
        return f"{', '.join(first)} and {last} {self.where}" if first else f"{last} {self.where}"


@dataclass(frozen=True)
class Finding:
    """One finding of the paper.

    claim: what the paper says.
    rule: how it is decided, in words.
    cases: the rule as a function of points.
    parts: {part: the runs that it needs}; the one part of a finding without parts is "".
    """

    number: int
    claim: str
    rule: str
    cases: Callable[[PointSet], Iterator[FindingCase]]
    parts: Mapping[str, Need]


T_TEST = f"paired t-test over users, p < {SIGNIFICANCE_LEVEL}"
AT_BEST = (
    "Each loss counts at the settings that are best on validation, of those with batches nearest to the paper's pairs."
)
AT_COMMON = (
    "Each counts at the learning rate that is best on validation, of those at which all in the comparison were run "
    "with like batches, the nearest to the paper's pairs that they have in common."
)

FINDINGS = (
    Finding(
        1,
        "Softmax supports larger learning rates than sparse alternatives.",
        "For each data set and backbone: of the learning rates at which both were run with like batches, the one that "
        "is best on validation is larger for softmax than for sparsemax, and than for entmax. Open where it is the "
        f"same one, and where neither loss is better at its own rate than at the other's (N@20, {T_TEST}).",
        larger_rates,
        {loss: Need(("softmax", loss), "at two or more learning rates in common") for loss in SPARSE_LOSSES},
    ),
    Finding(
        2,
        "Rankmax achieves top performance: hard negatives matter.",
        f"For each data set and backbone: rankmax is above softmax (N@20, {T_TEST}), and no loss is above rankmax (the "
        f"same test, Bonferroni over losses). {AT_BEST}",
        rankmax_on_top,
        {"": Need(("rankmax", "softmax"))},
    ),
    Finding(
        3,
        "Sampled softmax consistently surpasses NCE.",
        f"For each data set, backbone, k and proposal: sampled softmax is above NCE (N@20, {T_TEST}). {AT_COMMON}",
        sampled_softmax_above_nce,
        {"": Need(SAMPLED, "with the same k and proposal, on the same data and backbone")},
    ),
    Finding(
        4,
        "Sparse losses fall behind in complex architectures.",
        f"For each data set and complex backbone: sparsemax and entmax are below softmax (N@20, {T_TEST}) and reach a "
        f"smaller share of softmax's N@20 than on MF. {AT_BEST}",
        sparse_falls_behind,
        {
            loss: Need(("softmax", loss), f"under {SIMPLE_BACKBONE} and under {' or '.join(COMPLEX_BACKBONES)}")
            for loss in SPARSE_LOSSES
        },
    ),
    Finding(
        5,
        "Of the non-sampling approximations HSM is poor and RG is superior.",
        f"For each data set and backbone: HSM is below softmax, and RG is not below softmax (N@20, {T_TEST}). "
        f"{AT_BEST}",
        non_sampling_approximations,
        {"HSM": Need(("softmax", "hierarchical_softmax")), "RG": Need(("softmax", "rg"))},
    ),
    Finding(
        6,
        "More negatives improve sampled softmax monotonically, and change NCE little.",
        f"For each data set and backbone with three or more k, uniform proposal: sampled softmax's N@20 rises from the "
        f"smallest k to the largest ({T_TEST}) and falls from none to the next (the same test, Bonferroni over steps); "
        f"NCE's changes by at most {NEGLIGIBLE:.0%} from the smallest to the largest. {AT_COMMON}",
        more_negatives,
        {loss: Need((loss,), "at three or more k with the uniform proposal") for loss in SAMPLED},
    ),
    Finding(
        7,
        "Proposals nearer to the model (DNS) improve sampled softmax and NCE.",
        f"For each data set, backbone, loss and k: dns is above uniform (N@20, {T_TEST}). {AT_COMMON}",
        better_proposals,
        {loss: Need((loss,), "with the proposals dns and uniform at the same k") for loss in SAMPLED},
    ),
    Finding(
        8,
        "Sparse losses converge in few epochs on MF, and lose this on complex backbones.",
        f"For each data set: the epoch at which {NEAR_BEST:.0%} of the own best validation N@20 is reached is earlier "
        f"than softmax's on MF (open where it is the same), and not earlier on other backbones. {AT_BEST}",
        few_epochs,
        {
            "simple": Need(("softmax", "sparsemax or entmax"), f"under {SIMPLE_BACKBONE}, with curves"),
            "complex": Need(("softmax", "sparsemax or entmax"), f"under {' or '.join(COMPLEX_BACKBONES)}, with curves"),
        },
    ),
    Finding(
        9,
        "Sparse losses cost much more per iteration; sampling sometimes trains faster.",
        f"For each data set and backbone: training seconds per epoch are above {OVERHEAD} times softmax's for "
        f"sparsemax and entmax; and somewhere a sampled loss reaches {COMPETITIVE:.0%} of softmax's best validation "
        f"N@20 in fewer training seconds than softmax. {AT_BEST}",
        overhead,
        {
            "cost": Need(("softmax", "sparsemax or entmax")),
            "speed": Need(("softmax", "sampled_softmax or nce"), "on the same data and backbone, with curves"),
        },
    ),
)
