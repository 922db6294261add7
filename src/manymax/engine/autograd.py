"""The autograd functions of exact heads: the place where blocks meet `backward`.

The gradients of a head are computed while its blocks are at hand, and not by autograd, which would keep every block.
Two functions differ in when that happens:

    BlockLoss   one number for all rows: coefficients are known, so the forward computes the gradients as well
    BlockRows   one loss per row: its coefficients come with the backward, which computes the blocks a second time

Neither has second derivatives: the gradients are numbers, not functions of the arguments that autograd could follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from manymax.engine.block_loop import run
from manymax.engine.blocks import Kernel
from manymax.engine.half import rounded
from manymax.engine.keywords import Keywords
from manymax.engine.ranks import Ranks, Shards
from manymax.engine.row_target import RowTarget
from manymax.errors import ManymaxError
from manymax.ops.checks import full_precision, readable, refuse_transforms

# PyTorch has no public question for "was this backward asked for with `retain_graph=True`?". Where a later version has
# moved the private one, a second backward needs the head's own option.
try:
    from torch._C._autograd import _get_current_graph_task_keep_graph as _keeps_graph
except ImportError:

    def _keeps_graph() -> bool:
        """False: torch does not tell."""
        return False


def refuse_second_derivatives(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that raises under `create_graph=True`.

    Without this, autograd would take the gradients for constants and give second derivatives that are silently wrong.
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> Any:
        # Autograd runs a backward with gradients enabled exactly if `create_graph=True` was asked for.
        if torch.is_grad_enabled():
            raise ManymaxError(
                "a head has no second derivatives: `create_graph=True` needs the plain loss on the table of scores."
            )
        return backward(ctx, *grads)

    return checked


def graph_is_retained() -> bool:
    """Whether the backward that is running was asked for with `retain_graph=True`; False where torch does not tell."""
    return bool(_keeps_graph())


class InDtype(torch.autograd.Function):
    """value.to(dtype) whose backward takes row-sparse gradients too; that of torch's own `to` refuses them."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = value.dtype
        return value.to(dtype)

    # Not under `refuse_second_derivatives`: `to` is linear, and autograd can follow its backward.
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` in the dtype of the arithmetic, with a gradient in its own."""
    return value if value.dtype == dtype else InDtype.apply(value, dtype)


# What a backward returns for the arguments of its forward that are no tensors, from `target` on.
NOT_TENSORS = (None,) * 5


class BlockLoss(torch.autograd.Function):
    """sum_n coefficient_n loss_n, (), with the gradients computed in the forward.

    The coefficients of "mean" and "sum" are known before the blocks run, so that each block's scores serve its loss and
    its gradients. The backward multiplies the finished gradients by the factor from above.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        setting: Tensor | None,
        receiver: Tensor | None,
        target: RowTarget,
        kernel: Kernel,
        keywords: Keywords,
        shards: Shards,
        enabled: bool,
    ) -> Tensor | tuple[Tensor, ...]:
        # Autograd says which arguments need a gradient, in their order: queries, class vectors, bias, setting. Those
        # that do not are not computed: frozen class vectors, for example, save a matmul. `enabled` is False under
        # `torch.no_grad()`, where autograd gives the same answer. A receiver gets what is that of the class vectors.
        queries, vectors, bias, wants_setting, received = (enabled and need for need in ctx.needs_input_grad[:5])
        wants = queries, vectors or received, bias
        # Without a coefficient kernels compute losses alone.
        given = target if any(wants) or wants_setting else replace(target, coefficient=None)
        losses, gradients, grad_setting, stats = run(
            input, linear_weight, linear_bias, given, kernel, keywords, shards, wants
        )
        # An attribute and not `save_for_backward`: autograd holds on to saved tensors while the backward runs, and then
        # copies a gradient instead of taking it over. No input is saved, because the gradients need none any more.
        ctx.grads = (*gradients.finish(), grad_setting if wants_setting else None)
        ctx.retain, ctx.dtype = keywords.options.retain_graph, linear_weight.dtype
        ctx.received = received
        return _with_stats(ctx, (losses * target.factor).sum(), stats)

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, grad: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise ManymaxError(
                "this head computes its gradients in the forward, and the first backward has freed them; for a second"
                " one pass `retain_graph=True` to the first, or `options={'retain_graph': True}` to the head."
            )
        grads, keep = ctx.grads, ctx.retain or graph_is_retained()
        if not keep:
            ctx.grads = None  # nothing else holds them now: autograd may take them over without a copy
        queries, vectors, *others = (None if g is None else _times(g, grad, keep) for g in grads)
        if ctx.received:
            return (queries, None, *others, vectors, *NOT_TENSORS)
        # After the factor from above, so that sums in float32 are rounded once.
        vectors = None if vectors is None else rounded(vectors, ctx.dtype)
        return (queries, vectors, *others, None, *NOT_TENSORS)


def _with_stats(ctx: Any, value: Tensor, stats: list[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """What a forward returns: its value, and the statistics after it, which have no gradient."""
    if not stats:
        return value
    ctx.mark_non_differentiable(*stats)
    return value, *stats


def _times(value: Tensor, factor: Tensor, keep: bool) -> Tensor:
    """value x factor, in place unless `value` must be kept for another backward."""
    if keep or not readable(factor):  # the factors of `is_grads_batched=True` are a batch of numbers in one tensor
        return value * factor
    # `loss.backward()` has the factor 1: a pass over (C, d) is saved. Not on a GPU, where looking at it would make the
    # host wait for all work queued so far.
    if factor.device.type == "cpu" and factor == 1:
        return value
    # In place for a row-sparse gradient too, which may have a row for every class.
    (value._values() if value.is_sparse else value).mul_(factor)
    return value


class BlockRows(torch.autograd.Function):
    """The losses of all rows, (N,); the backward computes the blocks again.

    For `reduction="none"` the factor of each row is known only in the backward. Computing the scores a second time
    costs one matmul more; keeping a gradient in the class vectors for each row would cost N C d numbers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        setting: Tensor | None,
        target: RowTarget,
        kernel: Kernel,
        keywords: Keywords,
        shards: Shards,
        enabled: bool,
    ) -> Tensor | tuple[Tensor, ...]:
        if enabled and any(ctx.needs_input_grad):
            # Saved by autograd, which then refuses a backward after one of them was changed in place. Targets and
            # class weights may be the caller's own memory, and a kernel reads its setting.
            ctx.save_for_backward(input, linear_weight, linear_bias, setting, *target.tensors())
            ctx.kernel, ctx.keywords, ctx.shards = kernel, keywords, shards
        plain = replace(target, coefficient=None)  # tells kernels to skip the gradient
        nothing = False, False, False
        losses, *_, stats = run(input, linear_weight, linear_bias, plain, kernel, keywords, shards, nothing)
        return _with_stats(ctx, losses, stats)

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, grad: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        refuse_transforms(grad)
        input, linear_weight, linear_bias, _, *saved = ctx.saved_tensors
        target = RowTarget(*saved)
        queries, target = input, replace(target, coefficient=target.factor * grad)
        # A row whose factor from above is 0, such as one that was masked out of a sum, has the gradient 0.
        kept = rows_with_factor(target.factor, ctx.shards.ranks)
        if kept is not None:
            queries, target = input[kept], target.only(kept)
        # The caller may run the backward under autocast, which the forward was protected from by its head.
        with full_precision(input):
            wants = tuple(ctx.needs_input_grad[:3])
            keywords = replace(ctx.keywords, stats=())  # the forward has them
            _, gradients, grad_setting, _ = run(
                queries, linear_weight, linear_bias, target, ctx.kernel, keywords, ctx.shards, wants
            )
            grad_input, grad_vectors, grad_bias = gradients.finish()
            grads = None if grad_vectors is None else rounded(grad_vectors, linear_weight.dtype), grad_bias
        if kept is not None and grad_input is not None:
            grad_input = torch.zeros_like(input).index_copy_(0, kept, grad_input)
        return (grad_input, *grads, grad_setting if ctx.needs_input_grad[3] else None, *NOT_TENSORS)


def rows_with_factor(factor: Tensor, ranks: Ranks) -> Tensor | None:
    """The rows (n,) whose factor (N,) is not 0 on some rank; None where that is every row or cannot be known."""
    if not readable(factor):
        return None
    # Ranks that disagree about the rows would exchange sums of different ones, or wait for each other for ever. Their
    # factors come from the caller's own code: one small exchange makes sure, where the blocks make several.
    some = ranks.maximum((factor != 0).to(factor.dtype)) != 0
    kept = some.nonzero().squeeze(1)
    return None if len(kept) == len(factor) else kept
