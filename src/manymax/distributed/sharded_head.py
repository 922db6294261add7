"""A head whose class vectors are split over the ranks, with the interface of the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from manymax.distributed.collectives import ProcessRanks
from manymax.distributed.sharding import make_shards, overlaps
from manymax.engine.head import LinearHead
from manymax.engine.linear import HeadCall, check_linear
from manymax.engine.ranking import linear_topk, read_exclude
from manymax.engine.ranks import Shards
from manymax.engine.target import Target
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.checks import full_precision

INIT_ROWS = 1 << 14  # class vectors drawn from one seed: they are the same for every number of ranks
SHARDED = ("linear.weight", "linear.bias")


class ShardedHead(nn.Module):
    """A head over class vectors of which every rank holds some: `head(input, target, linear_weight=None)` and `topk`.

    Value and gradients are those of the head on one machine. Queries and targets are the same on all ranks, every rank
    returns the same loss, gets the gradient of its own class vectors and the whole gradient of the queries. Ranks
    exchange sums over the classes of a row and never scores. All ranks must make the same calls in the same order,
    backward included.

    Args:
        head: any of the `Linear...Loss` heads, which says what is computed. With class vectors of its own, the same
            ones on every rank, it gives each rank its rows of them; otherwise (`in_features=None`) see `in_features`.
        in_features: d, to make class vectors here, each rank its own; None to get them in every call.
        bias: whether the class vectors made here have a bias.
        sizes: classes of each rank; None splits them evenly.
        group: the ranks; None is the default group, or this process alone if there is none.
        device, dtype: of the class vectors made here.

    Example:
        >>> import torch, manymax
        >>> from manymax.distributed import ShardedHead
        >>> head = ShardedHead(manymax.LinearSparsemaxLoss(None, num_classes=1000), in_features=8)
        >>> loss = head(torch.zeros(4, 8), torch.arange(4))
        >>> loss.backward()
        >>> round(loss.item(), 4), head.linear_weight.grad.shape
        (0.4995, torch.Size([1000, 8]))
    """

    span: Tensor

    def __init__(
        self,
        head: LinearHead,
        in_features: int | None = None,
        *,
        bias: bool = False,
        sizes: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(head, LinearHead):
            raise ArgumentTypeError(f"`head` must be a linear head of manymax; got {type(head).__name__}.")
        if head.member.unsharded is not None:
            raise ArgumentTypeError(
                f"`head` of {head.member.name} cannot be split over ranks: {head.member.unsharded}."
            )
        if head.linear is not None and (in_features is not None or bias):
            raise ArgumentError("`in_features` and `bias` are for a head without class vectors of its own.")
        if in_features is None and bias:
            raise ArgumentError("`bias` needs class vectors made here: give `in_features`, or `bias=False`.")
        self.head = head
        self.ranks = ProcessRanks(group)
        self.shards: Shards = make_shards(head.num_classes, sizes, self.ranks)
        self.register_buffer("span", torch.tensor([self.shards.span.start, self.shards.span.stop]))
        if head.linear is not None:
            head.linear = _rows_of(head.linear, self.shards)
        elif in_features is not None:
            head.linear = _new_rows(in_features, bias, self.shards, device, dtype)

    @property
    def linear_weight(self) -> Tensor:
        """The class vectors of this rank, (classes of this rank, d)."""
        return self._vectors(None)[0]

    def forward(self, input: Tensor, target: Tensor | Target, linear_weight: Tensor | None = None) -> Tensor:
        """The loss of queries (..., d); `linear_weight` replaces the class vectors of this rank."""
        call = self.ranks.agree(lambda: self._read(input, target, linear_weight), _num_rows(input), self.span.device)
        with full_precision(input):
            return self.head.compute(call)

    def _read(self, input: Tensor, target: Tensor | Target, linear_weight: Tensor | None) -> HeadCall:
        """A call that has been read and checked on this rank, still to be computed with the others."""
        vectors, bias = self._vectors(linear_weight)
        return self.head.read(input, vectors, bias, target, self.shards)

    @torch.no_grad()
    def topk(
        self, input: Tensor, k: int, linear_weight: Tensor | None = None, exclude: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scores and ids of the k best of all classes for each query, (..., k) each; see `manymax.linear_topk`.

        Every rank sends its own k best.
        """
        ranks = self.ranks
        values, ids = ranks.agree(
            lambda: self._own_topk(input, k, linear_weight, exclude), _num_rows(input), self.span.device
        )
        values, ids = torch.cat(ranks.gather(values), -1), torch.cat(ranks.gather(ids), -1)
        values, place = values.topk(k, dim=-1)
        return values, ids.gather(-1, place)

    def _own_topk(
        self, input: Tensor, k: int, linear_weight: Tensor | None, exclude: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The k best of this rank, with their ids among all classes; -inf and -100 where it has fewer."""
        shards, (vectors, bias) = self.shards, self._vectors(linear_weight)
        check_linear(input, vectors, bias)
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= shards.num_classes:
            raise ArgumentError(
                f"`k` must be an integer from 1 to the number of classes, {shards.num_classes}; got {k!r}."
            )
        read_exclude(exclude, input, shards.num_classes)
        if exclude is not None:
            exclude = torch.where(shards.inside(exclude), exclude - shards.start, -100)
        own = min(k, shards.size)
        values, ids = linear_topk(input, vectors, own, linear_bias=bias, exclude=exclude, key=self.head.ranking_key)
        ids = torch.where(ids >= 0, ids + shards.start, ids)
        return pad(values, (0, k - own), value=-torch.inf), pad(ids, (0, k - own), value=-100)

    def full_state_dict(self) -> dict[str, Any]:
        """The state of the head on one machine, on the first rank; {} on the others. All ranks must call it.

        The head without shards loads it, and `load_shards([state])` does, with any number of ranks.
        """
        state = self.head.state_dict()
        for name in SHARDED:
            if name in state:
                state[name] = self.ranks.gather_rows(state[name], self.shards.sizes)
        return state if self.shards.ranks.rank == 0 else {}

    def load_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the state of all ranks of another run, with any number of ranks and any sizes.

        Args:
            states: what `state_dict()` gave on every rank, or one `full_state_dict()`. Loaded by
                `torch.load(..., mmap=True)` only the rows of this rank are read.
        """
        if not states:
            raise ArgumentError("`states` must hold at least one state; got none.")
        merged, spans, parts = {}, [], []
        for state in states:
            part = {name.removeprefix("head."): value for name, value in state.items()}
            span = part.pop("span", None)
            spans.append((0, self.head.num_classes) if span is None else tuple(span.tolist()))
            parts.append(part)
            merged.update(part)
        if self.head.linear is not None:
            found = overlaps(self.shards, spans)
            for name in SHARDED:
                if name in merged:
                    merged[name] = torch.cat([parts[part][name][rows] for part, rows in found])
        self.head.load_state_dict(merged)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        stored = state_dict.get(f"{prefix}span", self.span)
        if stored.tolist() != self.span.tolist():
            args[-1].append(
                f"the state is of classes {stored.tolist()}, this rank holds {self.span.tolist()}: `load_shards` takes"
                " the states of all ranks."
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _vectors(self, linear_weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The class vectors and bias of this rank to use: the given ones, or its own."""
        linear = self.head.linear
        if linear_weight is None:
            if linear is None:
                raise ArgumentError("this head was built without class vectors: pass `linear_weight`.")
            return linear.weight, linear.bias
        if not isinstance(linear_weight, Tensor):
            raise ArgumentTypeError(f"`linear_weight` must be a tensor; got {type(linear_weight).__name__}.")
        if linear_weight.shape[:1] != (self.shards.size,):
            raise ArgumentError(
                f"`linear_weight` must have {self.shards.size} rows, the classes of rank {self.shards.ranks.rank};"
                f" got shape {tuple(linear_weight.shape)}."
            )
        return linear_weight, None

    def extra_repr(self) -> str:
        """What the printed module shows."""
        start, stop = self.span.tolist()
        return f"classes {start} to {stop - 1}, rank {self.shards.ranks.rank} of {self.shards.ranks.size}"


def _num_rows(input: Tensor) -> int:
    return input.shape[:-1].numel() if isinstance(input, Tensor) and input.ndim else 0


def _rows_of(linear: nn.Linear, shards: Shards) -> nn.Linear:
    """The rows of this rank of class vectors that every rank has."""
    own = nn.Linear(linear.in_features, shards.size, bias=linear.bias is not None, device="meta")
    own.weight = nn.Parameter(linear.weight.detach()[shards.span].clone(), linear.weight.requires_grad)
    if linear.bias is not None:
        own.bias = nn.Parameter(linear.bias.detach()[shards.span].clone(), linear.bias.requires_grad)
    return own


def _new_rows(
    in_features: int, bias: bool, shards: Shards, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Linear:
    """Class vectors as torch.nn.Linear draws them, uniform in +-1/sqrt(d), the same for every number of ranks.

    The classes are drawn in blocks with a seed for each, of which a rank draws those that it needs.
    """
    own = nn.utils.skip_init(nn.Linear, in_features, shards.size, bias=bias, device=device or "cpu", dtype=dtype)
    seed, reach = (
        int(shards.ranks.first(torch.randint(2**48, (), device=own.weight.device))),
        1 / math.sqrt(max(1, in_features)),
    )
    start, stop = shards.span.start, shards.span.stop
    with torch.no_grad():
        for block in range(start // INIT_ROWS, -(-stop // INIT_ROWS)):
            random = torch.Generator().manual_seed(seed + block)
            drawn = torch.empty(INIT_ROWS, in_features + bias).uniform_(-reach, reach, generator=random)
            low, high = max(start, block * INIT_ROWS), min(stop, (block + 1) * INIT_ROWS)
            rows = drawn[low - block * INIT_ROWS : high - block * INIT_ROWS]
            own.weight[low - start : high - start] = rows[:, :in_features]
            if bias:
                own.bias[low - start : high - start] = rows[:, in_features]
    return own
