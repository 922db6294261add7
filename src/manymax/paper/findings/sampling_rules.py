"""Rules of findings 3, 6 and 7: losses that draw negatives, how many they draw and how."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from manymax.paper.findings.cases import FindingCase, case_name, run_identities, two_scores
from manymax.paper.findings.points import PointSet, at_common_settings, beats

NEGLIGIBLE = 0.05  # relative change up to which finding 6 counts NCE as unchanged


def sampled_softmax_above_nce(points: PointSet) -> Iterator[FindingCase]:
    """Finding 3: sampled softmax is above NCE with the same number of negatives and the same proposal."""
    for sampler in dict.fromkeys(point.sampler for point in points.points if point.sampler is not None):
        lines = points.by_negatives(sampler)
        for (place, loss), line in lines.items():
            nce = lines.get((place, "nce"), {})
            for k in line if loss == "sampled_softmax" else ():
                if k in nce:
                    first, second = at_common_settings(line[k], nce[k])
                    name, runs = case_name(place, f"k={k}, {sampler}"), run_identities(first, second)
                    yield FindingCase(name, beats(first, second), two_scores(first, second), runs=runs)


def more_negatives(points: PointSet) -> Iterator[FindingCase]:
    """Finding 6: more negatives improve sampled softmax at every step, and change NCE little."""
    for (place, loss), groups in points.by_negatives("uniform").items():
        if len(groups) < 3:
            continue
        line = at_common_settings(*groups.values())
        first, last = line[0], line[-1]
        name, values = case_name(place, loss), ", ".join(f"{p.score:.4f}" for p in line)
        if loss == "nce":
            change = abs(last.score - first.score) / max(last.score, 1e-12)
            yield FindingCase(name, change <= NEGLIGIBLE, f"changes by {change:.0%}: {values}", loss)
        else:
            falls = any(beats(before, after, tests=len(line) - 1) for before, after in pairwise(line))
            rises = beats(last, first)
            supports = False if falls or rises is False else rises
            yield FindingCase(name, supports, values, loss, run_identities(*line))


def better_proposals(points: PointSet) -> Iterator[FindingCase]:
    """Finding 7: hard negatives (dns) are better than uniform ones, with the same number of negatives."""
    uniform, dns = points.by_negatives("uniform"), points.by_negatives("dns")
    for (place, loss), line in dns.items():
        others = uniform.get((place, loss), {})
        for k in line:
            if k in others:
                hard, easy = at_common_settings(line[k], others[k])
                name, runs = case_name(place, f"{loss}, k={k}"), run_identities(hard, easy)
                why = f"{hard.score:.4f} with dns, {easy.score:.4f} with uniform"
                yield FindingCase(name, beats(hard, easy), why, loss, runs)
