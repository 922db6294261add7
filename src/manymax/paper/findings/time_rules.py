"""Rules of findings 8 and 9: how soon a loss arrives at its best value, and what an epoch costs."""

from __future__ import annotations

from collections.abc import Iterator

from manymax.paper.findings.accuracy_rules import SIMPLE_BACKBONE, SPARSE_LOSSES
from manymax.paper.findings.cases import FindingCase, case_name
from manymax.paper.findings.points import Point, PointSet
from manymax.paper.printed import SAMPLED
from manymax.study.report.pace import arrival, epoch_seconds

OVERHEAD = 1.2  # times softmax's seconds per epoch from which finding 9 speaks of overhead
COMPETITIVE = 0.9  # share of softmax's best value that finding 9 calls a competitive result


def few_epochs(points: PointSet) -> Iterator[FindingCase]:
    """Finding 8: sparse losses arrive in fewer epochs than softmax on a simple backbone, and not on a complex one."""
    for place in points.places():
        softmax_epoch = _arrives(points.best(place, "softmax"), "epoch")
        for loss in SPARSE_LOSSES:
            epoch = _arrives(points.best(place, loss), "epoch")
            if softmax_epoch is None or epoch is None:
                continue
            simple = place[1] == SIMPLE_BACKBONE
            if simple:
                supports = None if epoch == softmax_epoch else epoch < softmax_epoch
            else:
                supports = epoch >= softmax_epoch
            why = f"epoch {epoch:g}, softmax epoch {softmax_epoch:g}"
            yield FindingCase(case_name(place, loss), supports, why, "simple" if simple else "complex")


def overhead(points: PointSet) -> Iterator[FindingCase]:
    """Finding 9: an epoch of a sparse loss costs more than one of softmax, and sampling trains faster somewhere."""
    sampled_cases: list[FindingCase] = []
    for place in points.places():
        softmax = points.best(place, "softmax")
        seconds = _epoch_seconds(softmax)
        if softmax is None or softmax.trial is None or not seconds:
            continue
        for loss in SPARSE_LOSSES:
            sparse_seconds = _epoch_seconds(points.best(place, loss))
            if sparse_seconds is not None:
                why = f"{sparse_seconds / seconds:.2f} times softmax's epoch"
                yield FindingCase(case_name(place, loss), sparse_seconds > OVERHEAD * seconds, why, "cost")
        if (case := _sampled_is_faster(points, place, softmax)) is not None:
            sampled_cases.append(case)
    if sampled_cases:  # the paper says "sometimes": one place is enough
        supports = any(case.supports for case in sampled_cases)
        why = "; ".join(f"{case.name}: {case.why}" for case in sampled_cases)
        yield FindingCase("sampling is faster somewhere", supports, why, "speed")


def _sampled_is_faster(points: PointSet, place: tuple[str, str], softmax: Point) -> FindingCase | None:
    """Whether a sampled loss reaches a competitive value in fewer seconds; None where that cannot be compared."""
    goal = COMPETITIVE**softmax.sign * softmax.selected
    softmax_time = _arrives(softmax, "seconds_train", goal)
    sampled = [points.best(place, loss) for loss in SAMPLED]
    if softmax_time is None or not any(sampled):
        return None
    times = [_arrives(point, "seconds_train", goal) for point in sampled]
    fastest = min((time for time in times if time is not None), default=None)
    why = f"{COMPETITIVE:.0%} of softmax's best after {softmax_time:.1f} s with softmax, "
    why += "never with sampling" if fastest is None else f"{fastest:.1f} s with sampling"
    return FindingCase(case_name(place, "sampled"), fastest is not None and fastest < softmax_time, why)


def _arrives(point: Point | None, column: str, goal: float | None = None) -> float | None:
    """When the curve of a point reaches the goal, in the unit of `column`; None without a curve, or if never."""
    return None if point is None or point.trial is None else arrival(point.trial, point.metric, column, goal)


def _epoch_seconds(point: Point | None) -> float | None:
    return None if point is None or point.trial is None else epoch_seconds(point.trial)
