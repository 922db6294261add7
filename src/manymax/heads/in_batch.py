"""Losses of two towers: queries against the documents of their batch, by the kernels of the exact heads.

The documents are the class vectors of a head, and the own document of a query is its target. So the table of all scores
is never made, and every exact member of the family is a contrastive loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manymax.engine.gather import agreed, world
from manymax.engine.member import Member
from manymax.engine.options import HeadOptions, Options, read_options
from manymax.engine.pairs import FORM, Alike, BatchCandidates, Pairs, read_pairs
from manymax.errors import ArgumentError
from manymax.heads.build import head_function
from manymax.members import BASELINE, FAMILY
from manymax.members.siglip import MEMBER as SIGLIP
from manymax.ops.arguments import checked

# Keywords of heads that a batch of pairs has in another form, and in which.
REPLACED = {
    "exclude": "`ids` and `groups` say which documents are no negatives",
    "linear_bias": "`log_q` is what is subtracted from the scores of a document",
    "weight": "`row_weight` has a weight for each pair",
    "ignore_index": "a pair with a `row_weight` of 0 is not computed, and its document is still a candidate",
    "multilabel": "each query has one positive",
    "shift": "pairs are no sequences",
}

# Scores held at a time. A batch has few candidates, so that blocks of the usual size would be most of the memory of the
# loss; with these, 8,192 pairs take as long and 18 MB instead of 56.
BLOCK_SCORES = 1 << 20

# Heads are made once: their signatures and documentation take longer than a small batch. The member is kept beside, so
# that another one of the same name gets a head of its own.
_heads: dict[str, tuple[Member, Callable[..., Any]]] = {}


@checked
def in_batch_loss(
    queries: Tensor,
    documents: Tensor,
    *,
    hard: Tensor | None = None,
    ids: Tensor | None = None,
    groups: Tensor | None = None,
    log_q: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    normalize: bool = False,
    symmetric: bool = False,
    gather: bool | dist.ProcessGroup = False,
    member: str | Member = BASELINE.name,
    **keywords: Any,
) -> Any:
    """The loss of finding the own document of each query among all documents of the batch, without a table of scores.

    With q_i the queries, v_j the candidates (first the N documents, then the hard negatives) and l a member's loss,

        s_ij = q_i . v_j / temperature - log_q_j          loss = mean_i l(i, s_i), without the j that are left out for i

    For softmax that is InfoNCE, -log (exp s_ii / sum_j exp s_ij): sentence-transformers' MultipleNegativesRankingLoss
    with `normalize=True` and temperature = 1 / scale, and CLIP's loss with `symmetric=True`.

    Args:
        queries: (N, d).
        documents: (N, d); document i is the positive of query i and a negative of the others.
        hard: (M, d) or (N, H, d) further documents, negatives of all queries.
        ids: (N,) integers, the identities of the documents, or (N + M,), with those of the hard negatives. A candidate
            with the id of the own positive is no negative. -100 stands for an id that is like no other.
        groups: (N,) integers, the groups of the pairs, such as users or equal queries. The document of a pair is no
            negative of queries of the same group. -100 stands for a group of its own.
        log_q: (N + M,) the log of the probability that a candidate is in a batch. It is subtracted from the scores of
            all candidates, the positive included (the logQ correction of Yi et al. 2019): popular documents would be
            pushed away otherwise, because they are negatives more often. Not in the direction of `symmetric`, whose
            candidates are queries.
        temperature: divides the products; a tensor gets its gradient.
        normalize: divide all vectors by their norms, so that products are cosines.
        symmetric: add the loss of finding the own query of each document among all queries, and take the mean of both.
            Hard negatives have no query and are not in the second one. `ids` and `groups` hold for both.
        gather: True, or a process group: documents and hard negatives of all ranks are candidates, with gradients that
            go back to the rank that they come from. Each rank gets the loss of its own queries; data parallel training
            takes the mean of the gradients over the ranks, and so of these losses. All ranks must call alike, and run
            backward.
        member: an exact member of the family: a name, an alias, or an entry.
        keywords: settings of the member, such as `alpha`, and further keywords of its head: `row_weight` (N,),
            `reduction`, `num_items`, `decoupled`, `z_loss`, `softcap`, `label_smoothing`, `stats`, `options`.

    Returns:
        A scalar, or (N,) for `reduction="none"`.

    Pairs that are left out are listed, some queries at a time if groups are large: no list is as large as a table.

    Example:
        >>> queries, documents = torch.eye(3), torch.eye(3)
        >>> in_batch_loss(queries, documents, temperature=0.5)
        tensor(0.2395)
        >>> in_batch_loss(queries, documents, temperature=0.5, ids=torch.tensor([7, 7, 9]))  # two are one document
        tensor(0.1645)
        >>> in_batch_loss(queries, documents, temperature=0.5, member="sparsemax", symmetric=True)
        tensor(0.)

    References:
        van den Oord et al. (2018); Yi et al., RecSys 2019; Radford et al., ICML 2021.
    """
    for name in keywords:
        if name in REPLACED:
            raise ArgumentError(f"`{name}` is no keyword of `in_batch_loss`: {REPLACED[name]}.")
    if symmetric and keywords.get("stats"):
        raise ArgumentError("`stats` has no meaning with `symmetric`, whose loss is the mean of two: leave one out.")
    entry = FAMILY[member] if isinstance(member, str) else member
    if entry.kind != "exact":
        raise ArgumentError(
            f"`member` must be exact, to see all documents of a batch; {entry.name} is {entry.kind}. A sampled head"
            " takes negatives from the batch with `manymax.samplers.InBatchSampler`."
        )
    given = queries, documents, hard, ids, groups, log_q
    pairs, candidates, all_queries = _read(*given, gather=gather, with_queries=symmetric)
    head, bias = _head(entry), candidates.log_q
    shared = {**keywords, "temperature": temperature, "normalize": normalize}
    alike = candidates.alike(len(queries))
    to_documents = _loss(
        head, queries, candidates.vectors, alike, linear_bias=None if bias is None else -bias, **shared
    )
    if not symmetric:
        return to_documents
    alike = candidates.alike(len(queries), only_pairs=True)
    return (to_documents + _loss(head, pairs.documents, all_queries, alike, **shared)) / 2


@checked
def siglip_loss(
    queries: Tensor,
    documents: Tensor,
    temperature: float | Tensor = 0.1,
    bias: float | Tensor = -10.0,
    *,
    hard: Tensor | None = None,
    ids: Tensor | None = None,
    groups: Tensor | None = None,
    normalize: bool = False,
    gather: bool | dist.ProcessGroup = False,
    row_weight: Tensor | None = None,
    num_items: float | Tensor | None = None,
    reduction: str = "mean",
    options: Options = None,
) -> Tensor:
    """SigLIP's loss of queries and documents: each pair is judged alone, a match or none, without a table of scores.

        s_ij = q_i . v_j / temperature + bias          loss = -mean_i sum_j log sigmoid(z_ij s_ij)

    with z_ii = 1 for the pairs and z_ij = -1 for all others.

    Args:
        queries, documents, hard, ids, groups, normalize, gather: as in `in_batch_loss`.
        temperature: divides the products; a tensor gets its gradient. Zhai et al. begin at 0.1.
        bias: added to all scores; a tensor gets its gradient. Zhai et al. begin at -10: most pairs are no match.
        row_weight: (N,) a factor of the loss of each query; a mean divides by their sum.
        num_items: what a mean divides by instead of the number of queries.
        reduction: "none", "mean" or "sum" over the queries.
        options: `HeadOptions` or a mapping of its fields.

    Returns:
        A scalar, or (N,) for `reduction="none"`.

    Example:
        >>> siglip_loss(torch.eye(3), torch.eye(3), temperature=0.5, bias=-1.0)
        tensor(0.9398)

    References:
        Zhai et al., ICCV 2023.
    """
    _, candidates, _ = _read(queries, documents, hard, ids, groups, None, gather=gather, with_queries=False)
    vectors = candidates.vectors
    offset = torch.as_tensor(bias, device=vectors.device)
    if offset.numel() != 1:
        raise ArgumentError(f"`bias` must be a number or a tensor with one; got shape {tuple(offset.shape)}.")
    loss: Tensor = _loss(
        _head(SIGLIP),
        queries,
        vectors,
        candidates.alike(len(queries)),
        linear_bias=offset.to(torch.promote_types(vectors.dtype, torch.float32)).reshape(1).expand(len(vectors)),
        temperature=temperature,
        normalize=normalize,
        row_weight=row_weight,
        num_items=num_items,
        reduction=reduction,
        options=options,
    )
    return loss


def _read(*tensors: Any, gather: bool | dist.ProcessGroup, with_queries: bool) -> tuple[Pairs, BatchCandidates, Tensor]:
    """The pairs of this process, the candidates of its queries, and all queries; on several ranks all raise or none.

    Args:
        tensors: the arguments of `read_pairs`.
        gather: as in `in_batch_loss`.
        with_queries: whether the queries of other ranks are needed.
    """
    group = None if isinstance(gather, bool) else gather
    if gather is False or world(group) == 1:
        pairs = read_pairs(*tensors)
        return pairs, pairs.candidates(), pairs.queries
    device = next((tensor.device for tensor in tensors if isinstance(tensor, Tensor)), torch.device("cpu"))
    pairs = agreed(lambda: read_pairs(*tensors), Pairs.form, FORM, device, group)
    return pairs, *pairs.gathered(group, with_queries)


def _loss(head: Callable[..., Any], queries: Tensor, vectors: Tensor, alike: Alike, **keywords: Any) -> Any:
    """The loss of queries against candidates `vectors`, in one call of the head, or in several if lists are long.

    Args:
        head: the head of a member.
        queries: (N, d). vectors: (C, d).
        alike: the positives, and which candidates are no negatives.
        keywords: of the head.
    """
    keywords["options"] = _with_small_blocks(keywords.get("options"))
    count, step = len(queries), alike.rows_at_a_time
    if step >= count or keywords.get("stats"):
        return head(queries, vectors, alike.own, exclude=alike.listed(slice(None)), **keywords)
    reduction, weight = keywords.get("reduction", "mean"), keywords.pop("row_weight", None)
    if reduction == "mean" and keywords.get("num_items") is None:
        # Every part divides by what all of them count, so that the means of the parts add up.
        keywords["num_items"] = count if weight is None else weight.sum().clamp(min=torch.finfo(torch.float32).tiny)
    parts = []
    for start in range(0, count, step):
        rows = slice(start, start + step)
        weights = None if weight is None else weight[rows]
        own, exclude = alike.own[rows], alike.listed(rows)
        parts.append(head(queries[rows], vectors, own, exclude=exclude, row_weight=weights, **keywords))
    return torch.cat(parts) if reduction == "none" else torch.stack(parts).sum(0)


def _with_small_blocks(options: Options) -> HeadOptions:
    """The options of a call, with blocks of `BLOCK_SCORES` unless the caller has set their size."""
    read = read_options(options)
    if read.block_rows is not None or read.block_scores != HeadOptions.block_scores:
        return read
    return replace(read, block_scores=BLOCK_SCORES)


def _head(member: Member) -> Callable[..., Any]:
    """The head of a member as a function; the same one at every call."""
    if member.name not in _heads or _heads[member.name][0] is not member:
        _heads[member.name] = member, head_function(member)
    return _heads[member.name][1]


class _TwoTowerLoss(nn.Module):
    """A loss of two towers with a temperature, which may be learned: the parameter is its logarithm, as in CLIP."""

    def __init__(self, temperature: float, learnable: bool) -> None:
        super().__init__()
        if not 0 < temperature < math.inf:
            raise ArgumentError(f"`temperature` must be positive and finite; got {temperature!r}.")
        # Its logarithm, so that it stays positive whatever an optimiser does.
        self.log_temperature = nn.Parameter(torch.tensor(float(temperature)).log()) if learnable else None
        self.fixed_temperature = temperature

    @property
    def temperature(self) -> float | Tensor:
        """What the products are divided by: a number, or a tensor with a gradient if it is learned."""
        return self.fixed_temperature if self.log_temperature is None else self.log_temperature.exp()

    def extra_repr(self) -> str:
        """What the printed module shows."""
        temperature = self.temperature
        value = temperature.detach() if isinstance(temperature, Tensor) else temperature
        return f"temperature={float(value):.4g}"


class InBatchLoss(_TwoTowerLoss):
    """`in_batch_loss` as a module.

    Args:
        temperature: divides the products.
        learnable: learn the temperature along with the towers; the parameter is its logarithm.
        keywords: the other keywords of `in_batch_loss` that do not hold something about each pair.

    Example:
        >>> loss = InBatchLoss(temperature=0.07, learnable=True, normalize=True, symmetric=True)  # CLIP
        >>> loss(torch.eye(2), torch.eye(2)).backward()
        >>> loss, loss.log_temperature.grad > 0
        (InBatchLoss(temperature=0.07), tensor(True))
    """

    @checked
    def __init__(self, temperature: float = 1.0, *, learnable: bool = False, **keywords: Any) -> None:
        super().__init__(temperature, learnable)
        self.keywords = keywords

    def forward(self, queries: Tensor, documents: Tensor, **about_pairs: Any) -> Any:
        """The loss of queries and documents (N, d), with what is known about each pair: `hard`, `ids` and the like."""
        return in_batch_loss(queries, documents, temperature=self.temperature, **self.keywords, **about_pairs)


class SiglipLoss(_TwoTowerLoss):
    """`siglip_loss` as a module with a temperature and a bias, which are learned.

    Args:
        temperature: divides the products.
        bias: added to the scores.
        learnable: whether to learn both along with the towers; the parameters are the bias and the temperature's log.
        keywords: the other keywords of `siglip_loss` that do not hold something about each pair.

    Example:
        >>> SiglipLoss(normalize=True)(torch.eye(2), torch.eye(2))
        tensor(0.6932, grad_fn=<BlockLossBackward>)
    """

    @checked
    def __init__(
        self, temperature: float = 0.1, bias: float = -10.0, *, learnable: bool = True, **keywords: Any
    ) -> None:
        super().__init__(temperature, learnable)
        if not math.isfinite(bias):
            raise ArgumentError(f"`bias` must be finite; got {bias!r}.")
        self.bias = nn.Parameter(torch.tensor(float(bias))) if learnable else float(bias)
        self.keywords = keywords

    def forward(self, queries: Tensor, documents: Tensor, **about_pairs: Any) -> Tensor:
        """The loss of queries and documents (N, d), with what is known about each pair: `hard`, `ids` and the like."""
        return siglip_loss(queries, documents, self.temperature, self.bias, **self.keywords, **about_pairs)
