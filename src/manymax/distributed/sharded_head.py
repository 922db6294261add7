"""A linear head whose class vectors are split over the ranks; it is called like any other head.

Every rank calls the head with the same queries and targets. What is the same on all ranks: queries, targets, settings,
the loss and the gradient of the queries. What differs: the class vectors, their gradient, and the optimizer's numbers
for them, of which every rank has those of its own classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from manymax.distributed.collectives import ProcessRanks
from manymax.distributed.sharding import local_shard, make_shards, overlaps
from manymax.engine.exclude import read_listed_ids
from manymax.engine.head import LinearHead
from manymax.engine.linear import HeadCall, check_linear
from manymax.engine.placement import is_distributed
from manymax.engine.ranking import linear_topk
from manymax.engine.ranks import Shards
from manymax.engine.target import SoftTarget, Target
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.arguments import checked
from manymax.ops.checks import full_precision
from manymax.ops.eager import outside_of_graphs

# Class vectors that are drawn from one seed at the start, so that they do not depend on the number of ranks.
INIT_ROWS = 1 << 14
# Entries of a head's state that hold one row per class; all others are the same on every rank.
SHARDED = ("linear.weight", "linear.bias")


class ShardedHead(nn.Module):
    """A linear head whose class vectors are split over the ranks: `head(input, target, linear_weight=None)` and `topk`.

    Loss and gradients are those of the head on one machine. Queries and targets must be the same on all ranks. Every
    rank returns the same loss, and its backward pass gives it the gradient of its own class vectors and the whole
    gradient of the queries. The ranks exchange sums over the classes of a row, never the scores of all classes. All
    ranks must make the same calls in the same order, backward passes included.

    Args:
        head: any of the `Linear...Loss` heads; its loss and settings are used. If it has class vectors of its own,
            they must be the same on every rank, and each rank keeps the rows of its classes. If it has none
            (`in_features=None`), see the next argument.
        in_features: d, to create new class vectors here, on each rank those of its classes; None if `head` has class
            vectors, or if every call passes them as `linear_weight`.
        bias: whether the class vectors that are created here have a bias.
        sizes: number of classes of each rank; None splits them evenly.
        group: the process group of the ranks; None is the default group, or this process alone if there is none.
        device, dtype: of the class vectors that are created here.

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

    @checked
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
        # The head is kept as a submodule and loses the class vectors of other ranks: optimizers and `state_dict` then
        # see the parameters of this rank only. `span` is in the state to tell later which classes the rows are.
        self.head = head
        self.ranks = ProcessRanks(group)
        self.shards: Shards = make_shards(head.num_classes, sizes, self.ranks)
        self.register_buffer("span", torch.tensor([self.shards.span.start, self.shards.span.stop]))
        # Neither way of getting class vectors compares them over the ranks. Given ones are trusted to be the same on
        # every rank, as after the same seed or the same checkpoint; new ones need one exchange, of a seed.
        if head.linear is not None:
            head.linear = _rows_of(head.linear, self.shards)
        elif in_features is not None:
            head.linear = _new_rows(in_features, bias, self.shards, device, dtype)

    @property
    def linear_weight(self) -> Tensor:
        """The class vectors of this rank, (classes of this rank, d)."""
        return self._vectors(None)[0]

    @outside_of_graphs
    def forward(
        self,
        input: Tensor,
        target: Tensor | Target | SoftTarget,
        linear_weight: Tensor | None = None,
        **per_call: Any,
    ) -> Tensor:
        """The loss of queries (..., d), the same on every rank.

        Args:
            input: (..., d) queries, the same on every rank.
            target: as the head takes it, with ids among all classes, the same on every rank.
            linear_weight: (classes of this rank, d), to use instead of the head's own class vectors; or a DTensor
                (classes, d) that is sharded on dimension 0 over the same ranks.
            per_call: further keywords of the head's own call (`row_weight`, `exclude`, ...), the same on every rank.

        Returns:
            A scalar, or (...) for `reduction="none"`.
        """
        # All checks come before the first exchange of the computation: a rank that raises during it would leave the
        # others waiting. What only shows later (nan in the scores) is found in shared numbers, so that all ranks raise.
        call = self.ranks.agree(
            lambda: self._read(input, target, linear_weight, per_call), _num_rows(input), self.span.device
        )
        # Autocast must not round the products of a loss to half precision, on one process or on many.
        with full_precision(input):
            return self.head.compute(call)

    def _read(
        self,
        input: Tensor,
        target: Tensor | Target | SoftTarget,
        linear_weight: Tensor | None,
        per_call: Mapping[str, Any],
    ) -> HeadCall:
        """Read and check the arguments of a call on this rank, without any exchange."""
        vectors, bias = self._vectors(linear_weight)
        return self.head.read(input, vectors, bias, target, self.shards, **per_call)

    @torch.no_grad()
    def topk(
        self, input: Tensor, k: int, linear_weight: Tensor | None = None, exclude: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scores and ids of the k best of all classes for each query; see `manymax.linear_topk`.

        Args:
            input: (..., d) queries, the same on every rank.
            k: at most the number of all classes.
            linear_weight: (classes of this rank, d), to use instead of the head's own class vectors.
            exclude: (..., X) ids among all classes that must not be found, padded with -100.

        Returns:
            Scores and ids, (..., k) each, best first, the same on every rank.
        """
        # The k best of all classes are among the k best of each rank: 2 k numbers per query and rank travel, however
        # many classes there are. Scores and ids travel apart because a float32 holds no id beyond 2^24. All ranks then
        # select from the same table, so that they also agree on ties.
        ranks = self.ranks
        values, ids = ranks.agree(
            lambda: self._own_topk(input, k, linear_weight, exclude), _num_rows(input), self.span.device
        )
        values, ids = torch.cat(ranks.gather(values), -1), torch.cat(ranks.gather(ids), -1)
        values, columns = values.topk(k, dim=-1)
        return values, ids.gather(-1, columns)

    def _own_topk(
        self, input: Tensor, k: int, linear_weight: Tensor | None, exclude: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Scores and ids (among all classes) of the k best classes of this rank, (..., k) each.

        Where fewer than k classes are left, the score is -inf and the id is -100.
        """
        shards, (vectors, bias) = self.shards, self._vectors(linear_weight)
        check_linear(input, vectors, bias)
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= shards.num_classes:
            raise ArgumentError(
                f"`k` must be an integer from 1 to the number of classes, {shards.num_classes}; got {k!r}."
            )
        read_listed_ids("exclude", exclude, input.shape[:-1], shards.num_classes)
        if exclude is not None:  # in the numbering of this rank; classes of other ranks become padding
            exclude = torch.where(shards.inside(exclude), exclude - shards.start, -100)
        own = min(k, shards.size)  # k may be larger than a shard: the rest is padded, because all ranks send one shape
        given = {"linear_bias": bias, "exclude": exclude, "key": self.head.ranking_key, **self.head.scoring()}
        values, ids = linear_topk(input, vectors, own, **given)
        ids = torch.where(ids >= 0, ids + shards.start, ids)  # -100, which stands for no class, stays
        return pad(values, (0, k - own), value=-torch.inf), pad(ids, (0, k - own), value=-100)

    def full_state_dict(self) -> dict[str, Any]:
        """The state of all ranks as that of one head, on rank 0; {} on the other ranks. All ranks must call it.

        `load_state_dict` of the head without shards loads it, and so does `load_shards([state])` with any number of
        ranks.
        """
        # Every rank has the same head, hence the same names, and goes through them in the same order: each name is an
        # exchange. Only rank 0 ever holds the whole table, and only there is the result complete.
        state = self.head.state_dict()
        for name in SHARDED:
            if name in state:
                state[name] = self.ranks.gather_rows(state[name], self.shards.sizes)
        return state if self.shards.ranks.rank == 0 else {}

    def load_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the state of another run, which may have had another number of ranks and other sizes.

        Args:
            states: what `state_dict()` returned on each rank, in any order, or one `full_state_dict()`. If they were
                loaded with `torch.load(..., mmap=True)`, only the rows of this rank are read from the files.
        """
        if not states:
            raise ArgumentError("`states` must hold at least one state; got none.")
        merged, spans, parts = {}, [], []
        for state in states:
            part = {name.removeprefix("head."): value for name, value in state.items()}
            span = part.pop("span", None)  # missing in a full state, which has all classes
            spans.append((0, self.head.num_classes) if span is None else tuple(span.tolist()))
            parts.append(part)
            merged.update(part)  # what is not split over the ranks is the same in all parts: any of them will do
        if self.head.linear is not None:
            # The rows of this rank may come from several parts. Slices alone are taken of each, which on a memory map
            # reads those rows from the file and no others.
            found = overlaps(self.shards, spans)
            for name in SHARDED:
                if name in merged:
                    merged[name] = torch.cat([parts[part][name][rows] for part, rows in found])
        self.head.load_state_dict(merged)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Shards of equal size have states of the same shape, so torch alone would load the classes of another rank
        # without a word. The last argument is torch's list of messages, which it raises together at the end.
        (start, stop), stored = self.span.tolist(), state_dict.get(f"{prefix}span", self.span).tolist()
        if stored != [start, stop]:
            args[-1].append(
                f"the state holds the classes {stored[0]} to {stored[1] - 1}, this rank holds {start} to {stop - 1}:"
                " `load_shards` takes the states of all ranks."
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _vectors(self, linear_weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The class vectors and bias of this rank: `linear_weight` and no bias if it is given, else the head's own."""
        linear = self.head.linear
        if linear_weight is None:
            if linear is None:
                raise ArgumentError("this head was built without class vectors: pass `linear_weight`.")
            # The mark that torch leaves on a module whose parameters it has taken.
            if getattr(linear, "_is_fsdp_managed_module", False):
                raise ArgumentError(
                    "`fully_shard` has taken the class vectors of a ShardedHead for parameters that are the same on all"
                    " ranks, and has mixed the classes of different ranks: pass it"
                    " `ignored_params=set(sharded_head.parameters())`."
                )
            return linear.weight, linear.bias
        if not isinstance(linear_weight, Tensor):
            raise ArgumentTypeError(f"`linear_weight` must be a tensor; got {type(linear_weight).__name__}.")
        if is_distributed(linear_weight):
            return local_shard(linear_weight, self.shards), None
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
    """Number of queries; 0 for what is no input at all, which the checks of `agree` refuse in words of their own."""
    return input.shape[:-1].numel() if isinstance(input, Tensor) and input.ndim else 0


def _rows_of(linear: nn.Linear, shards: Shards) -> nn.Linear:
    """The rows of this rank, copied from class vectors that every rank has, so that the others can be freed."""
    # "meta" allocates nothing for the weights that are replaced at once.
    own = nn.Linear(linear.in_features, shards.size, bias=linear.bias is not None, device="meta")
    own.weight = nn.Parameter(linear.weight.detach()[shards.span].clone(), linear.weight.requires_grad)
    if linear.bias is not None:
        own.bias = nn.Parameter(linear.bias.detach()[shards.span].clone(), linear.bias.requires_grad)
    return own


def _new_rows(
    in_features: int, bias: bool, shards: Shards, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Linear:
    """New class vectors of this rank, drawn like those of torch.nn.Linear, uniformly within 1/sqrt(d) of 0.

    All ranks together hold the same vectors for every number of ranks: the classes are drawn in blocks of `INIT_ROWS`,
    each from a seed of its own, and a rank draws the blocks that its classes are in.
    """
    own = nn.utils.skip_init(nn.Linear, in_features, shards.size, bias=bias, device=device or "cpu", dtype=dtype)
    # Rank 0 draws the seed and tells the others, whose own generators may be in another state. It stays below 2^48, so
    # that the number of a block can be added to it.
    seed = int(shards.ranks.first(torch.randint(2**48, (), device=own.weight.device)))
    bound = 1 / math.sqrt(max(1, in_features))
    start, stop = shards.span.start, shards.span.stop
    with torch.no_grad():
        for block in range(start // INIT_ROWS, -(-stop // INIT_ROWS)):
            # Always a whole block, on the CPU and in torch's default dtype: the numbers of a class must not depend on
            # where a shard begins or on which device it lives.
            random = torch.Generator().manual_seed(seed + block)
            drawn = torch.empty(INIT_ROWS, in_features + bias).uniform_(-bound, bound, generator=random)
            # Keep what lies in the shard: the first and the last block may stick out of it.
            low, high = max(start, block * INIT_ROWS), min(stop, (block + 1) * INIT_ROWS)
            rows = drawn[low - block * INIT_ROWS : high - block * INIT_ROWS]
            own.weight[low - start : high - start] = rows[:, :in_features]
            if bias:
                own.bias[low - start : high - start] = rows[:, in_features]
    return own
