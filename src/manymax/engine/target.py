"""Reading targets in all their forms, and the loss of a row from single-label losses; once for all members.

A member has single-label losses l(i, s). A target gives every class a weight t_i, and the loss of
a row is sum_i t_i l(i, s):

    integer ids (...)        t = e_y
    integer ids (..., P)     t = sum of e_y over the set of ids; `ignore_index` pads
    bool rows (..., C)       t = the 0/1 row
    float rows (..., C)      t = the row, which sums to 1

Label smoothing takes a share of the weight of every positive and spreads it evenly over the live
classes (those whose score is not -inf). Class weights multiply t. Both are as in
`torch.nn.functional.cross_entropy`.

With several positives, "sum" is the loss above, and "normalized" is the loss at t / |t|, |t| = sum_i t_i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from manymax.errors import ArgumentError, ArgumentTypeError, check_choice
from manymax.ops.checks import check_dense, learned, readable, visible
from manymax.ops.reduction import REDUCTIONS

# What the loss of a row with several positives is; see above. Every loss and head takes both.
MULTILABEL = ("sum", "normalized")


@dataclass(frozen=True)
class Target:
    """A target that has been read and checked: listed positives, or a weight for every class.

    ids: (..., P) classes of the positives, or None where `weights` covers all classes in order.
    weights: (..., P) or (..., C), the weight of each positive, class weights included; 0 where there is no positive.
    count: (...) the number of positives of each row, class weights not included, which label smoothing needs.
    divisor: (...) what each row adds to the denominator of a mean.
    """

    ids: Tensor | None
    weights: Tensor
    count: Tensor
    divisor: Tensor

    def pick(self, values: Tensor, offset: Tensor | float = 0.0) -> Tensor:
        """sum_i weights_i (values_i - offset), (...), where values is (..., C) and offset (..., 1)."""
        if self.ids is not None:
            values = values.gather(-1, self.ids)
        # Only where there is a weight: 0 x (-inf), of a masked class or of padding that points at one, would be nan.
        difference, counts = values - offset, self.weights != 0
        if learned(self.weights):  # the gradient in a weight of 0 is its value, unless its class is masked
            counts = counts | difference.isfinite()
        return (self.weights * torch.where(counts, difference, 0)).sum(-1)

    def dense(self, num_classes: int) -> Tensor:
        """The weights over all classes, (..., C)."""
        if self.ids is None:
            return self.weights
        # Added and not assigned: padding points at class 0 with weight 0, which may be a positive as well.
        return self.weights.new_zeros(*self.ids.shape[:-1], num_classes).scatter_add(-1, self.ids, self.weights)


class SoftTarget(NamedTuple):
    """Some classes of each row with their probabilities, such as the k best of a teacher: t_i = probs_i.

    The loss of a row is sum_i t_i l(i, s), as for float rows over all classes. The probabilities need not sum to 1:
    what a teacher gives to other classes may be left out.

    ids: (..., P) classes; `ignore_index` pads.
    probs: (..., P), at least 0; what stands beside padding is not looked at.

    Example:
        >>> import torch, manymax
        >>> target = manymax.SoftTarget(torch.tensor([[2, 0]]), torch.tensor([[0.7, 0.2]]))
        >>> manymax.softmax_loss(torch.zeros(1, 3), target)
        tensor(0.9888)
    """

    ids: Tensor
    probs: Tensor


class Form(NamedTuple):
    """The shape (..., C), dtype and device of scores: all that reading a target needs to know of them.

    A head has no tensor of all scores, and gives this instead. The rows have the shape `shape[:-1]` and C is
    `shape[-1]`; there is no property for either, because torch.compile of torch 2.6 does not look into those of tuples.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, scores: Tensor) -> Form:
        """The form of a tensor of scores."""
        return cls(tuple(scores.shape), scores.dtype, scores.device)


def check_options(reduction: str, label_smoothing: float, multilabel: str) -> None:
    """Raise on an unknown reduction or multilabel mode, or a smoothing outside [0, 1]."""
    check_choice("reduction", reduction, REDUCTIONS)
    check_choice("multilabel", multilabel, MULTILABEL)
    if isinstance(label_smoothing, bool) or not isinstance(label_smoothing, (int, float)):
        raise ArgumentTypeError(f"`label_smoothing` must be a number; got {type(label_smoothing).__name__}.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ArgumentError(f"`label_smoothing` must be in [0, 1]; got {label_smoothing}.")


def read_target(
    form: Form,
    target: Tensor | Target | SoftTarget,
    weight: Tensor | None,
    ignore_index: int | None,
    multilabel: str = "sum",
) -> Target:
    """Check a target against scores of shape (..., C) and bring it into one form.

    Args:
        form: of the scores.
        target: ids (...), padded ids (..., P), bool or float rows (..., C), a `SoftTarget`, or a `Target` that
            `group_pairs` returned.
        weight: (C,) class weights, or None.
        ignore_index: the id that is no positive; None for -100.
        multilabel: "sum" or "normalized", which decides about the divisor of a mean.
    """
    if isinstance(target, Target):
        return _read_grouped(form, target, _read_weight(form, weight, multilabel), multilabel)
    ignored = -100 if ignore_index is None else ignore_index  # torch's linear_cross_entropy takes None too
    if not isinstance(ignored, int):
        raise ArgumentTypeError(f"`ignore_index` must be an integer or None; got {type(ignored).__name__}.")
    if isinstance(target, SoftTarget):
        return _read_soft(form, target, _read_weight(form, weight, multilabel), ignored)
    if not isinstance(target, Tensor):
        raise ArgumentTypeError(f"`target` must be a tensor; got {type(target).__name__}.")
    check_dense("target", target)
    # The dtype decides about the form: bool and float rows have a number for each class, integers are ids.
    rowwise = target.dtype == torch.bool or target.is_floating_point()
    _check_shape(form, target, rowwise)
    class_weight = _read_weight(form, weight, multilabel)
    if ignored >= 0 and target.is_floating_point():  # as torch: it would do nothing, and say nothing
        raise ArgumentError(
            f"`ignore_index` must be negative where `target` has float rows, which have no ids; got {ignored}."
            " To leave a row out make it zero."
        )
    if rowwise:
        return _read_rows(form, target, class_weight, multilabel)
    return _read_ids(form, target, class_weight, ignored, multilabel)


def _read_grouped(form: Form, target: Target, weight: Tensor | None, multilabel: str) -> Target:
    """A target that `group_pairs` made: checked against the scores, in their dtype, with the class weights."""
    if target.ids is None or tuple(target.ids.shape[:-1]) != form.shape[:-1]:
        raise ArgumentError("`target` was grouped for another number of rows than `input` has.")
    ids, classes = target.ids, form.shape[-1]
    # Class weights and scores are gathered by these ids, which would fail with an error that names no argument.
    if visible(ids) and ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= classes):
        raise ArgumentError(f"`target` ids must be in [0, {classes}); got {int(ids.min())} to {int(ids.max())}.")
    weights = target.weights.to(form.dtype)
    if weight is not None:
        weights = weights * weight[ids]
    # A mean of "sum" is over the positives, weighted as in torch; one of "normalized" is over the rows that have any.
    divisor = weights.sum(-1) if multilabel == "sum" else (target.count > 0).to(form.dtype)
    return Target(ids, weights, target.count.to(form.dtype), divisor)


def _read_soft(form: Form, target: SoftTarget, weight: Tensor | None, ignore_index: int) -> Target:
    """A target of some classes with their probabilities. A class that is listed twice has the sum of both."""
    ids, probs = target
    if (
        not (isinstance(ids, Tensor) and isinstance(probs, Tensor))
        or ids.is_floating_point()
        or ids.dtype == torch.bool
    ):
        raise ArgumentTypeError("`target.ids` must be a tensor of integer ids, and `target.probs` one of floats.")
    if not probs.is_floating_point():
        raise ArgumentTypeError(f"`target.probs` must be a float tensor; got {probs.dtype}.")
    if ids.shape != probs.shape or ids.shape[:-1] != form.shape[:-1] or ids.ndim != len(form.shape):
        expected = (*form.shape[:-1], "P")
        raise ArgumentError(
            f"`target.ids` and `target.probs` must both be {expected}; got {tuple(ids.shape)} and {tuple(probs.shape)}."
        )
    listed = ids != ignore_index
    _check_range(ids, listed, form.shape[-1], ignore_index)
    weights = torch.where(listed, probs.to(form.dtype), 0)
    # Written so that nan is wrong: every comparison with it is False.
    if visible(weights) and not (weights.isfinite() & (weights >= 0)).all():
        raise ArgumentError("`target.probs` must be finite and not negative; got another number.")
    ids = torch.where(listed, ids.long(), 0)
    # Like a float row: it counts as one positive, and a mean divides by the rows.
    present = (weights.sum(-1) > 0).to(form.dtype)
    return Target(ids, weights if weight is None else weights * weight[ids], present, present)


def check_weight(weight: Tensor | None, num_classes: int | None) -> Tensor | None:
    """The class weights as they are; raises unless they are None or finite floats (num_classes,), or (C,) for None."""
    if weight is None:
        return None
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        kind = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise ArgumentTypeError(f"`weight` must be a float tensor of one weight per class; got {kind}.")
    check_dense("weight", weight)
    if num_classes is not None and weight.shape != (num_classes,):
        raise ArgumentError(f"`weight` must have shape ({num_classes},); got {tuple(weight.shape)}.")
    if weight.ndim != 1 or not len(weight):
        raise ArgumentError(f"`weight` must have one number for each class, (C,); got shape {tuple(weight.shape)}.")
    if visible(weight) and not weight.isfinite().all():  # every loss and gradient with one would be nan
        raise ArgumentError(
            f"`weight` must hold finite numbers; got {weight[~weight.isfinite()][0].item()}. A class of weight 0 does"
            " not count."
        )
    return weight


def negative_weights(weight: Tensor | None) -> bool:
    """Whether some class weight is known to be negative."""
    return weight is not None and readable(weight) and bool((weight < 0).any())


def _read_weight(form: Form, weight: Tensor | None, multilabel: str) -> Tensor | None:
    """The class weights, checked, in the dtype of the arithmetic."""
    checked = check_weight(weight, form.shape[-1])
    if multilabel == "normalized" and negative_weights(checked):
        raise ArgumentError(
            '`weight` must not be negative with `multilabel="normalized"`: t / |t| is no distribution then. Take "sum".'
        )
    return None if checked is None else checked.to(form.dtype)


def _check_shape(form: Form, target: Tensor, rowwise: bool) -> None:
    """Raise unless the shape of a target fits: rows (..., C), or ids (...) or (..., P)."""
    batch, shape = form.shape[:-1], tuple(target.shape)
    if rowwise:
        fits, expected = shape == form.shape, f"the shape of `scores`, {form.shape}"
    else:
        fits = shape == batch or (len(shape) == len(form.shape) and shape[:-1] == batch)
        expected = f"{batch} for one id per row, or {(*batch, 'P')} for several"
    if fits:
        return
    hint = ""
    # torch.nn.functional.cross_entropy wants scores (N, C, ...) and ids (N, ...): the likely reason for such shapes.
    if len(form.shape) > 2 and shape == form.shape[:1] + form.shape[2:]:
        hint = (
            " The shape fits torch's layout with the classes in dimension 1; here they are last:"
            " pass `scores.movedim(1, -1)`."
        )
    kind = f"of dtype {target.dtype} "
    raise ArgumentError(f"`target` {kind}must have {expected}; got shape {shape}.{hint}")


def _read_rows(form: Form, target: Tensor, weight: Tensor | None, multilabel: str) -> Target:
    """The target of bool or float rows (..., C)."""
    rows = target.to(form.dtype)
    total = rows.sum(-1)
    if target.is_floating_point():
        _check_distribution(rows, total, target.dtype)
    weights = rows if weight is None else rows * weight
    present = (total > 0).to(form.dtype)
    if target.is_floating_point():
        # A distribution counts as one positive, and a mean divides by the rows, not by class weights; as in torch.
        return Target(None, weights, present, present)
    return Target(None, weights, total, weights.sum(-1) if multilabel == "sum" else present)


def _check_distribution(rows: Tensor, total: Tensor, dtype: torch.dtype) -> None:
    """Raise unless float rows are non-negative and sum to 1, or to 0."""
    if not visible(total):
        return
    # The sum of C rounded entries is not exactly 1; rows in half precision are as good as their rounding.
    slack = max(1e-3, 8 * torch.finfo(dtype).eps)
    # Written so that nan is wrong: every comparison with it is False.
    wrong = ~(((total - 1).abs() <= slack) | (total == 0)) | (rows < 0).any(-1)
    if wrong.any():
        raise ArgumentError(
            "`target` as float rows must be non-negative and sum to 1 (or to 0, for a row without a positive); got a"
            f" row with sum {total[wrong][0].item():.6g} and smallest entry {rows[wrong][0].min().item():.6g}. Pass"
            " several positives as bool rows or as padded ids."
        )


def _read_ids(form: Form, target: Tensor, weight: Tensor | None, ignore_index: int, multilabel: str) -> Target:
    """The target of ids (...), one per row, or (..., P), several with padding."""
    ids = target.long()
    if tuple(target.shape) == (*form.shape[:-1], 0):  # no column at all: the same as one of padding
        ids = ids.new_full((*form.shape[:-1], 1), ignore_index)
    if target.ndim == len(form.shape):
        _check_not_many_hot(form, target)
        ids = ids.sort(-1).values  # several ids are a set: repeated ones count once, and are neighbours now
        # The first of a run of equal ids stays.
        repeated = torch.cat([torch.zeros_like(ids[..., :1], dtype=torch.bool), ids[..., 1:] == ids[..., :-1]], -1)
        positive = (ids != ignore_index) & ~repeated
    else:
        ids = ids.unsqueeze(-1)  # one id per row is a list of one: P = 1 from here on
        positive = ids != ignore_index
    _check_range(ids, positive, form.shape[-1], ignore_index)
    # -100 cannot be gathered: what is no positive becomes class 0 with weight 0, whatever its score is.
    ids = torch.where(positive, ids, 0)
    ones = positive.to(form.dtype)
    weights = ones if weight is None else ones * weight[ids]
    count = ones.sum(-1)
    return Target(ids, weights, count, weights.sum(-1) if multilabel == "sum" else (count > 0).to(form.dtype))


def _check_not_many_hot(form: Form, target: Tensor) -> None:
    """Refuse integer rows of C zeros and ones: a many-hot row with the wrong dtype, not C ids.

    Read as ids they would silently mean the classes 0 and 1. With two classes that can be meant: a column more says so.
    """
    # Only where the shape is that of the scores; a check of all values, so that a single id of 2 or more decides.
    if tuple(target.shape) != form.shape or form.shape[-1] < 2 or not target.numel() or not visible(target):
        return
    if bool(((target == 0) | (target == 1)).all()):
        raise ArgumentTypeError(
            f"`target` of dtype {target.dtype} and the shape of `scores` holds only 0 and 1: a many-hot row must be"
            " bool. Pass `target.bool()`; if these are ids, say so by a column of padding,"
            " `torch.nn.functional.pad(target, (0, 1), value=-100)`."
        )


def _check_range(ids: Tensor, positive: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raise if the id of a positive is no class."""
    if not visible(ids):
        return
    outside = positive & ((ids < 0) | (ids >= num_classes))  # padding may be any number
    if outside.any():
        raise ArgumentError(
            f"`target` ids must be in [0, {num_classes}) or equal `ignore_index` ({ignore_index});"
            f" got {ids[outside][0].item()}."
        )


def check_positives(inner: Tensor) -> None:
    """Raise if sum_i t_i s_i, (...), is infinite, which shows that a positive is masked."""
    # One number per row tells: no pass over all scores.
    if visible(inner) and (inner.abs() == torch.inf).any():
        raise ArgumentError(
            "`target` names a class whose score is -inf (or so far below the largest one that no number holds their"
            " difference): a masked class cannot be a positive."
        )


def row_losses(
    partition: Tensor,
    values: Tensor,
    target: Target,
    weight: Tensor | None,
    label_smoothing: float,
    offset: Tensor | float = 0.0,
) -> tuple[Tensor, Tensor]:
    """sum_i t_i l(i, s) for losses of the form l(i, s) = partition - (values_i - offset).

    Args:
        partition: (...) the part of l(i, s) that does not depend on i.
        values: (..., C), the part that does; -inf at masked classes.
        target, weight, label_smoothing: as read.
        offset: (..., 1), subtracted from every value before they are summed, for example the row maximum. Scores
            around 10^6 have no digits left for the loss in float32; their differences have.

    Returns:
        The losses and the total weights sum_i t_i, both (...).
    """
    total, inner = target.weights.sum(-1), target.pick(values, offset)
    check_positives(inner)
    if label_smoothing > 0:
        spread = _smoothing_weights(values, target, weight, label_smoothing)
        # Masked classes have no share: `where` keeps 0 x -inf, which is nan, out of the sum.
        inner = (1 - label_smoothing) * inner + (spread * torch.where(values > -torch.inf, values - offset, 0)).sum(-1)
        total = (1 - label_smoothing) * total + spread.sum(-1)
    # sum_i t_i (partition - values_i), with the sum over i taken first.
    return total * partition - inner, total


def normalized_weights(values: Tensor, target: Target, weight: Tensor | None, label_smoothing: float) -> Tensor:
    """t / |t|: (..., P) over the listed classes, or (..., C) over all of them if smoothing gives each a weight."""
    weights = target.weights
    if label_smoothing > 0:  # only then are all classes needed
        weights = (1 - label_smoothing) * target.dense(values.shape[-1])
        weights = weights + _smoothing_weights(values, target, weight, label_smoothing)
    total = weights.sum(-1, keepdim=True)
    # A row without a positive stays 0; its loss is set to 0 by the caller.
    return weights / torch.where(total > 0, total, 1)


def _smoothing_weights(values: Tensor, target: Target, weight: Tensor | None, label_smoothing: float) -> Tensor:
    """What label smoothing adds to t, (..., C): for every positive an equal share to every live class."""
    # The share is divided by the number of live classes and not by C: a masked class has p = 0, and a weight on it
    # would make the loss infinite.
    live = (values > -torch.inf).to(target.weights.dtype)
    share = label_smoothing * target.count / live.sum(-1)
    return share.unsqueeze(-1) * (live if weight is None else live * weight.to(live.dtype))
