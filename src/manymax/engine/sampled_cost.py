"""What a training step costs with a loss that draws negatives, in the counts of engine/cost.py."""

from __future__ import annotations

from manymax.engine.cost import FLOAT, PER_STEP, Cost, CostOf, Shape, Traffic, TrafficOf, Way, Work, gather, written
from manymax.engine.drawn_blocks import CLOSED_FORM_SCORES, GRAPH_SCORES
from manymax.ops.selected_scores import table_is_cheaper

# For each score: a dozen tensors of the loss and of its gradient; or, where a kernel has a closed form for a block of
# shared negatives, one pass over the block.
PER_SCORE, PER_CLOSED_FORM_SCORE = Work(streamed=24, exponentials=2), Work(exponentials=1)
PER_DRAW = Work(sorted=1)  # for each class vector that is read by its id: drawing the id, sorting its gradients
PER_PLACE = Work(passes=60)  # for each number that is read or added at its own place of a table
CALLS = 200  # of drawing, sorting and summing, whatever the sizes are
GENERATOR = 5056  # bytes of the state of torch's CPU generator, which the first rank sends to the others


def sampled_cost(closed_form: bool = False) -> CostOf:
    """The cost of a loss on drawn scores, as a function of the sizes.

    Args:
        closed_form: whether its kernel has a closed form for a block of negatives that all rows share.
    """

    def cost(shape: Shape, way: Way, **settings: object) -> Cost:
        return _drawn_cost(shape, way, closed_form and shape.shared and way != "plain")

    return cost


def _drawn_cost(shape: Shape, way: Way, closed_form: bool) -> Cost:
    """The cost with one positive and k negatives for each pair of a query and a positive.

    Both back ends are counted alike: what takes the time, reading class vectors from random places of memory, takes the
    same in either.
    """
    # Class vectors that are read one by one. Shared negatives are read once for all pairs and multiplied as a matrix.
    own = shape.pairs if shape.shared else shape.pairs * (shape.num_negatives + 1)
    scores = shape.pairs * (shape.num_negatives + 1)
    rows = _distinct_vectors(shape, shape.num_negatives)
    work = scores * (PER_CLOSED_FORM_SCORE if closed_form else PER_SCORE) + own * PER_DRAW
    work += Work(calls=PER_STEP + CALLS) + _choosing(shape)
    held = 12 * scores
    if shape.shared and way != "plain":  # blocks of rows, in one table or in the dozen of a graph
        held = min(scores, CLOSED_FORM_SCORES) if closed_form else 12 * min(scores, GRAPH_SCORES)
    if way == "plain":  # autograd keeps the gathered vectors, and a gradient for each, which are never summed by class
        held += 2 * own * shape.dim
        work += gather(shape.num_classes, shape.dim, own) + written(own * shape.dim, 2)
        work += Work(flops=6 * scores * shape.dim)
    else:
        work += _shared_scores(shape, scores, rows) if shape.shared else _own_scores(shape, scores, rows)
        held += (rows if shape.sparse_grad else shape.num_classes) * shape.dim
    if way != "plain" and not shape.sparse_grad:
        work += written(shape.vectors)  # the gradient has a row for every class
    touched = _distinct_vectors(shape, max(shape.num_negatives, shape.num_candidates)) * shape.dim
    return Cost(work, 3 * (own * shape.dim + scores), touched, FLOAT * (held + shape.queries))


def _shared_scores(shape: Shape, scores: float, rows: float) -> Work:
    """The work of the scores of shared negatives and of their gradients: three products."""
    # Vectors are read once, and their gradients added to the distinct ones.
    read = gather(shape.num_classes, shape.dim, rows) + gather(shape.batch, shape.dim, rows)
    return read + written(rows * shape.dim) + Work(flops=6 * scores * shape.dim)


def _own_scores(shape: Shape, scores: float, rows: float) -> Work:
    """The work of the scores of negatives that each pair has for itself, and of their gradients."""
    by_table = table_is_cheaper(shape.batch, shape.num_classes, int(scores))
    if by_table and not shape.sparse_grad:  # three products with all class vectors, and a table for the last two
        products = Work(flops=6 * shape.table * shape.dim)
        return products + written(shape.table, 2) + 2 * scores * PER_PLACE
    # The gradient of a query reads its class vectors again; that of a class vector reads its queries, sorted. Both read
    # ahead, and take half of what torch takes to gather.
    work = 0.5 * (gather(shape.num_classes, shape.dim, scores) + gather(shape.batch, shape.dim, scores))
    return work + written(rows * shape.dim) + Work(flops=4 * scores * shape.dim) + _scoring(shape, scores)


def _distinct_vectors(shape: Shape, per_positive: int) -> float:
    """The number of different class vectors among positives and `per_positive` draws for each, at most."""
    drawn = per_positive if shape.shared else shape.pairs * per_positive
    return min(float(shape.num_classes), shape.pairs + drawn)


def _choosing(shape: Shape) -> Work:
    """The work of scoring M candidates for each positive and taking the best of them, without gradients."""
    scored = shape.pairs * shape.num_candidates
    work = Work(passes=10 * scored)  # a topk of each row
    if shape.shared:
        return work + Work(flops=2 * scored * shape.dim) + gather(shape.num_classes, shape.dim, shape.num_candidates)
    return work + _scoring(shape, scored)


def _scoring(shape: Shape, count: float) -> Work:
    """The work of `count` scores in all: from a table of all scores where that is cheaper, or one by one."""
    # The same rule as in the computation itself, so that the prediction follows its choice.
    if table_is_cheaper(shape.batch, shape.num_classes, int(count)):
        return Work(flops=2 * shape.table * shape.dim) + written(shape.table) + count * PER_PLACE
    return gather(shape.num_classes, shape.dim, count) + Work(flops=2 * count * shape.dim)


def sampled_traffic(sums: float, row: float) -> TrafficOf:
    """What a sampled member's ranks exchange: `sums` sums of `row` bytes per pair, and the scores of candidates."""

    def traffic(shape: Shape, ranks: int) -> Traffic:
        candidates = shape.num_candidates
        # The state of the generator is broadcast once per step, which sends half as many bytes as a sum.
        total = sums + (candidates > 0) + 0.5
        return Traffic(total, (row + candidates * FLOAT) * shape.pairs + GENERATOR / 2)

    return traffic
