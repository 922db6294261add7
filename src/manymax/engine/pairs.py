"""A batch of pairs of a query and a document: reading and gathering it, and which documents are no negatives of whom.

The candidates of a query are the documents of all pairs, and after them the hard negatives. Its own document is the
positive; others that are the same document, or whose pair is of the same group, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from manymax.engine.gather import all_rows_with_gradients, row_counts
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.checks import visible

UNKNOWN = -100  # an identity that is not known, and so like no other
LISTED = 1 << 21  # candidates that are listed at a time: 16 MB of ids


@dataclass(frozen=True)
class SortedKeys:
    """Keys of candidates in ascending order, so that equal ones are neighbours: no table of all pairs is needed.

    order: (C,) the candidates by their keys.
    first, count: (N,) where the candidates with the key of each query begin in that order, and how many there are; 0
        for a key that is `UNKNOWN`.
    """

    order: Tensor
    first: Tensor
    count: Tensor

    @classmethod
    def of(cls, keys: Tensor, own: Tensor) -> SortedKeys:
        """From keys (C,) and the candidates (N,) whose keys are those of the queries."""
        order = keys.argsort(stable=True)
        ascending, mine = keys[order], keys[own]
        first = torch.searchsorted(ascending, mine)
        count = torch.where(mine == UNKNOWN, 0, torch.searchsorted(ascending, mine, right=True) - first)
        return cls(order, first, count)

    @property
    def width(self) -> int:
        """The largest number of candidates with the key of one query; 0 where that is the own positive alone."""
        most = int(self.count.max())
        return most if most > 1 else 0


@dataclass(frozen=True)
class Alike:
    """Which candidates are no negatives of which query, because a key of theirs is that of its positive.

    own: (N,) the positives. keys: of each kind, identities or groups.
    """

    own: Tensor
    keys: Sequence[SortedKeys]

    @property
    def rows_at_a_time(self) -> int:
        """For how many queries to make lists at a time. A group of half of the batch has lists as large as a table."""
        return max(64, LISTED // max(1, sum(keys.width for keys in self.keys)))

    def listed(self, rows: slice) -> Tensor | None:
        """(n, E) the candidates that are no negatives of some queries, padded with -100; None if there are none."""
        own, found = self.own[rows].unsqueeze(1), []
        for keys in self.keys:
            if keys.width:
                step = torch.arange(keys.width, device=own.device)
                place = keys.first[rows].unsqueeze(1) + step
                candidate = keys.order[place.clamp(max=len(keys.order) - 1)]
                others = (step < keys.count[rows].unsqueeze(1)) & (candidate != own)
                found.append(torch.where(others, candidate, UNKNOWN))
        return torch.cat(found, 1) if found else None


@dataclass(frozen=True)
class BatchCandidates:
    """What the queries of this process are compared with, and how they are told apart.

    vectors: (C, d) the documents of all pairs, then the hard negatives.
    pairs: how many of the candidates are documents of pairs.
    start: the pair that is the first one of this process.
    ids: (C,) or (pairs,) identities of the candidates, or None.
    groups: (pairs,) groups of the pairs, or None.
    log_q: (C,) or None.
    """

    vectors: Tensor
    pairs: int
    start: int
    ids: Tensor | None
    groups: Tensor | None
    log_q: Tensor | None

    def own(self, count: int) -> Tensor:
        """The candidates (N,) that are the positives of the N = `count` queries of this process, in order."""
        return torch.arange(self.start, self.start + count, device=self.vectors.device)

    def alike(self, count: int, only_pairs: bool = False) -> Alike:
        """Which candidates are no negatives of each query of this process.

        Args:
            count: N, the queries of this process.
            only_pairs: whether to leave out the hard negatives.
        """
        own = self.own(count)
        ids = self.ids if self.ids is None or not only_pairs else self.ids[: self.pairs]
        return Alike(own, [SortedKeys.of(keys, own) for keys in (ids, self.groups) if keys is not None])


@dataclass(frozen=True)
class Pairs:
    """The pairs of this process, read and checked.

    queries, documents: (N, d). hard: (M, d), or None.
    ids: (N,) or (N + M,), or None. groups: (N,), or None. log_q: (N + M,), or None.
    """

    queries: Tensor
    documents: Tensor
    hard: Tensor | None
    ids: Tensor | None
    groups: Tensor | None
    log_q: Tensor | None

    def form(self) -> Sequence[int]:
        """`FORM` integers that must be the same on all processes that gather their documents."""
        given = self.hard, self.ids, self.groups, self.log_q
        graphs = (tensor is not None and tensor.requires_grad for tensor in (self.queries, self.documents, *given))
        longer = self.ids is not None and len(self.ids) > len(self.documents)
        sizes = self.documents.shape[1], self.documents.dtype.itemsize, longer
        return [*sizes, *(tensor is not None for tensor in given), *graphs]

    def candidates(self) -> BatchCandidates:
        """The candidates, all of this process."""
        vectors = self.documents if self.hard is None else torch.cat([self.documents, self.hard])
        return BatchCandidates(vectors, len(self.documents), 0, self.ids, self.groups, self.log_q)

    def gathered(self, group: dist.ProcessGroup | None, with_queries: bool) -> tuple[BatchCandidates, Tensor]:
        """The candidates of all processes, and all their queries if asked for.

        Gradients of the vectors go back to the processes that they come from.
        """
        own = len(self.documents)
        counts = row_counts(self.documents, group)
        hard_counts = [] if self.hard is None else row_counts(self.hard, group)

        def everywhere(values: Tensor) -> Tensor:
            """Rows of the pairs of all processes, followed by those of the hard negatives if `values` has both."""
            found = all_rows_with_gradients(values[:own], counts, group)
            if len(values) == own:
                return found
            return torch.cat([found, all_rows_with_gradients(values[own:], hard_counts, group)])

        here = self.candidates()
        ids, groups, log_q = (None if x is None else everywhere(x) for x in (self.ids, self.groups, self.log_q))
        start = sum(counts[: dist.get_rank(group)])
        candidates = BatchCandidates(everywhere(here.vectors), sum(counts), start, ids, groups, log_q)
        return candidates, everywhere(self.queries) if with_queries else self.queries


FORM = 13  # the length of `Pairs.form`


def read_pairs(
    queries: Tensor,
    documents: Tensor,
    hard: Tensor | None,
    ids: Tensor | None,
    groups: Tensor | None,
    log_q: Tensor | None,
) -> Pairs:
    """Check the tensors of a batch of pairs against each other and flatten the hard negatives to (M, d).

    Args:
        queries, documents: (N, d). hard: (M, d) or (N, H, d).
        ids: (N,) or (N + M,). groups: (N,). log_q: (N + M,).
    """
    for name, vectors in (("queries", queries), ("documents", documents), ("hard", hard)):
        if vectors is not None and (not isinstance(vectors, Tensor) or not vectors.is_floating_point()):
            kind = vectors.dtype if isinstance(vectors, Tensor) else type(vectors).__name__
            raise ArgumentTypeError(f"`{name}` must be a float tensor of vectors; got {kind}.")
    if queries.ndim != 2 or queries.shape != documents.shape or not len(queries):
        raise ArgumentError(
            "`queries` and `documents` must both be (N, d), row i of each being a pair, with at least one;"
            f" got {tuple(queries.shape)} and {tuple(documents.shape)}."
        )
    if hard is not None:
        if hard.ndim not in (2, 3) or hard.shape[-1] != queries.shape[1] or not hard.numel():
            raise ArgumentError(
                f"`hard` must be (M, {queries.shape[1]}) or (N, H, {queries.shape[1]}), with at least one vector;"
                f" got {tuple(hard.shape)}. None is no hard negatives."
            )
        hard = hard.reshape(-1, hard.shape[-1])
    count = len(documents)
    everything = count if hard is None else count + len(hard)
    _check_keys("ids", ids, (count, everything))
    _check_keys("groups", groups, (count,))
    if log_q is not None:
        if not isinstance(log_q, Tensor) or not log_q.is_floating_point() or log_q.shape != (everything,):
            shape = tuple(log_q.shape) if isinstance(log_q, Tensor) else type(log_q).__name__
            raise ArgumentError(
                f"`log_q` must be a float tensor ({everything},), for the documents and then the hard negatives;"
                f" got {shape}."
            )
        if visible(log_q) and not log_q.isfinite().all():
            raise ArgumentError("`log_q` must be finite: what is a candidate has a probability above 0.")
    return Pairs(queries, documents, hard, ids, groups, log_q)


def _check_keys(name: str, keys: Tensor | None, lengths: Sequence[int]) -> None:
    """Raise unless the keys are None or integers (n,) with n one of the lengths."""
    if keys is None:
        return
    if not isinstance(keys, Tensor) or keys.is_floating_point() or keys.is_complex() or keys.dtype == torch.bool:
        kind = keys.dtype if isinstance(keys, Tensor) else type(keys).__name__
        raise ArgumentTypeError(f"`{name}` must be a tensor of integers; got {kind}.")
    if keys.ndim != 1 or len(keys) not in lengths:
        wanted = " or ".join(f"({length},)" for length in dict.fromkeys(lengths))
        raise ArgumentError(f"`{name}` must have shape {wanted}; got {tuple(keys.shape)}.")
