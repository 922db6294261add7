"""MIDX: a proposal that depends on the query, from class vectors whose two halves are quantised."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from manymax.errors import ArgumentError
from manymax.ops.arguments import checked
from manymax.ops.categorical import draw_categorical
from manymax.ops.checks import visible
from manymax.ops.lookup import lookup
from manymax.ops.row_blocks import row_blocks
from manymax.samplers.base import Draw, Request, Sampler, SamplerEntry
from manymax.samplers.checks import check_positive_integer
from manymax.settings import Setting


class MIDXSampler(Sampler):
    """Classes with probabilities proportional to the exponential of a quantised score, exactly normalised.

    Each of the two halves of every class vector is replaced by the nearest of K codewords. Classes with the same pair
    of codewords form a cell. A draw chooses a cell, then one of its classes uniformly:

        q(c) = exp(s(cell of c)) / sum over cells of size * exp(s(cell)),    s(cell) = x_1 . u_cell + x_2 . v_cell

    with (x_1, x_2) the halves of the query and (u, v) the codewords. With one codeword per class q is softmax(s). A
    query costs O(K d + cells), where cells <= min(C, K^2).

    The codewords are computed from the class vectors by `refresh`, once per epoch as a rule; between two refreshes q
    follows the queries, not the class vectors. A sampler without codewords calls it at the first draw. Biases of the
    classes are not used.

    `shared=True` draws from the mean of q over the rows, and log q is the logarithm of that mean.

    Args:
        num_classes: C >= 1.
        num_codewords: K >= 1, per half; with more of them q is closer to the softmax of the model.
        num_iterations: of k-means in a refresh, which starts from the codewords of the refresh before.

    Example:
        >>> weight = torch.tensor([[2.0, 0.0], [0.0, 2.0], [-2.0, 0.0], [0.0, -2.0]])
        >>> sampler = MIDXSampler(4, num_codewords=4)
        >>> sampler.refresh(weight, generator=torch.Generator().manual_seed(0))
        >>> sampler.log_probs(input=torch.tensor([[1.0, 0.0]])).exp().mul(100).round().tolist()
        [[78.0, 10.0, 1.0, 10.0]]

    References:
        Lian et al. (2020), Chen et al. (2022): the inverted multi-index as a proposal.
    """

    note = "log q of one draw, exact for the codewords of the last refresh"
    codewords: Tensor
    cell_codes: Tensor
    cell_start: Tensor
    cell_of_class: Tensor
    members: Tensor

    @checked
    def __init__(self, num_classes: int, num_codewords: int = 32, *, num_iterations: int = 10) -> None:
        super().__init__(num_classes)
        self.num_codewords = check_positive_integer("num_codewords", num_codewords)
        self.num_iterations = check_positive_integer("num_iterations", num_iterations)
        self.register_buffer("codewords", torch.empty(0, 0))  # (K, d): first halves | second halves
        self.register_buffer("cell_codes", torch.empty(0, 2, dtype=torch.int64))  # (cells, 2): codewords of a cell
        self.register_buffer("cell_start", torch.zeros(1, dtype=torch.int64))  # (cells + 1,): positions in members
        self.register_buffer("cell_of_class", torch.empty(0, dtype=torch.int64))  # (C,)
        self.register_buffer("members", torch.empty(0, dtype=torch.int64))  # (C,): classes sorted by cell

    @torch.no_grad()
    @checked
    def refresh(self, linear_weight: Tensor, generator: torch.Generator | None = None) -> None:
        """Compute the codewords and cells of the given class vectors.

        Args:
            linear_weight: (C, d) finite class vectors.
            generator: for the first refresh, whose k-means starts from random classes; on the device of the vectors.
        """
        weight = self._checked(linear_weight)
        if self.codewords.shape[1] != weight.shape[1]:
            chosen = torch.randperm(self.num_classes, generator=generator, device=weight.device)[: self.num_codewords]
            self.codewords = weight[chosen]
        halves = zip(_halves(weight), _halves(self.codewords.to(weight)), strict=True)
        quantised = [_k_means(points, codewords, self.num_iterations) for points, codewords in halves]
        self.codewords = torch.cat([codewords for codewords, _ in quantised], dim=1)
        (_, first), (_, second) = quantised
        pair = first * len(self.codewords) + second
        cell, self.cell_of_class, size = torch.unique(pair, return_inverse=True, return_counts=True)
        self.cell_codes = torch.stack([cell // len(self.codewords), cell % len(self.codewords)], dim=1)
        self.cell_start = torch.nn.functional.pad(size.cumsum(0), (1, 0))
        self.members = self.cell_of_class.argsort(stable=True)

    def draw(self, request: Request) -> Draw:
        """Draw cells by their probabilities, then a class of each cell."""
        if request.input is None:
            raise ArgumentError("`input` must be given: q depends on the query; got None.")
        if not self.members.numel() and request.linear_weight is not None:
            self.refresh(request.linear_weight, request.generator)
        draw = self._draw_shared if request.shared else self._draw_rows
        return draw(request, request.input)

    def log_prob_of(self, ids: Tensor, input: Tensor | None, shared: bool) -> Tensor:
        """log q, or the log of its mean over the queries if shared."""
        if input is None:
            raise ArgumentError("`input` must be given: q depends on the query; got None.")
        blocks = []
        for rows in self._blocks(input, ids.shape[-1]):
            block = self._read(self._cell_log_probs(input[rows]), ids if ids.dim() == 1 else ids[rows])
            blocks.append(block.logsumexp(0, keepdim=True) if shared else block)
        log_q = torch.cat(blocks)
        return log_q.logsumexp(0) - math.log(len(input)) if shared else log_q

    def _draw_rows(self, request: Request, input: Tensor) -> Draw:
        """k draws per row; draws, their log q and that of the target come from one table of cells per block of rows."""
        target = request.target
        ids, log_q, log_q_target = [], [], []
        for rows in self._blocks(input, request.count):
            table = self._cell_log_probs(input[rows])
            cells = draw_categorical(table, request.count, request.generator)
            ids.append(self._draw_class_of(cells, request.generator))
            log_q.append(self._read(table, ids[-1]))
            if target is not None:
                log_q_target.append(self._read(table, target[rows].reshape(len(table), -1)))
        return Draw(
            torch.cat(ids),
            log_q=torch.cat(log_q).to(request.dtype),
            log_q_target=None if target is None else torch.cat(log_q_target).view(target.shape).to(request.dtype),
            note=self.note,
        )

    def _draw_shared(self, request: Request, input: Tensor) -> Draw:
        """k draws from the mean of q over the rows: each one from the q of a row that is chosen at random."""
        row = torch.randint(len(input), (request.count,), generator=request.generator, device=input.device)
        cells = [
            draw_categorical(self._cell_log_probs(input[row[block]]), 1, request.generator)
            for block in self._blocks(row, 1)
        ]
        ids = self._draw_class_of(torch.cat(cells).squeeze(1), request.generator)
        target = request.target
        return Draw(
            ids,
            log_q=self.log_prob_of(ids, input, shared=True).to(request.dtype),
            log_q_target=None
            if target is None
            else self.log_prob_of(target.reshape(-1), input, shared=True).view(target.shape).to(request.dtype),
            note=self.note,
        )

    def _cell_log_probs(self, input: Tensor) -> Tensor:
        """The log-probability of every cell for every query, (N, cells): log softmax of score + log size."""
        if not self.members.numel():
            raise ArgumentError(
                "the sampler has no codewords yet: call `refresh(linear_weight)`, or pass `linear_weight`."
            )
        if input.shape[1] != self.codewords.shape[1]:
            raise ArgumentError(
                f"`input` must be (N, {self.codewords.shape[1]}), as wide as the class vectors of the last refresh; "
                f"got shape {tuple(input.shape)}."
            )
        input = input.to(torch.promote_types(input.dtype, self.codewords.dtype))
        first, second = (
            (x @ words.to(x).T).index_select(1, code)
            for x, words, code in zip(_halves(input), _halves(self.codewords), self.cell_codes.unbind(1), strict=True)
        )
        return (first + second + self._cell_size().log()).log_softmax(-1)

    def _read(self, table: Tensor, ids: Tensor) -> Tensor:
        """log q of ids (N, k), or (k,) for every row, from the log-probabilities of the cells (N, cells)."""
        cell = lookup(self.cell_of_class, ids)
        log_size = lookup(self._cell_size().log(), cell)
        return (table.index_select(1, cell) if ids.dim() == 1 else table.gather(1, cell)) - log_size

    def _draw_class_of(self, cell: Tensor, generator: torch.Generator | None) -> Tensor:
        """A class of each given cell, uniformly."""
        start, end = lookup(self.cell_start, cell), lookup(self.cell_start, cell + 1)
        height = torch.rand(cell.shape, generator=generator, device=cell.device, dtype=torch.float64)
        # the product may be rounded up to the size of the cell
        return lookup(self.members, torch.minimum(start + (height * (end - start)).long(), end - 1))

    def _cell_size(self) -> Tensor:
        return self.cell_start.diff().to(self.codewords.dtype)

    def _blocks(self, rows: Tensor, num_ids: int) -> list[slice]:
        """Blocks of rows that bound the memory of the tables (N, cells), about 4 at a time, and of the ids."""
        return row_blocks(len(rows), row_size=8 * (4 * len(self.cell_codes) + num_ids))

    def _checked(self, linear_weight: Tensor) -> Tensor:
        """The class vectors in float32 at least; raises unless they are (C, d) and finite."""
        if linear_weight.dim() != 2 or len(linear_weight) != self.num_classes:
            raise ArgumentError(
                f"`linear_weight` must be ({self.num_classes}, d), one vector per class; "
                f"got shape {tuple(linear_weight.shape)}."
            )
        if visible(linear_weight) and not linear_weight.isfinite().all():
            raise ArgumentError("`linear_weight` must be finite; got nan or inf.")
        return linear_weight.to(torch.promote_types(linear_weight.dtype, torch.float32))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load buffers of any shape, because the number of cells depends on the data; C must be the same."""
        stored = state_dict.get(prefix + "members")
        if stored is not None and len(stored) not in (0, self.num_classes):
            args[-1].append(f"the stored sampler has {len(stored)} classes, this one {self.num_classes}.")
        for name, buffer in list(self._buffers.items()):
            if buffer is not None and prefix + name in state_dict:
                self._buffers[name] = torch.empty_like(state_dict[prefix + name], device=buffer.device)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _halves(vectors: Tensor) -> tuple[Tensor, Tensor]:
    half = vectors.shape[1] // 2
    return vectors[:, :half], vectors[:, half:]


def _k_means(points: Tensor, codewords: Tensor, num_iterations: int) -> tuple[Tensor, Tensor]:
    """K-means: the codewords (K, d), each the mean of the points nearest to it, and the code (C,) of every point."""
    # About a thousand points per codeword are enough for its mean; all points are only used in the last assignment.
    sample = points[:: max(1, len(points) // (1024 * len(codewords)))]
    for _ in range(num_iterations):
        code = _nearest(sample, codewords)
        size = code.bincount(minlength=len(codewords)).unsqueeze(1)
        total = torch.zeros_like(codewords).index_add_(0, code, sample)
        codewords = torch.where(size > 0, total / size.clamp(min=1), codewords)  # a codeword without points stays
    return codewords, _nearest(points, codewords)


def _nearest(points: Tensor, codewords: Tensor) -> Tensor:
    """The number of the codeword nearest to each point, (C,)."""
    # |x - u|^2 = |x|^2 - 2 (x . u - |u|^2 / 2): the nearest codeword has the largest bracket, and no differences of all
    # pairs have to be formed
    offset = codewords.square().sum(1) / 2
    blocks = row_blocks(len(points), row_size=8 * len(codewords))
    return torch.cat([(points[rows] @ codewords.T - offset).argmax(1) for rows in blocks])


@checked
def make(num_classes: int, counts: Tensor | None = None, **options: int) -> MIDXSampler:
    """Build the sampler for `SAMPLERS`; `counts` are not used."""
    return MIDXSampler(num_classes, **options)


ENTRY = SamplerEntry(
    name="midx",
    aliases=("adaptive",),
    title="Adaptive (inverted multi-index)",
    module=MIDXSampler,
    make=make,
    law="exp(quantised score of c) / normaliser",
    citation="Lian et al. (2020)",
    needs_scores=True,
    settings=(Setting("num_codewords", int, 32, "Codewords per half vector in midx.", least=1, option="codewords"),),
    examples=({"num_codewords": 2},),
)
