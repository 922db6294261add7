"""What the shared keywords do to the arguments of a call, and which of them a member refuses."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from manymax.engine.exclude import read_listed_ids, spare_positives
from manymax.engine.keywords import Keywords, check_num_items
from manymax.engine.member import Member
from manymax.engine.scoring import scaled_by
from manymax.engine.statistics import OF_SCORES
from manymax.engine.target import SoftTarget, Target, negative_weights
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.checks import readable, visible


def read_excluded(
    member: Member, keywords: Keywords, batch: torch.Size, target: Target, num_classes: int
) -> tuple[Tensor | None, Tensor | None]:
    """What is left out of the sums of each row, (N, E), and the positives left out of the sums of others, (N, P)."""
    listed = read_listed_ids("exclude", keywords.exclude, batch, num_classes)
    if listed is None:
        return None, None
    if member.kind == "sampled":  # its positives are no part of the draws
        return listed, None
    excluded, hit = spare_positives(listed, target, num_classes)
    # With one positive per row there is none to hit. Else a device is waited for, once and before the blocks.
    if hit.shape[1] > 1 and (not readable(hit) or hit.any()):
        if not member.log_partition:
            raise ArgumentError(
                f"`exclude` lists a positive of a row with several, for which {member.name} has no closed form: pass"
                " one row for each positive."
            )
        if keywords.stats:
            raise ArgumentError(
                "`stats` of rows with several positives, some of them excluded: each positive has a sum of its own, and"
                " the row no probabilities. Pass one row for each positive."
            )
        return excluded, hit
    return excluded, None


def shifted(input: Tensor, target: Tensor | Target | SoftTarget) -> tuple[Tensor, Tensor | SoftTarget]:
    """Queries (..., T, d) and targets (..., T, *) as those of T - 1 predictions: position t of the target of t + 1."""
    axis = input.ndim - 2
    if axis < 0 or isinstance(target, Target):
        raise ArgumentError("`shift` needs sequences: `input` (B, T, d) and a `target` (B, T), which is not grouped.")
    parts = (target.ids, target.probs) if isinstance(target, SoftTarget) else (target,)
    for part in parts:
        if not isinstance(part, Tensor) or part.ndim <= axis or part.shape[axis] != input.shape[axis]:
            raise ArgumentError(
                f"`shift` needs a `target` with as many positions as `input`, {input.shape[axis]} in dimension {axis}."
            )
    later = [part.narrow(axis, 1, input.shape[axis] - 1) for part in parts]
    return input.narrow(axis, 0, input.shape[axis] - 1), SoftTarget(*later) if len(later) == 2 else later[0]


def scaled_queries(queries: Tensor, keywords: Keywords) -> Tensor:
    """The queries divided by their norms and by the temperature, as the keywords say; with gradients through both.

    The temperature divides the products with all class vectors: on the queries that costs d numbers per row where it
    would cost C, and the gradient in it is a sum that never meets the -inf of a masked class.
    """
    temperature = keywords.temperature
    if not keywords.normalize and not isinstance(temperature, Tensor) and temperature == 1:
        return queries
    divisor = torch.as_tensor(temperature, dtype=queries.dtype, device=queries.device).reshape(())
    return scaled_by(queries, divisor, keywords.normalize)


def read_row_weight(keywords: Keywords, batch: torch.Size, dtype: torch.dtype) -> Tensor | None:
    """The weights of the rows as (N,), checked against the shape of the rows; None where none are given."""
    weight = keywords.row_weight
    if weight is None:
        return None
    if not isinstance(weight, Tensor) or weight.is_complex():
        raise ArgumentTypeError(f"`row_weight` must be a tensor of numbers; got {type(weight).__name__}.")
    if weight.shape != batch:
        hint = " With `shift` there is one row less than positions." if keywords.shift else ""
        raise ArgumentError(
            f"`row_weight` must have a weight for each row, {tuple(batch)}; got {tuple(weight.shape)}.{hint}"
        )
    weight = weight.to(dtype).reshape(-1)
    if visible(weight) and not weight.isfinite().all():
        raise ArgumentError("`row_weight` must hold finite numbers; got nan or inf.")
    if keywords.reduction == "mean" and keywords.num_items is None and visible(weight) and (weight < 0).any():
        raise ArgumentError(
            "`row_weight` must not be negative for a mean, which divides by the sum of the weights: pass `num_items`,"
            ' or take `reduction="sum"`.'
        )
    return weight


# What a keyword would mean for a kind of head that does not take it, for the error.
REFUSED: Mapping[str, Mapping[str, str]] = {
    "exact": {},
    "sampled": {"stats": "it sees a sample of the scores, and not all of them"},
    "quadratic": {
        "normalize": "it has moments of the class vectors as they are",
        "softcap": "its moments stand for scores that are linear in the class vectors",
        "exclude": "its moments are sums over all classes",
        "stats": "it computes no scores but those of the positives",
    },
}
# And for a member that is no function of the log of a sum of exponentials.
NO_PARTITION = {
    "decoupled": "it has no sum of exponentials that a positive could be left out of",
    "z_loss": "it has no partition function Z",
}
# And for a member that compares scores with each other alone.
NO_BOUND = {"bound": "it compares scores with no bound, the K-th largest of the row"}


def check_keywords(member: Member, keywords: Keywords) -> None:
    """Refuse keywords that have no meaning for a member, with the reason; and those that are given with bad values."""
    reasons = {
        **REFUSED[member.kind],
        **({} if member.log_partition else NO_PARTITION),
        **({} if member.bounded else NO_BOUND),
    }
    for name in keywords.given():
        if name in reasons:
            raise ArgumentError(f"`{name}` has no meaning for {member.name}: {reasons[name]}. Leave it out.")
    for name in keywords.stats:
        if name not in (*OF_SCORES, *member.statistics):
            known = ", ".join((*OF_SCORES, *member.statistics))
            raise ArgumentError(f"`stats`: {member.name} has no {name!r}. It has {known}.")
    if keywords.stats and negative_weights(keywords.weight):
        raise ArgumentError(
            "`weight` must not be negative with `stats`: statistics of a row are averages by the weights of its"
            " positives. Leave `stats` out, or the weights."
        )
    if keywords.stats and keywords.decoupled:
        raise ArgumentError(
            "`stats` and `decoupled` contradict each other: exponentials without that of the positive"
            " are no probabilities of the row."
        )
    if keywords.label_smoothing > 0 and (keywords.exclude is not None or keywords.decoupled):
        name = "decoupled" if keywords.decoupled else "exclude"
        raise ArgumentError(
            f"`{name}` and `label_smoothing` contradict each other: smoothing gives every class a weight as a positive."
        )
    if keywords.options.sparse_grad and keywords.label_smoothing > 0:
        raise ArgumentError(
            f"`label_smoothing` must be 0 with `sparse_grad`; got {keywords.label_smoothing}. Smoothing gives every"
            " class a gradient: leave `sparse_grad` out."
        )
    check_num_items(keywords.num_items, keywords.reduction)
