"""The paper's findings 1 to 9, each with the rule that decides it from records, and its verdict.

A rule looks at every case that the runs allow (a data set and a backbone, say) and finds that the case supports the
finding, opposes it, or leaves it open. The findings are stated without exception, so

    contradicted      at least one case opposes
    confirmed         none opposes, and each part of the finding has at least one case that supports it
    not enough runs   otherwise

The same rules are put to the paper's own tables, with plain comparison of the printed numbers instead of a test.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from manymax.paper.judgement import Evidence, Point, beats, from_paper, from_trials, selected, untested
from manymax.paper.printed import SAMPLED, remoteness
from manymax.study.report.pace import NEAR_BEST, arrival
from manymax.study.report.significance import SIGNIFICANCE_LEVEL
from manymax.study.report.trials import Trial, metrics

Verdict = Literal["confirmed", "contradicted", "not enough runs"]

SPARSE = ("sparsemax", "entmax")
SIMPLE = "mf"
COMPLEX = ("sasrec", "lightgcn")
NEGLIGIBLE = 0.05  # relative change that finding 6 lets pass as flat
OVERHEAD = 1.2  # times softmax's seconds per epoch from which finding 9 speaks of overhead
COMPETITIVE = 0.9  # of softmax's best value: what finding 9 calls a competitive result


@dataclass(frozen=True)
class FindingCase:
    """What one case says of a part of the finding: it supports (True), opposes (False), or leaves it open (None).

    `runs` are the runs whose users it compares; none where it needs no test.
    """

    name: str
    supports: bool | None
    why: str
    part: str = ""
    runs: tuple[str, ...] = ()


def larger_rates(evidence: Evidence) -> Iterator[FindingCase]:
    """Finding 1."""
    for place in evidence.places():
        for loss in SPARSE:
            softmax, other = evidence.by_rate(place, "softmax", loss)
            if len(softmax) < 2:
                continue
            own, its = (max(points, key=lambda lr: points[lr].selected) for points in (softmax, other))
            matters = beats(softmax[own], softmax[its]) or beats(other[its], other[own])
            why = f"of {len(softmax)} rates {own:g} is best for softmax, {its:g} for {loss}"
            runs = () if own == its else _runs(softmax[own], softmax[its], other[own], other[its])
            yield FindingCase(_name(place, loss), own > its if own != its and matters else None, why, loss, runs)


def rankmax_on_top(evidence: Evidence) -> Iterator[FindingCase]:
    """Finding 2."""
    for place in evidence.places():
        rankmax, softmax = evidence.best(place, "rankmax"), evidence.best(place, "softmax")
        others = [p for loss in evidence.losses(place) if loss != "rankmax" if (p := evidence.best(place, loss))]
        if rankmax is None or softmax is None:
            continue
        above = [other for other in others if beats(other, rankmax, tests=len(others))]
        why = f"{_versus(rankmax, softmax)}, {len(others) + 1} losses"
        if above:
            names = (f"{p.loss if p.trial is None else p.trial.label} {p.score:.4f}" for p in above)
            why = f"rankmax {rankmax.score:.4f}; above it: {', '.join(names)}"
        yield FindingCase(_name(place), False if above else beats(rankmax, softmax), why, runs=_runs(rankmax, *others))


def sampled_softmax_above_nce(evidence: Evidence) -> Iterator[FindingCase]:
    """Finding 3."""
    for sampler in dict.fromkeys(point.sampler for point in evidence.points if point.sampler is not None):
        lines = _lines(evidence, sampler)
        for (place, loss), line in lines.items():
            nce = lines.get((place, "nce"), {})
            for k in line if loss == "sampled_softmax" else ():
                if k in nce:
                    point, other = _alike(line[k], nce[k])
                    name, runs = _name(place, f"k={k}, {sampler}"), _runs(point, other)
                    yield FindingCase(name, beats(point, other), _versus(point, other), runs=runs)


def sparse_falls_behind(evidence: Evidence) -> Iterator[FindingCase]:
    """Finding 4."""
    for data, backbone in evidence.places():
        if backbone not in COMPLEX:
            continue
        for loss in SPARSE:
            simple = [evidence.best((data, SIMPLE), name) for name in (loss, "softmax")]
            there = [evidence.best((data, backbone), name) for name in (loss, "softmax")]
            if None in simple or None in there:
                continue
            (a, b), (c, d) = ([p for p in pair if p is not None] for pair in (simple, there))
            if not b.score or not d.score:
                continue  # nothing is a share of nothing
            on_simple, on_complex = a.score / b.score, c.score / d.score
            below = beats(d, c)
            supports = below and on_complex < on_simple if below is not None else None
            # the share on mf is part of the name: what was found beside another one is found no more
            name = _name((data, backbone), f"{loss}, {on_simple:.0%} of softmax on {SIMPLE}")
            yield FindingCase(name, supports, f"{on_complex:.0%} here", loss, _runs(c, d))


def non_sampling_approximations(evidence: Evidence) -> Iterator[FindingCase]:
    """Finding 5."""
    for place in evidence.places():
        softmax = evidence.best(place, "softmax")
        tree, rg = evidence.best(place, "hierarchical_softmax"), evidence.best(place, "rg")
        if softmax is not None and tree is not None:
            name, runs = _name(place, "HSM below softmax"), _runs(softmax, tree)
            yield FindingCase(name, beats(softmax, tree), _versus(tree, softmax), "HSM", runs)
        if softmax is not None and rg is not None:
            below = beats(softmax, rg)
            supports = None if below is None and untested(softmax, rg) else below is not True
            name, runs = _name(place, "RG not below softmax"), _runs(softmax, rg)
            yield FindingCase(name, supports, _versus(rg, softmax), "RG", runs)


def more_negatives(evidence: Evidence) -> Iterator[FindingCase]:
    """Finding 6."""
    for (place, loss), found in _lines(evidence, "uniform").items():
        if len(found) < 3:
            continue
        line = _alike(*found.values())
        first, last = line[0], line[-1]
        values = ", ".join(f"{p.score:.4f}" for p in line)
        if loss == "nce":
            change = abs(last.score - first.score) / max(last.score, 1e-12)
            yield FindingCase(_name(place, loss), change <= NEGLIGIBLE, f"changes by {change:.0%}: {values}", loss)
        else:
            falls = any(beats(before, after, tests=len(line) - 1) for before, after in pairwise(line))
            rises = beats(last, first)
            yield FindingCase(
                _name(place, loss), False if falls or rises is False else rises, values, loss, _runs(*line)
            )


def _lines(evidence: Evidence, sampler: str) -> dict[tuple[tuple[str, str], str], dict[int, list[Point]]]:
    """{(place, loss): {the number of negatives: its points}}, the numbers in their order."""
    lines: dict[tuple[tuple[str, str], str], dict[int, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for point in evidence.points:
        if point.sampler == sampler and point.num_negatives is not None:
            lines[point.place, point.loss][point.num_negatives].append(point)
    return {key: dict(sorted(line.items())) for key, line in lines.items()}


def _alike(*groups: Sequence[Point]) -> list[Point]:
    """The best point of each group, of the learning rates that all were run at: more rates are no merit.

    All with like batches, the nearest to the paper's that they have in common; of all that a group has, where the
    groups have nothing in common.
    """
    common = set.intersection(*({(point.lr, point.batches) for point in group} for group in groups))
    near = min((remoteness(batches) for _, batches in common), default=0)
    alike = {(lr, batches) for lr, batches in common if remoteness(batches) == near}
    return [selected([p for p in group if (p.lr, p.batches) in alike] or group) for group in groups]


def better_proposals(evidence: Evidence) -> Iterator[FindingCase]:
    """Finding 7."""
    uniform, dns = _lines(evidence, "uniform"), _lines(evidence, "dns")
    for (place, loss), line in dns.items():
        others = uniform.get((place, loss), {})
        for k in line:
            if k in others:
                point, other = _alike(line[k], others[k])
                why = f"{point.score:.4f} with dns, {other.score:.4f} with uniform"
                yield FindingCase(_name(place, f"{loss}, k={k}"), beats(point, other), why, loss, _runs(point, other))


def few_epochs(evidence: Evidence) -> Iterator[FindingCase]:
    """Finding 8."""
    for place in evidence.places():
        reference = _arrives(evidence.best(place, "softmax"), "epoch")
        for loss in SPARSE:
            mine = _arrives(evidence.best(place, loss), "epoch")
            if reference is None or mine is None:
                continue
            simple = place[1] == SIMPLE
            supports = (None if mine == reference else mine < reference) if simple else mine >= reference
            why = f"epoch {mine:g}, softmax epoch {reference:g}"
            yield FindingCase(_name(place, loss), supports, why, "simple" if simple else "complex")


def _arrives(point: Point | None, column: str, goal: float | None = None) -> float | None:
    if point is None or point.trial is None:
        return None
    return arrival(point.trial, metrics([point.trial])[0], column, goal)


def overhead(evidence: Evidence) -> Iterator[FindingCase]:
    """Finding 9."""
    faster: list[FindingCase] = []
    for place in evidence.places():
        softmax = evidence.best(place, "softmax")
        seconds = _seconds_per_epoch(softmax)
        if softmax is None or softmax.trial is None or not seconds:
            continue
        for loss in SPARSE:
            mine = _seconds_per_epoch(evidence.best(place, loss))
            if mine is not None:
                yield FindingCase(
                    _name(place, loss), mine > OVERHEAD * seconds, f"{mine / seconds:.2f} times softmax's epoch", "cost"
                )
        goal = COMPETITIVE * softmax.selected
        own = _arrives(softmax, "seconds_train", goal)
        times = [_arrives(evidence.best(place, loss), "seconds_train", goal) for loss in SAMPLED]
        if own is not None and any(evidence.best(place, loss) for loss in SAMPLED):
            quick = min((time for time in times if time is not None), default=None)
            why = f"{COMPETITIVE:.0%} of softmax's best after {own:.1f} s with softmax, "
            why += "never with sampling" if quick is None else f"{quick:.1f} s with sampling"
            faster.append(FindingCase(_name(place, "sampled"), quick is not None and quick < own, why))
    if faster:  # "sometimes": one place is enough
        supports = any(case.supports for case in faster)
        yield FindingCase(
            "sampling is faster somewhere", supports, "; ".join(f"{c.name}: {c.why}" for c in faster), "speed"
        )


def _seconds_per_epoch(point: Point | None) -> float | None:
    if point is None or point.trial is None:
        return None
    return point.trial.average(
        lambda r: r.seconds["training"] / r.epochs if r.epochs and "training" in r.seconds else None
    )


def _name(place: tuple[str, str], more: str = "") -> str:
    return ", ".join(filter(None, (*place, more)))


def _runs(*points: Point) -> tuple[str, ...]:
    """All runs of our trials among the points, by what tells them apart."""
    return tuple(sorted({run.identity for p in points if p.trial is not None for run in p.trial.runs}))


def _versus(first: Point, second: Point) -> str:
    return f"{first.loss} {first.score:.4f}, {second.loss} {second.score:.4f}"


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
    """One finding: what the paper claims, the rule, and its parts, each with the runs that it needs."""

    number: int
    claim: str
    rule: str
    cases: Callable[[Evidence], Iterator[FindingCase]]
    parts: Mapping[str, Need]


TEST = f"paired t-test over users, p < {SIGNIFICANCE_LEVEL}"
BEST = (
    "Each loss counts at the settings that are best on validation, of those with batches nearest to the paper's pairs."
)
ALIKE = (
    "Each counts at the learning rate that is best on validation, of those at which all in the comparison were run "
    "with like batches, the nearest to the paper's pairs that they have in common."
)

FINDINGS = (
    Finding(
        1,
        "Softmax supports larger learning rates than sparse alternatives.",
        "For each data set and backbone: of the learning rates at which both were run with like batches, the one that "
        "is best on validation is larger for softmax than for sparsemax, and than for entmax. Open where it is the "
        f"same one, and where neither loss is better at its own rate than at the other's (N@20, {TEST}).",
        larger_rates,
        {loss: Need(("softmax", loss), "at two or more learning rates in common") for loss in SPARSE},
    ),
    Finding(
        2,
        "Rankmax achieves top performance: hard negatives matter.",
        f"For each data set and backbone: rankmax is above softmax (N@20, {TEST}), and no loss is above rankmax (the "
        f"same test, Bonferroni over losses). {BEST}",
        rankmax_on_top,
        {"": Need(("rankmax", "softmax"))},
    ),
    Finding(
        3,
        "Sampled softmax consistently surpasses NCE.",
        f"For each data set, backbone, k and proposal: sampled softmax is above NCE (N@20, {TEST}). {ALIKE}",
        sampled_softmax_above_nce,
        {"": Need(SAMPLED, "with the same k and proposal, on the same data and backbone")},
    ),
    Finding(
        4,
        "Sparse losses fall behind in complex architectures.",
        f"For each data set and complex backbone: sparsemax and entmax are below softmax (N@20, {TEST}) and reach a "
        f"smaller share of softmax's N@20 than on MF. {BEST}",
        sparse_falls_behind,
        {loss: Need(("softmax", loss), f"under {SIMPLE} and under {' or '.join(COMPLEX)}") for loss in SPARSE},
    ),
    Finding(
        5,
        "Of the non-sampling approximations HSM is poor and RG is superior.",
        f"For each data set and backbone: HSM is below softmax, and RG is not below softmax (N@20, {TEST}). {BEST}",
        non_sampling_approximations,
        {"HSM": Need(("softmax", "hierarchical_softmax")), "RG": Need(("softmax", "rg"))},
    ),
    Finding(
        6,
        "More negatives improve sampled softmax monotonically, and change NCE little.",
        f"For each data set and backbone with three or more k, uniform proposal: sampled softmax's N@20 rises from the "
        f"smallest k to the largest ({TEST}) and falls from none to the next (the same test, Bonferroni over steps); "
        f"NCE's changes by at most {NEGLIGIBLE:.0%} from the smallest to the largest. {ALIKE}",
        more_negatives,
        {loss: Need((loss,), "at three or more k with the uniform proposal") for loss in SAMPLED},
    ),
    Finding(
        7,
        "Proposals nearer to the model (DNS) improve sampled softmax and NCE.",
        f"For each data set, backbone, loss and k: dns is above uniform (N@20, {TEST}). {ALIKE}",
        better_proposals,
        {loss: Need((loss,), "with the proposals dns and uniform at the same k") for loss in SAMPLED},
    ),
    Finding(
        8,
        "Sparse losses converge in few epochs on MF, and lose this on complex backbones.",
        f"For each data set: the epoch at which {NEAR_BEST:.0%} of the own best validation N@20 is reached is earlier "
        f"than softmax's on MF (open where it is the same), and not earlier on other backbones. {BEST}",
        few_epochs,
        {
            "simple": Need(("softmax", "sparsemax or entmax"), f"under {SIMPLE}, with curves"),
            "complex": Need(("softmax", "sparsemax or entmax"), f"under {' or '.join(COMPLEX)}, with curves"),
        },
    ),
    Finding(
        9,
        "Sparse losses cost much more per iteration; sampling sometimes trains faster.",
        f"For each data set and backbone: training seconds per epoch are above {OVERHEAD} times softmax's for "
        f"sparsemax and entmax; and somewhere a sampled loss reaches {COMPETITIVE:.0%} of softmax's best validation "
        f"N@20 in fewer training seconds than softmax. {BEST}",
        overhead,
        {
            "cost": Need(("softmax", "sparsemax or entmax")),
            "speed": Need(("softmax", "sampled_softmax or nce"), "on the same data and backbone, with curves"),
        },
    ),
)


@dataclass(frozen=True)
class Judgement:
    """A finding with the cases that our runs and the paper's tables give it."""

    finding: Finding
    cases: tuple[FindingCase, ...]
    printed: tuple[FindingCase, ...]

    @property
    def verdict(self) -> Verdict:
        """From our runs."""
        return verdict(self.cases, self.finding.parts)

    @property
    def printed_verdict(self) -> Verdict:
        """From the paper's own tables."""
        return verdict(self.printed, self.finding.parts)

    @property
    def missing(self) -> list[str]:
        """What a verdict from our runs lacks; nothing where there is one."""
        if self.verdict != "not enough runs":
            return []
        supported = {case.part for case in self.cases if case.supports}
        counts = Counter(case.part for case in self.cases)
        return [
            _undecided(part, counts[part]) if counts[part] else f"no runs of {need}"
            for part, need in self.finding.parts.items()
            if part not in supported
        ]


def _undecided(part: str, count: int) -> str:
    cases = "the case is" if count == 1 else f"all {count} cases are"
    return f"{cases} open{f' for {part}' if part else ''}: no difference beyond chance"


def verdict(cases: Sequence[FindingCase], parts: Collection[str] = ("",)) -> Verdict:
    """The verdict that cases lead to.

    >>> supports, leaves_open, opposes = (FindingCase("", value, "") for value in (True, None, False))
    >>> verdict([supports, leaves_open]), verdict([supports, opposes])
    ('confirmed', 'contradicted')
    >>> verdict([FindingCase("a", True, "", "HSM")], ("HSM", "RG"))
    'not enough runs'
    """
    if any(case.supports is False for case in cases):
        return "contradicted"
    supported = {case.part for case in cases if case.supports}
    return "confirmed" if supported.issuperset(parts) else "not enough runs"


def judge(trials: Sequence[Trial]) -> list[Judgement]:
    """Every finding, judged from our runs and from the paper's tables."""
    ours, paper = from_trials(trials), from_paper()
    return [Judgement(f, tuple(f.cases(ours)), tuple(f.cases(paper))) for f in FINDINGS]
