"""Rules of findings 1, 2, 4 and 5: which loss is better, and at which learning rate."""

from __future__ import annotations

from collections.abc import Iterator

from manymax.paper.findings.cases import FindingCase, case_name, run_identities, two_scores
from manymax.paper.findings.points import PointSet, beats, untested

SPARSE_LOSSES = ("sparsemax", "entmax")
SIMPLE_BACKBONE = "mf"
COMPLEX_BACKBONES = ("sasrec", "lightgcn")


def larger_rates(points: PointSet) -> Iterator[FindingCase]:
    """Finding 1: the best learning rate of softmax is larger than that of a sparse loss."""
    for place in points.places():
        for loss in SPARSE_LOSSES:
            softmax, sparse = points.by_rate(place, "softmax", loss)
            if len(softmax) < 2:
                continue
            softmax_lr, sparse_lr = (max(by_rate, key=lambda lr: by_rate[lr].merit) for by_rate in (softmax, sparse))
            why = f"of {len(softmax)} rates {softmax_lr:g} is best for softmax, {sparse_lr:g} for {loss}"
            supports: bool | None = None
            runs: tuple[str, ...] = ()
            if softmax_lr != sparse_lr:
                matters = beats(softmax[softmax_lr], softmax[sparse_lr]) or beats(sparse[sparse_lr], sparse[softmax_lr])
                supports = softmax_lr > sparse_lr if matters else None
                compared = (by_rate[lr] for by_rate in (softmax, sparse) for lr in (softmax_lr, sparse_lr))
                runs = run_identities(*compared)
            yield FindingCase(case_name(place, loss), supports, why, loss, runs)


def rankmax_on_top(points: PointSet) -> Iterator[FindingCase]:
    """Finding 2: rankmax is above softmax, and no loss is above rankmax."""
    for place in points.places():
        rankmax, softmax = points.best(place, "rankmax"), points.best(place, "softmax")
        others = [p for loss in points.losses(place) if loss != "rankmax" if (p := points.best(place, loss))]
        if rankmax is None or softmax is None:
            continue
        above = [other for other in others if beats(other, rankmax, tests=len(others))]
        why = f"{two_scores(rankmax, softmax)}, {len(others) + 1} losses"
        if above:
            names = (f"{p.loss if p.trial is None else p.trial.label} {p.score:.4f}" for p in above)
            why = f"rankmax {rankmax.score:.4f}; above it: {', '.join(names)}"
        supports = False if above else beats(rankmax, softmax)
        yield FindingCase(case_name(place), supports, why, runs=run_identities(rankmax, *others))


def sparse_falls_behind(points: PointSet) -> Iterator[FindingCase]:
    """Finding 4: a sparse loss reaches a smaller share of softmax's score under a complex backbone than under MF."""
    for data, backbone in points.places():
        if backbone not in COMPLEX_BACKBONES:
            continue
        for loss in SPARSE_LOSSES:
            simple_sparse, simple_softmax = (points.best((data, SIMPLE_BACKBONE), name) for name in (loss, "softmax"))
            sparse, softmax = (points.best((data, backbone), name) for name in (loss, "softmax"))
            if simple_sparse is None or simple_softmax is None or sparse is None or softmax is None:
                continue
            if not simple_softmax.score or not softmax.score:
                continue  # a share of zero is not defined
            simple_share, share = simple_sparse.score / simple_softmax.score, sparse.score / softmax.score
            below = beats(softmax, sparse)
            supports = None if below is None else below and softmax.sign * (share - simple_share) < 0
            # The share on the simple backbone is part of the name: an earlier verdict beside another share then counts
            # as one of another case.
            name = case_name((data, backbone), f"{loss}, {simple_share:.0%} of softmax on {SIMPLE_BACKBONE}")
            yield FindingCase(name, supports, f"{share:.0%} here", loss, run_identities(sparse, softmax))


def non_sampling_approximations(points: PointSet) -> Iterator[FindingCase]:
    """Finding 5: hierarchical softmax is below softmax, and RG is not."""
    for place in points.places():
        softmax = points.best(place, "softmax")
        tree, rg = points.best(place, "hierarchical_softmax"), points.best(place, "rg")
        if softmax is not None and tree is not None:
            name, runs = case_name(place, "HSM below softmax"), run_identities(softmax, tree)
            yield FindingCase(name, beats(softmax, tree), two_scores(tree, softmax), "HSM", runs)
        if softmax is not None and rg is not None:
            below = beats(softmax, rg)
            supports = None if below is None and untested(softmax, rg) else below is not True
            name, runs = case_name(place, "RG not below softmax"), run_identities(softmax, rg)
            yield FindingCase(name, supports, two_scores(rg, softmax), "RG", runs)
