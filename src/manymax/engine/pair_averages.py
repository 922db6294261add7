"""The compositional correction of a sampled loss: what it keeps about each training pair from one step to the next.

The sum g of a pair over its negatives, relative to its positive, is estimated from few draws, and log g from few draws
is too small on average. So each pair keeps a moving average u of its estimates, over all steps that it was part of:

    average    u <- (1 - gamma) u + gamma g;   u = g where the pair is met for the first time
    loss       log u
    gradient   that of g / u, in which u is held constant

With gamma = 1 this is log g and its gradient. Tensors hold log u, which neither overflows nor vanishes.

Citations: Qiu et al., ICML 2022 (SONG); Yuan et al., ICML 2022 (SogCLR).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch import distributed as dist

from manymax.engine.keywords import Keywords
from manymax.engine.target import SoftTarget, Target
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.checks import visible


def read_num_pairs(num_pairs: int | None, kept: bool, device: torch.device | str | None = None) -> Tensor | None:
    """New averages (num_pairs,), those of pairs that were never met: log 0; None for None.

    Args:
        num_pairs: as given to the constructor of a module.
        kept: whether the module keeps averages.
        device: of the averages.
    """
    if num_pairs is None:
        return None
    if not kept:
        raise ArgumentError("`num_pairs` has no effect without `compositional`: leave it out.")
    if isinstance(num_pairs, bool) or not isinstance(num_pairs, int) or num_pairs < 1:
        raise ArgumentError(f"`num_pairs` must be an integer of at least 1; got {num_pairs!r}.")
    return torch.full((num_pairs,), -torch.inf, device=device)


def averages_of(module: nn.Module, given: Tensor | None) -> Tensor | None:
    """The averages for a call of a module: a copy in evaluation mode, where a call leaves them as they are."""
    return given.clone() if isinstance(given, Tensor) and not module.training else given


def read_pair_ids(keywords: Keywords, rank: int, target: Tensor | Target | SoftTarget) -> Tensor | None:
    """The number of the pair of each positive, (N, P), in the order in which a target is read; None if not given.

    Args:
        keywords: of the call.
        rank: the number of dimensions of the rows, 1 for queries (N, d).
        target: as the caller gave it, and after `shift`.
    """
    ids = keywords.pair_ids
    if ids is None:
        return None
    listed = target.ids if isinstance(target, (Target, SoftTarget)) else target
    if listed is None or listed.dtype == torch.bool or listed.is_floating_point():
        raise ArgumentError("`pair_ids` number the positives of a row: pass `target` as ids, and not as rows.")
    if keywords.shift and isinstance(ids, Tensor) and ids.ndim == listed.ndim and ids.shape[rank - 1]:
        # The pair of the prediction at position t is numbered where its target is, at t + 1.
        ids = ids.narrow(rank - 1, 1, ids.shape[rank - 1] - 1)
    check_pair_ids(ids, listed.shape, " The third result of `group_pairs` has it." * isinstance(target, Target))
    if listed.ndim == rank:
        return ids.reshape(-1, 1)
    if not isinstance(target, Target) and listed.shape[-1]:
        # Reading sorts the ids of a row. A stable sort leaves the first one of several equal ids in front.
        ids = ids.gather(-1, listed.long().sort(stable=True, dim=-1).indices)
    rows = ids.reshape(listed.shape[:rank].numel(), listed.shape[-1])
    return rows if rows.shape[1] else rows.new_zeros(len(rows), 1)  # no column is read as one of padding


def check_pair_ids(ids: object, shape: torch.Size, hint: str = "") -> None:
    """Raise unless `ids` is a tensor of integers with a number for each positive of this shape."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ArgumentTypeError(f"`pair_ids` must be a tensor of integer ids; got {kind}.")
    if ids.shape != shape:
        raise ArgumentError(
            f"`pair_ids` must have a number for each positive, {tuple(shape)}; got {tuple(ids.shape)}.{hint}"
        )


def check_averages(kept: bool, pair_ids: Tensor | None, pair_averages: Tensor | None, z_loss: float = 0.0) -> None:
    """Raise unless a call has numbers and averages of its pairs, or has neither and keeps none.

    Args:
        kept: whether the loss keeps averages.
        pair_ids, pair_averages, z_loss: of the call.
    """
    for name, value in {"pair_ids": pair_ids, "pair_averages": pair_averages}.items():
        if kept and value is None:
            raise ArgumentError(
                f"`{name}` is missing: `compositional` keeps an average for each training pair. Pass the number of the"
                " pair of each positive as `pair_ids`, and averages as `pair_averages`, or build a head with"
                " `num_pairs`."
            )
        if not kept and value is not None:
            raise ArgumentError(f"`{name}` has no effect on a loss without `compositional`: leave it out.")
    averages = pair_averages
    if averages is None:
        return
    if not isinstance(averages, Tensor) or averages.dtype not in (torch.float32, torch.float64):
        kind = averages.dtype if isinstance(averages, Tensor) else type(averages).__name__
        # With 8 bits a small step towards a new value would round to no step at all.
        raise ArgumentTypeError(f"`pair_averages` must be a tensor of float32 or float64; got {kind}.")
    if averages.ndim != 1 or averages.requires_grad:
        raise ArgumentError(
            f"`pair_averages` must be (num_pairs,), without a gradient; got shape {tuple(averages.shape)}"
            f"{' with one' if averages.requires_grad else ''}."
        )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        # Each process would see a part of the steps of a pair, and DistributedDataParallel would overwrite its buffers.
        raise ArgumentError(
            f"`compositional` works in one process, which sees every step of a pair; here are {dist.get_world_size()}."
            " Leave it out, or train in one process."
        )
    if z_loss > 0:
        raise ArgumentError("`z_loss` and `compositional` contradict each other: the former is of this step's own sum.")


def averaged(losses: Tensor, pair_ids: Tensor, averages: Tensor, gamma: float) -> Tensor:
    """The losses log u (M,) of pairs from log g, `losses` (M,), whose gradient becomes that of g / u.

    A pair that is in the batch several times takes one step, towards the mean of its estimates.

    Args:
        losses: log g, with a gradient.
        pair_ids: (M,) the number of each pair.
        averages: (num_pairs,) log u of all pairs, -inf where there is none yet; changed in place.
        gamma: share of the new estimate, in (0, 1].
    """
    if visible(pair_ids) and pair_ids.numel() and not 0 <= int(pair_ids.min()) <= int(pair_ids.max()) < len(averages):
        raise ArgumentError(
            f"`pair_ids` must be in [0, {len(averages)}), the number of `pair_averages`; got {int(pair_ids.min())} to"
            f" {int(pair_ids.max())}."
        )
    estimates = losses.detach()
    ids, place, times = pair_ids.unique(return_inverse=True, return_counts=True)
    # The logarithm of a mean, relative to the largest of each pair; for a single estimate exactly that.
    top = estimates.new_full(ids.shape, -torch.inf).scatter_reduce_(0, place, estimates, "amax")
    total = torch.zeros_like(top).index_add_(0, place, (estimates - top[place]).exp())
    mean = top + (total / times).log()
    before = averages[ids].to(mean.dtype)
    if visible(before) and not (before < torch.inf).all():
        raise ArgumentError(
            "`pair_averages` must hold finite numbers, or -inf for pairs that were not met; got"
            f" {before[~(before < torch.inf)][0].item()}."
        )
    kept = math.log1p(-gamma) if gamma < 1 else -math.inf
    after = torch.where(before == -torch.inf, mean, torch.logaddexp(before + kept, mean + math.log(gamma)))
    # A loss of nan or inf shows in the result. It is not kept, where all later steps of the pair would have it.
    averages[ids] = torch.where(after.isfinite(), after, before).to(averages.dtype)
    log_u = after[place]
    # g / u = exp(log g - log u) is at most (times in the batch) / gamma: nothing overflows. The difference is 0 and
    # carries the gradient: that of g / u is g / u times that of log g.
    return log_u + (estimates - log_u).exp() * (losses - estimates)
