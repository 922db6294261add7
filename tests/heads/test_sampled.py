"""Sampled heads against the plain sampled losses on the scores of the same draw."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import manymax
from manymax.members.nce.loss import nce_loss
from manymax.members.sampled_softmax.loss import sampled_softmax_loss
from manymax.samplers import SAMPLERS, Draw, Sampler
from tests.heads.plain import Problem, agree, class_weights, make_problem, make_target, upstream

C, ROWS, NEGATIVES = 40, 9, 3
PLAIN = {"sampled_softmax": sampled_softmax_loss, "nce": nce_loss}
LOSSES = sorted(PLAIN)
COUNTS = 1.0 + torch.arange(C) % 7
SAMPLER_CASES = [
    pytest.param(lambda entry=entry, options=options: entry.make(C, COUNTS, **options), id=f"{entry.name}-{i}")
    for entry in SAMPLERS.values()
    for i, options in enumerate(entry.examples)
]


def head(
    loss: str, problem: Problem, target: Any, sampler: Sampler, k: int | None = NEGATIVES, **options: Any
) -> Tensor:
    """The head with a fresh generator and a sampler that remembers nothing of earlier calls."""
    return getattr(manymax, f"linear_{loss}_loss")(
        problem.input,
        problem.linear_weight,
        target,
        copy.deepcopy(sampler),
        k,
        linear_bias=problem.linear_bias,
        generator=torch.Generator().manual_seed(5),
        **options,
    )


def positives(target: Tensor) -> tuple[Tensor, Tensor]:
    """The row and the class of every positive of a target, row after row; from ids, padded ids or bool rows."""
    pairs = []
    for row, listed in enumerate(target.reshape(ROWS, -1)):
        ids = listed.nonzero().flatten() if target.dtype == torch.bool else listed[listed != -100].unique()
        pairs += [(row, int(c)) for c in ids]
    rows, classes = zip(*pairs, strict=True)
    return torch.tensor(rows), torch.tensor(classes)


def same_draw(problem: Problem, target: Tensor, sampler: Sampler, k: int | None, shared: bool) -> Draw:
    """The draw that the head makes: one call for all positives, row after row."""
    rows, classes = positives(target)
    return copy.deepcopy(sampler)(
        k,
        target=classes,
        owner=rows,
        input=problem.input.detach()[rows],
        linear_weight=problem.linear_weight.detach(),
        linear_bias=None if problem.linear_bias is None else problem.linear_bias.detach(),
        shared=shared,
        generator=torch.Generator().manual_seed(5),
    )


def slow_reference(
    loss: str, problem: Problem, target: Tensor, draw: Draw, weight: Tensor | None = None, **options: Any
) -> Tensor:
    """Slow reference: the losses of the rows (N,), from the full table of scores and one positive at a time."""
    rows, classes = positives(target)
    scores = problem.scores()
    losses = [torch.zeros((), dtype=scores.dtype) for _ in range(ROWS)]
    for i, (row, c) in enumerate(zip(rows.tolist(), classes.tolist(), strict=True)):
        ids = draw.ids if draw.shared else draw.ids[i]
        # In-batch negatives: the positives of a query are not among its draws.
        source = draw.source_row if draw.shared or draw.source_row is None else draw.source_row[i]
        kept = torch.ones(len(ids), dtype=torch.bool) if source is None else source != row
        if draw.log_q is None or draw.log_q_target is None:
            log_q_positive = torch.tensor(-math.log(C), dtype=torch.float64)
            log_q = log_q_positive.expand(len(ids))
        else:
            log_q, log_q_positive = draw.log_q if draw.shared else draw.log_q[i], draw.log_q_target[i]
        if loss == "nce":  # the head's default is the log partition of scores that are all 0
            options.setdefault("log_z", math.log(C))
        value = PLAIN[loss](
            scores[row, c],
            scores[row, ids[kept]],
            log_q_positive=log_q_positive,
            log_q_negative=log_q[kept],
            hits=ids[kept] == c,
            **options,
        )
        losses[row] = losses[row] + (1 if weight is None else weight[c]) * value
    return torch.stack(losses)


def gradients(value: Tensor, problem: Problem, *extra: Tensor) -> list[Tensor]:
    grads = torch.autograd.grad(value, [*problem.parts(), *extra], upstream(value))
    return [value.detach(), *(grad.to_dense() for grad in grads)]


# Every sampler -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True], ids=["per row", "shared"])
@pytest.mark.parametrize("make", SAMPLER_CASES)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_sampler(loss: str, make: Callable[[], Sampler], shared: bool) -> None:
    """Ids, several positives, ignored rows; dense and row-sparse gradients."""
    sampler = make()
    for kind, bias, sparse in (
        ("ids", False, False),
        ("ids", True, True),
        ("padded ids", True, True),
        ("bool rows", True, False),
    ):
        problem, target = (
            make_problem(ROWS, num_classes=C, regime="near", bias=bias),
            make_target(kind, ROWS, num_classes=C),
        )
        draw = same_draw(problem, target, sampler, NEGATIVES, shared)
        assert draw.shared == shared
        ours, theirs = problem.leaves(), problem.leaves()
        value = head(loss, ours, target, sampler, shared=shared, sparse_grad=sparse, reduction="none")
        agree(
            gradients(value, ours), gradients(slow_reference(loss, theirs, target, draw), theirs), 1e-10, (kind, sparse)
        )


@pytest.mark.parametrize("loss", LOSSES)
def test_the_whole_batch_as_negatives(loss: str) -> None:
    """The k' draws of a query are all positives but its own: NCE and the partition divide by k' q, not by k q."""
    sampler = manymax.samplers.InBatchSampler(C, counts=COUNTS)
    settings: list[dict[str, Any]] = [{"hit_policy": "keep"}, {"hit_policy": "mask"}]
    if loss == "sampled_softmax":
        settings += [{"correction": "partition"}, {"correction": "none"}]
    for kind, setting in itertools.product(("ids", "padded ids"), settings):
        problem, target = (
            make_problem(ROWS, num_classes=C, regime="near").leaves(),
            make_target(kind, ROWS, num_classes=C),
        )
        draw = same_draw(problem, target, sampler, None, shared=False)
        assert draw.source_row is not None
        value = head(loss, problem, target, sampler, None, reduction="none", **setting)
        expected = slow_reference(loss, problem, target, draw, **setting)
        agree(gradients(value, problem), gradients(expected, problem), 1e-10, (kind, setting))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_of_one_has_no_other_positive(loss: str) -> None:
    problem = make_problem(1, num_classes=C)
    value = head(loss, problem, torch.tensor([3]), manymax.samplers.InBatchSampler(C, counts=COUNTS), None)
    assert value.isfinite()


def test_a_sampler_without_log_q() -> None:
    """A uniform log q is used, which cancels in sampled softmax; the partition correction needs a true one."""
    problem, target = make_problem(ROWS, num_classes=C), make_target("ids", ROWS, num_classes=C)
    sampler = manymax.samplers.DNSSampler(C, num_candidates=20)
    corrected = head("sampled_softmax", problem, target, sampler)
    assert torch.equal(corrected, head("sampled_softmax", problem, target, sampler, correction="none"))
    with pytest.raises(manymax.ArgumentError, match=r"'partition'` needs log q.*log q is unknown"):
        head("sampled_softmax", problem, target, sampler, correction="partition")


# Options -----------------------------------------------------------------------------------------


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("sampled_softmax", {"correction": "logq", "hit_policy": "mask"}),
    ("sampled_softmax", {"correction": "none"}),
    ("sampled_softmax", {"correction": "partition"}),
    ("sampled_softmax", {"correction": "partition", "hit_policy": "keep"}),
    ("sampled_softmax", {"correction": "partition", "debias": "delta"}),
    ("sampled_softmax", {"correction": "partition", "debias": "jackknife"}),
    ("nce", {"log_z": 1.5}),
    ("nce", {"log_z": torch.tensor(-0.5), "hit_policy": "mask"}),
]


@pytest.mark.parametrize("shared", [False, True], ids=["per row", "shared"])
@pytest.mark.parametrize(("loss", "setting"), SETTINGS, ids=lambda value: str(value))
def test_settings_of_the_plain_loss(loss: str, setting: dict[str, Any], shared: bool) -> None:
    sampler = manymax.samplers.LogUniformSampler(C)  # its draws hit the first classes often
    problem, target = make_problem(ROWS, num_classes=C, regime="near").leaves(), torch.arange(ROWS) % 3
    draw = same_draw(problem, target, sampler, 12, shared)
    assert draw.hits(target).any()
    value = head(loss, problem, target, sampler, 12, shared=shared, reduction="none", **setting)
    agree(gradients(value, problem), gradients(slow_reference(loss, problem, target, draw, **setting), problem), 1e-10)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("multilabel", ["sum", "normalized"])
@pytest.mark.parametrize("loss", LOSSES)
def test_weights_and_reductions(loss: str, multilabel: str, reduction: str) -> None:
    sampler = manymax.samplers.UniformSampler(C)
    problem, target = make_problem(ROWS, num_classes=C).leaves(), make_target("padded ids", ROWS, num_classes=C)
    weight = class_weights(C)
    weight[1] = 1.0  # a positive without weight draws nothing; the test below has one
    rows, classes = positives(target)
    total = torch.zeros(ROWS, dtype=torch.float64).index_add_(0, rows, weight[classes])
    expected = slow_reference(loss, problem, target, same_draw(problem, target, sampler, NEGATIVES, False), weight)
    divisor = total
    if multilabel == "normalized":
        expected, divisor = expected / torch.where(total > 0, total, 1), (total > 0).double()
    if reduction != "none":
        expected = expected.sum() / (divisor.sum() if reduction == "mean" else 1)
    value = head(loss, problem, target, sampler, weight=weight, multilabel=multilabel, reduction=reduction)
    agree(gradients(value, problem), gradients(expected, problem), 1e-10)


@pytest.mark.parametrize("loss", LOSSES)
def test_ignored_positives_draw_nothing(loss: str) -> None:
    """Ignored rows and positives of weight 0 draw nothing: the batch without them has the same draws and loss."""
    sampler, problem = manymax.samplers.UniformSampler(C), make_problem(ROWS, num_classes=C)
    target = make_target("ids", ROWS, num_classes=C)
    target[2] = 1  # the class without weight
    live = (target != -100) & (target != 1)
    assert 2 < live.sum() < ROWS - 1
    full = head(loss, problem, target, sampler, weight=class_weights(C))
    kept = Problem(problem.input[live], problem.linear_weight, problem.linear_bias)
    agree([full], [head(loss, kept, target[live], sampler, weight=class_weights(C))], 1e-14)
    moved = torch.where(target == -100, -1, target)
    assert torch.equal(full, head(loss, problem, moved, sampler, weight=class_weights(C), ignore_index=-1))


def test_batch_dimensions() -> None:
    sampler, problem = manymax.samplers.UniformSampler(C), make_problem(2, 3, num_classes=C)
    flat = Problem(problem.input.reshape(6, -1), problem.linear_weight, problem.linear_bias)
    for loss, kind in itertools.product(LOSSES, ("ids", "padded ids", "bool rows")):
        target = make_target(kind, 2, 3, num_classes=C)
        rows = head(loss, problem, target, sampler, reduction="none")
        assert rows.shape == (2, 3)
        assert torch.equal(rows.flatten(), head(loss, flat, target.flatten(0, 1), sampler, reduction="none"))
        one = Problem(problem.input[0, 0], problem.linear_weight, problem.linear_bias)
        assert head(loss, one, torch.tensor(5), sampler, reduction="none").shape == ()


def test_learnable_log_z() -> None:
    sampler = manymax.samplers.UniformSampler(C)
    problem, target = make_problem(ROWS, num_classes=C).leaves(), make_target("padded ids", ROWS, num_classes=C)
    log_z = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    value = head("nce", problem, target, sampler, log_z=log_z, reduction="none")
    draw = same_draw(problem, target, sampler, NEGATIVES, False)
    expected = slow_reference("nce", problem, target, draw, log_z=log_z)
    agree(gradients(value, problem, log_z), gradients(expected, problem, log_z), 1e-10)
    module = manymax.LinearNCELoss(6, C, log_z=0.7, learnable=True)
    module(problem.input.detach().float(), target).backward()
    assert module.log_z.grad is not None
    assert module.log_z.grad != 0
    for shared in (False, True):  # a batch without positives gives it a gradient too, as to every other parameter
        module = manymax.LinearNCELoss(6, C, learnable=True, shared=shared)
        module(torch.zeros(2, 6), torch.full((2,), -100)).backward()
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in module.parameters())


# Gradients of the touched rows -------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True], ids=["per row", "shared"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_sparse_gradient_has_the_drawn_rows_and_the_positives(loss: str, shared: bool) -> None:
    sampler = manymax.samplers.UniformSampler(C)
    problem, target = make_problem(ROWS, num_classes=C).leaves(), make_target("padded ids", ROWS, num_classes=C)
    draw = same_draw(problem, target, sampler, 2, shared)
    value = head(loss, problem, target, sampler, 2, shared=shared, sparse_grad=True)
    grads = torch.autograd.grad(value, [problem.linear_weight, problem.linear_bias])
    for grad in grads:
        assert grad.is_sparse
        touched = grad.coalesce().indices()[0]
        assert touched.tolist() == sorted({*draw.ids.flatten().tolist(), *positives(target)[1].tolist()})
        assert len(touched) < C
    dense = head(loss, problem, target, sampler, 2, shared=shared)
    expected = torch.autograd.grad(dense, [problem.linear_weight, problem.linear_bias])
    agree([grad.to_dense() for grad in grads], list(expected), 1e-10)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("shared", [False, True], ids=["per row", "shared"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_sparse_optimizer_takes_the_gradients_even_of_nothing(loss: str, shared: bool, reduction: str) -> None:
    sampler = manymax.samplers.UniformSampler(C)
    weight, bias = torch.nn.Parameter(torch.ones(C, 6)), torch.nn.Parameter(torch.zeros(C))
    optimizer = torch.optim.SparseAdam([weight, bias])
    problem = Problem(make_problem(ROWS, num_classes=C).input.float(), weight, bias)
    for target in (torch.arange(ROWS), torch.full((ROWS,), -100)):
        optimizer.zero_grad()
        before = weight.detach().clone(), bias.detach().clone()
        value = head(loss, problem, target, sampler, shared=shared, reduction=reduction, sparse_grad=True)
        value.sum().backward()
        optimizer.step()
        assert torch.equal(weight, before[0]) == torch.equal(bias, before[1]) == bool((target == -100).all())


@pytest.mark.parametrize("shared", [False, True], ids=["per row", "shared"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_sparse_gradient_in_half_precision(loss: str, shared: bool) -> None:
    sampler = manymax.samplers.UniformSampler(C)
    problem, target = make_problem(ROWS, num_classes=C).leaves(torch.bfloat16), torch.arange(ROWS)
    leaves = [problem.linear_weight, problem.linear_bias]
    sparse, dense = (
        torch.autograd.grad(head(loss, problem, target, sampler, shared=shared, sparse_grad=sparse), leaves)
        for sparse in (True, False)
    )
    for ours, theirs in zip(sparse, dense, strict=True):
        assert ours.is_sparse
        assert ours.dtype == torch.bfloat16
        agree([ours.to_dense()], [theirs], 2.0**-8)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_to_learn_from_gives_zero(loss: str, shared: bool, sparse: bool) -> None:
    sampler = manymax.samplers.UniformSampler(C)
    for rows, reduction in itertools.product((0, ROWS), ("none", "mean", "sum")):
        problem, target = make_problem(rows, num_classes=C).leaves(), torch.full((rows,), -100)
        value = head(loss, problem, target, sampler, shared=shared, sparse_grad=sparse, reduction=reduction)
        assert all((result == 0).all() for result in gradients(value, problem))
        assert value.shape == ((rows,) if reduction == "none" else ())


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_by_differences(loss: str) -> None:
    problem, target = make_problem(3, num_classes=6).leaves(), torch.tensor([[0, 4], [2, -100], [5, 1]])
    sampler = manymax.samplers.UniformSampler(6)
    for shared in (False, True):
        assert torch.autograd.gradcheck(
            lambda *parts, shared=shared: head(loss, Problem(*parts), target, sampler, shared=shared, reduction="none"),
            problem.parts(),
            fast_mode=True,
        )


@pytest.mark.parametrize("loss", LOSSES)
def test_masked_classes(loss: str) -> None:
    """A drawn class whose bias is -inf adds nothing and has no gradient; a masked positive is refused."""
    problem, target = make_problem(ROWS, num_classes=C, masked=True).leaves(), make_target("ids", ROWS, num_classes=C)
    sampler = manymax.samplers.UniformSampler(C)
    value = head(loss, problem, target, sampler, 20)
    results = gradients(value, problem)
    assert all(result.isfinite().all() for result in results)
    assert (results[2][3::5] == 0).all()
    assert (results[3][3::5] == 0).all()
    with pytest.raises(manymax.ArgumentError, match="masked class cannot be a positive"):
        head(loss, problem, torch.full((ROWS,), 3), sampler)


# Errors ------------------------------------------------------------------------------------------


def test_settings_that_do_not_go_together_are_refused_when_a_head_is_built() -> None:
    with pytest.raises(manymax.ArgumentError, match="`num_negatives` must be at least 2 for `debias='jackknife'`"):
        manymax.LinearSampledSoftmaxLoss(None, 3, None, 1, correction="partition", debias="jackknife")
    with pytest.raises(manymax.ArgumentError, match="`debias` is for `correction='partition'`"):
        manymax.LinearSampledSoftmaxLoss(None, 3, debias="jackknife")


@pytest.mark.parametrize("loss", LOSSES)
def test_errors(loss: str) -> None:
    problem, target = make_problem(ROWS, num_classes=C), make_target("ids", ROWS, num_classes=C)
    sampler = manymax.samplers.UniformSampler(C)
    with pytest.raises(manymax.ArgumentError, match=rf"`sampler` draws from 7 classes, `linear_weight` has {C}"):
        head(loss, problem, target, manymax.samplers.UniformSampler(7))
    with pytest.raises(manymax.ArgumentTypeError, match=r"`sampler` must be one of manymax.samplers; got 'uniform'"):
        head(loss, problem, target, "uniform")  # type: ignore[arg-type]
    message = rf"`target` of {loss} must be ids or bool rows; .* one draw per positive"
    with pytest.raises(manymax.ArgumentTypeError, match=message):
        head(loss, problem, make_target("float rows", ROWS, num_classes=C), sampler)
    with pytest.raises(manymax.ArgumentError, match=r"`hit_policy` must be one of .* Did you mean 'mask'"):
        head(loss, problem, target, sampler, hit_policy="maks")
    with pytest.raises(manymax.ArgumentError, match=r"`reduction` must be one of .* Did you mean 'mean'"):
        head(loss, problem, target, sampler, reduction="meen")
    with pytest.raises(manymax.ArgumentError, match=r"`multilabel` must be one of"):
        head(loss, problem, target, sampler, multilabel="both")
    with pytest.raises(manymax.ArgumentError, match=r"`num_negatives` must be an integer >= 1; got 0"):
        head(loss, problem, target, sampler, 0)
    with pytest.raises(manymax.ArgumentError, match=rf"`target` ids must be in \[0, {C}\)"):
        head(loss, problem, target + C, sampler)
