"""One call of a head, from its arguments to its loss: what every head shares, on one rank or on many.

A call has two steps. Each rank reads and checks its arguments without talking to the others (`read_call`); the ranks
then agree that none of them refused, because a rank that raises in the middle of an exchange leaves the others waiting.
After that they compute the loss together: by `exact_loss`, `quadratic_loss`, or `sampled_loss` in engine/drawn.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manymax.engine.autograd import BlockLoss, BlockRows, in_dtype
from manymax.engine.blocks import Kernel
from manymax.engine.call_keywords import check_keywords, read_excluded, read_row_weight, scaled_queries, shifted
from manymax.engine.half import products_as_given
from manymax.engine.keywords import Keywords
from manymax.engine.list_bound import read_bound
from manymax.engine.member import Member
from manymax.engine.native_library import resolve
from manymax.engine.options import HeadOptions
from manymax.engine.pair_averages import read_pair_ids
from manymax.engine.placement import refuse_distributed
from manymax.engine.ranks import Shards
from manymax.engine.row_target import RowTarget, check_live, counted_rows, listed, live_classes, row_target
from manymax.engine.statistics import LossResult, missing_value
from manymax.engine.target import Form, SoftTarget, Target, negative_weights, read_target
from manymax.engine.triton_check import settle_back_end
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.checks import check_devices, refuse_transforms, working
from manymax.ops.processor import check_bf16
from manymax.ops.reduction import check_losses, mean_divisor, reduce


@dataclass(frozen=True)
class HeadCall:
    """One call of a head that has been read and checked on this rank.

    queries: (n, d), the rows flattened. vectors, bias: (classes of this rank, d) and (classes of this rank,). Queries
        and bias are in the dtype of the arithmetic, float32 at least; class vectors may be in their own.
    live: (classes of this rank,) which of them are not masked; None where all are known to be alive.
    target: over all classes, of all N rows of the caller; every rank has the whole of it.
    keywords: those that heads share.
    shards: which classes this rank holds.
    batch: the shape of the rows as the caller gave them, which a result of one loss per row gets again.
    divisor: what a mean divides by: (N,) numbers to be summed, or () one number.
    row_weight: (N,) factors of the losses of the rows, or None.
    excluded: (N, E) classes that are left out of the sums of their row, -100 where there is none; or None.
    hit: (N, P) the positives that are left out of the sums of others; None where there is none.
    bound: (N,) what the scores of each row are compared with, or None.
    kept: (n,) the rows of the caller that are computed, in order; None where n = N.
    pair_ids: (N, P) the number of the training pair of each listed positive; None where no averages are kept.
    receiver: (classes of this rank, d) in float32, what gets the gradient of class vectors in half precision in their
        place, before it is rounded; None where they get it.
    """

    queries: Tensor
    vectors: Tensor
    bias: Tensor | None
    live: Tensor | None
    target: Target
    keywords: Keywords
    shards: Shards
    batch: torch.Size
    divisor: Tensor
    row_weight: Tensor | None = None
    excluded: Tensor | None = None
    hit: Tensor | None = None
    bound: Tensor | None = None
    kept: Tensor | None = None
    pair_ids: Tensor | None = None
    receiver: Tensor | None = None

    def without_empty_rows(self) -> HeadCall:
        """The call without the rows that have no target weight, whose losses and gradients are 0.

        Half of the tokens of a language model may be padding, and most of a masked one's count for nothing: leaving
        them out here saves all that the blocks would do for them. What their queries hold, nan included, is never
        looked at.
        """
        kept = counted_rows(self.target, self.keywords.label_smoothing, self.row_weight)
        if kept is None:
            return self  # the usual case, for which nothing is copied
        # By autograd, which gives the rows that are left out a gradient of 0. All ranks have the same target, so that
        # all of them leave out the same rows.
        return replace(self, queries=self.queries.index_select(0, kept), kept=kept)

    def rows(self) -> RowTarget:
        """The target weights of the n rows, for the classes that this rank holds, with smoothing and class weights."""
        keywords = self.keywords
        rows = row_target(self.target, keywords.weight, self.live, self.shards, keywords.label_smoothing)
        rows = replace(rows, bound=self.bound)
        if self.excluded is not None:
            excluded = self.excluded
            if not self.shards.ranks.alone:  # no pass over long lists for nothing
                excluded = torch.where(self.shards.inside(excluded), excluded - self.shards.start, -1)
            rows = replace(rows, excluded=excluded, hit=self.hit)
        return rows if self.kept is None else rows.only(self.kept)

    def weighted_by_sign(self, sign: int) -> HeadCall:
        """The call with the absolute values of those class weights that have this sign, and 0 for the others."""
        weight = self.keywords.weight
        keywords = replace(self.keywords, weight=None if weight is None else (sign * weight).clamp(min=0))
        target = replace(self.target, weights=(sign * self.target.weights).clamp(min=0))
        return replace(self, keywords=keywords, target=target)  # a mean divides by what it did

    @property
    def factor(self) -> Tensor | None:
        """(n,) the weights of the rows that are computed; None where all rows count alike."""
        return self.row_weight if self.row_weight is None or self.kept is None else self.row_weight[self.kept]

    def reduced(self, losses: Tensor) -> Tensor:
        """The result of a head from the weighted losses of its rows (n,), which are the same on every rank."""
        # A mean divides by what all rows of the caller count, those that were left out as well: a row of probabilities
        # whose classes have weight 0 counts, as in torch.
        return self.result(reduce(losses, self.divisor, self.keywords.reduction))

    def result(self, value: Tensor) -> Tensor:
        """A reduced value, (n,) or (), in the shape that the caller gets."""
        if self.keywords.reduction == "none":
            if self.kept is not None:  # the rows that were left out have the loss 0
                value = value.new_zeros(self.batch.numel()).index_copy(0, self.kept, value)
            value = value.reshape(self.batch)
        return value

    def statistic(self, name: str, found: Tensor) -> Tensor:
        """A statistic of the rows that were computed, (n,), in the shape of all rows."""
        if self.kept is not None:
            missing = -100 if name == "argmax" else missing_value(found)
            found = found.new_full((self.batch.numel(),), missing).index_copy(0, self.kept, found)
        return found.reshape(self.batch)


def check_linear(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> None:
    """Raise unless the queries (..., d), class vectors (C, d) and bias (C,) are float tensors that fit each other."""
    # Types before shapes, so that a wrong argument is named and not an attribute that it lacks.
    tensors = {"input": input, "linear_weight": linear_weight, "linear_bias": linear_bias}
    for name, value in tensors.items():
        if value is not None and (not isinstance(value, Tensor) or not value.is_floating_point()):
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ArgumentTypeError(f"`{name}` must be a float tensor; got {kind}.")
    refuse_distributed(**tensors)
    check_devices(tensors)  # those of a module too, which no signature names: native code would read at address 0
    if linear_weight.ndim != 2 or linear_weight.shape[0] == 0:
        raise ArgumentError(f"`linear_weight` must be (classes, features); got shape {tuple(linear_weight.shape)}.")
    if input.ndim == 0 or input.shape[-1] != linear_weight.shape[1]:
        raise ArgumentError(
            f"`input` must be (..., {linear_weight.shape[1]}) to fit `linear_weight`; got {tuple(input.shape)}."
        )
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:1]:
        raise ArgumentError(
            f"`linear_bias` must have shape ({linear_weight.shape[0]},); got {tuple(linear_bias.shape)}."
        )


def read_head_target(
    input: Tensor,
    target: Tensor | Target | SoftTarget,
    weight: Tensor | None,
    ignore_index: int | None,
    multilabel: str,
    classes: int,
) -> Target:
    """The target of queries (..., d) over `classes` classes, read, checked and flattened to rows (N, ...)."""
    # There is no tensor of scores to check the target against; its shape is all that is needed.
    form = Form((*input.shape[:-1], classes), input.dtype, input.device)
    read = read_target(form, target, weight, ignore_index, multilabel)
    ids = None if read.ids is None else read.ids.reshape(-1, read.ids.shape[-1])
    weights = read.weights.reshape(-1, read.weights.shape[-1])
    return Target(ids, weights, read.count.reshape(-1), read.divisor.reshape(-1))


def read_call(
    member: Member,
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor | Target | SoftTarget,
    keywords: Keywords,
    shards: Shards | None = None,
) -> HeadCall:
    """Check the arguments of a call and bring them into one form, without any exchange between ranks.

    Args:
        member: whose head is called.
        input, target: as the caller gives them; on several ranks the same on each.
        linear_weight, linear_bias: of the classes that this rank holds.
        keywords: those that heads share.
        shards: which classes this rank holds; all of them if None.
    """
    check_linear(input, linear_weight, linear_bias)
    refuse_distributed(target=target)
    if keywords.shift:
        input, target = shifted(input, target)
    check_keywords(member, keywords)
    # Without shards this process is the one rank, and holds all classes.
    shards = Shards((linear_weight.shape[0],)) if shards is None else shards
    member.takes.check(member.name, target, keywords.label_smoothing)
    check_back_end(input.device, keywords.options)
    if member.kind == "exact":
        check_constant(target, keywords.weight)
        if input.is_meta:  # kernels branch on the values of a block (how large supports are), which meta tensors lack
            raise ArgumentError(
                "`input` is on the meta device, where blocks have no values to look at: take a plain loss."
            )
    # Half precision is computed in float32, and the loss stays float32: a mean of 8.013 would print as 8.0, and a sum
    # of float16 numbers is soon infinite.
    keywords = products_as_given(keywords, input, linear_weight)
    queries, _ = working(input)
    queries = scaled_queries(queries, keywords)
    bias = None if linear_bias is None else in_dtype(linear_bias, queries.dtype)
    # Against all classes, not those of this rank: every rank gets the whole target, and refuses the same ids.
    read = read_head_target(
        queries, target, keywords.weight, keywords.ignore_index, keywords.multilabel, shards.num_classes
    )
    if member.needs_label or member.joint or keywords.exclude is not None or keywords.decoupled:
        # There is then one sum over the classes per positive. Listed ids give the positives the same numbers on all
        # ranks, so that the parts of a sum meet; bool rows are cut by shards and would not.
        read = listed(read)
    # A kernel would find a masked positive too, as an infinite loss, but in the middle of an exchange.
    live = live_classes(bias)
    check_live(read, live, shards)
    flat = queries.reshape(-1, queries.shape[-1])
    # Class vectors in another precision are converted some at a time, where they are read. Moments are an exception:
    # autograd goes over the whole table.
    vectors = in_dtype(linear_weight, queries.dtype) if member.kind == "quadratic" else linear_weight
    row_weight = read_row_weight(keywords, input.shape[:-1], queries.dtype)
    divisor = read.divisor if row_weight is None else read.divisor * row_weight
    if keywords.num_items is not None:
        divisor = torch.as_tensor(keywords.num_items, dtype=queries.dtype, device=input.device).reshape(())
    batch = input.shape[:-1]
    excluded, hit = read_excluded(member, keywords, batch, read, shards.num_classes)
    bound = read_bound(keywords.bound, batch, queries.dtype)
    return HeadCall(
        *(flat, vectors, bias, live, read, keywords, shards, batch, divisor, row_weight, excluded, hit),
        bound=None if bound is None else bound.reshape(-1),
        pair_ids=read_pair_ids(keywords, input.ndim - 1, target),
    )


def check_back_end(device: torch.device, options: HeadOptions) -> None:
    """Refuse options that this machine cannot do, or not at a speed that anybody wants."""
    if options.matmul == "bf16":
        check_bf16(device, options.allow_slow)
    if options.demands_native:
        resolve(options.backend)  # an error if this installation or processor has not got it
        if device.type != "cpu":
            raise ArgumentError(
                f"`options.backend` is {options.backend!r}, which runs on a CPU alone; the device is {device.type}. "
                'Leave it out: "auto" takes native code where it serves.'
            )


def check_constant(target: Tensor | Target | SoftTarget, weight: Tensor | None) -> None:
    """Refuse targets and class weights that require a gradient.

    Blocks give gradients to queries, class vectors and bias alone; others would silently be missing.
    """
    weights = target.probs if isinstance(target, SoftTarget) else target
    constants = {"target": weights.weights if isinstance(weights, Target) else weights, "weight": weight}
    for name, value in constants.items():
        # Under no_grad nothing is lost: an evaluation may be given what training may not.
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(
                f"`{name}` requires a gradient, which this head has not: pass `{name}.detach()`, or take the plain loss"
                " of `input @ linear_weight.T`, which has it."
            )


def blocked_loss(call: HeadCall, kernel: Kernel) -> Tensor | LossResult:
    """The loss of a call by a kernel that works block by block.

    Nothing is computed that nobody asked for: no row without a target weight, no gradient of what is frozen, and no
    gradient at all under `torch.no_grad()`.

    Within a block the kernel completes its sums over the ranks. The gradients of what all ranks share (queries and the
    kernel's setting) are completed by autograd, through `ranks.spread`: each rank computes the part of its classes.
    """
    refuse_transforms(call.queries, call.vectors, call.bias)
    call = call.without_empty_rows()
    keywords = settle_back_end(call.keywords, kernel, call.queries, call.shards.num_classes)
    ranks, rows = call.shards.ranks, call.rows()
    factor = call.factor
    scale = torch.ones_like(rows.total) if factor is None else factor
    if keywords.multilabel == "normalized":
        # A kernel computes sum_i t_i l(i, s); the loss at t / |t| is that over |t|, plus Omega(t / |t|) below.
        scale = scale * _inverse(rows.total)
    setting = None if kernel.setting is None else ranks.spread(kernel.setting)
    tensors = ranks.spread(call.queries), call.vectors, call.bias, setting
    # Asked here, because autograd switches gradients off inside of its functions, and there still reports that an
    # argument needs one if it does outside of `torch.no_grad()`.
    enabled = torch.is_grad_enabled()
    if keywords.reduction == "none":
        # The coefficients of the rows come with the backward; those known already are multiplied on outside.
        ones = replace(rows, coefficient=torch.ones_like(scale))
        value, stats = _split(BlockRows.apply(*tensors, ones, kernel, keywords, call.shards, enabled))
        value = value * scale
    else:
        # The whole coefficient of each row, the 1/N of a mean included, is known before the blocks run: their gradients
        # are final, and the backward of `loss.backward()` has nothing left to scale.
        if keywords.reduction == "mean":
            scale = scale / mean_divisor(call.divisor)
        given = replace(rows, coefficient=scale)
        value, stats = _split(BlockLoss.apply(*tensors, call.receiver, given, kernel, keywords, call.shards, enabled))
    if keywords.multilabel == "normalized" and kernel.omega is not None:
        # Omega(t / |t|) does not depend on the scores, but on a learned setting: it stays outside of the blocks, with
        # autograd's own derivative. Every rank has the part of its classes.
        omega = kernel.omega if setting is None else partial(kernel.omega, setting=setting)
        # Summed over the ranks before the reduction, which is the same on every rank.
        extra = ranks.total(omega_rows(rows, omega, keywords.options.rows(call.shards.size)))
        value = value + reduce(extra if factor is None else factor * extra, call.divisor, keywords.reduction)
    check_losses(value)
    if not stats:
        return call.result(value)
    each = {name: call.statistic(name, found) for name, found in zip(keywords.stats, stats, strict=True)}
    return LossResult(call.result(value), **each)


def _split(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The value that an autograd function returned, and the statistics after it."""
    return (found, ()) if isinstance(found, Tensor) else (found[0], found[1:])


def _inverse(values: Tensor) -> Tensor:
    """1 / values, and 0 where they are 0: a row without a positive is 0 and not nan."""
    # The inner `where` keeps 1 / 0 out of it, from which a derivative would make nan even where it is not chosen.
    return torch.where(values > 0, 1 / torch.where(values > 0, values, 1), 0)


def omega_rows(rows: RowTarget, omega: Callable[[Tensor], Tensor], step: int) -> Tensor:
    """Omega(t / |t|) of each row over the classes of this rank, (N,); 0 for a row without a positive.

    Args:
        rows: the target weights t.
        omega: from rows on the simplex to Omega.
        step: rows at a time, where smoothing gives every class a weight and rows have C entries.
    """
    rows, scale = rows[:], _inverse(rows.total).unsqueeze(1)
    weights = rows.weights * scale
    if rows.share is None or rows.class_weight is None:
        # Classes that are not listed have t = 0 and add nothing to Omega: (N, P) is enough.
        return torch.where(rows.total > 0, omega(weights), 0)
    values = []
    # Smoothing gives every class a weight: rows of C entries, so block by block like the scores.
    for start in range(0, weights.shape[0], step):
        part = slice(start, start + step)
        # The part of smoothing first, which every class has; then the listed weights on top.
        dense = (rows.share[part].unsqueeze(1) * scale[part]) * rows.class_weight
        if rows.ids is None:
            dense = dense + weights[part]
        else:
            dense = dense.scatter_add(1, rows.ids[part], weights[part])
        values.append(omega(dense))
    return torch.where(rows.total > 0, torch.cat(values) if values else rows.total, 0)


def exact_loss(member: Member, call: HeadCall, settings: Mapping[str, Any]) -> Any:
    """The loss of an exact member, whose kernel goes over blocks of scores; `settings` are the member's own.

    A tensor, or a `LossResult` with `stats`.
    """
    kernel: Kernel = member.needed("kernel")(**settings)
    if call.keywords.stats and member.ranking_key is not None:
        kernel = replace(kernel, ranking_key=member.ranking_key(**settings))
    # Kernels count on target weights of one sign: where those of a row cancel, their total is 0 and the gradient not.
    # The loss is linear in them, so that class weights of both signs are a difference of two calls. Positives with sums
    # of their own are the exception, on both accounts, and so are those that have one loss together.
    each = member.joint or call.keywords.decoupled or call.hit is not None
    if each or not negative_weights(call.keywords.weight):
        return blocked_loss(call, kernel)
    # Tensors: statistics and negative weights do not go together.
    more, less = (blocked_loss(call.weighted_by_sign(sign), kernel) for sign in (1, -1))
    return torch.sub(more, less)  # type: ignore[arg-type]


def quadratic_loss(member: Member, call: HeadCall, settings: Mapping[str, Any]) -> Tensor:
    """The loss of a member that needs moments of the class vectors instead of scores; by plain autograd."""
    # Its kernel sees the whole call at once: there is no table of scores, and so nothing to cut into blocks.
    call = call.without_empty_rows()
    losses = member.needed("kernel")(**settings)(call)
    return call.reduced(losses if call.factor is None else call.factor * losses)
