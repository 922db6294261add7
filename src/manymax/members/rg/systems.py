"""The many small systems of a half-step, and how they are solved; `als.factorization` has the derivation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from manymax.errors import ManymaxError
from manymax.members.rg import interactions as sparse
from manymax.members.rg.interactions import Rows

# Rows added to a second moment at a time, in the vectors' type; the sum over blocks is in float64.
GRAM_ROWS = 1 << 11
# Up to this condition number the inverse of a matrix that all rows share is used instead of its eigenvectors.
MAX_CONDITION = 1e3


class Systems:
    """The systems M_r x_r = (1 + a) sum_i v_ri z_i - w_r g of one half-step, solved in the eigenvectors of A.

    There M_r = diag(w_r E + ridge_r) + Z_r^T Z_r, with E the eigenvalues of A and sqrt(a v_ri) z_i the rows of Z_r.

    Args:
        rows: the side that is solved for.
        vectors: z, the other side's vectors.
        weight, ridge: w and the ridge of each row, (R,), or (1,) where all rows have the same.
        matrix: A, (dim, dim) float64.
        positive_weight: a.
    """

    def __init__(
        self, rows: Rows, vectors: Tensor, weight: Tensor, ridge: Tensor, matrix: Tensor, positive_weight: float
    ) -> None:
        spectrum, basis = torch.linalg.eigh(matrix)
        # Below the resolution of the vectors' type an eigenvalue is noise, and so is the right-hand side along its
        # eigenvector: divided by a tiny ridge alone it would swamp the solution.
        floor = spectrum[-1] * torch.finfo(vectors.dtype).eps
        self.null = spectrum <= floor  # (dim,)
        self.spectrum = spectrum.clamp(min=floor).to(vectors.dtype)
        self.basis = basis.to(vectors.dtype)
        self.rows, self.vectors, self.positive_weight = rows, vectors, positive_weight
        self.weight, self.ridge = weight[:, None], ridge[:, None]

    def solve(self, shift: Tensor, out: Tensor) -> Tensor:
        """Write x_r for g = shift into `out`, (R, dim), and return it."""
        if len(self.weight) == len(self.ridge) == 1 and self._invertible():
            return self._solve_alike(shift, out)
        shift = self._rotated(shift)
        for block, factor, sums in self._blocks():
            out[block] = factor.solve(sums.addcmul_(_part(self.weight, block), shift, value=-1)) @ self.basis.T
        return out

    def solve_coupled(self, first: Tensor, start: Tensor, out: Tensor, rest: float = 0.0) -> Tensor:
        """Write x_r for g = first - t into `out`, (R, dim), and return it; t is found on the way.

        `rest` is the share of pi outside of these systems; `start` is rest A mean_rest(q) + sum_j b_j.
        """
        left, right = torch.diag(torch.full_like(first, rest)), self._rotated(start).double()
        first = self._rotated(first)
        for block, factor, sums in self._blocks():
            weight, ridge = _part(self.weight, block), _part(self.ridge, block)
            solved = factor.solve(sums.addcmul_(weight, first, value=-1))
            out[block] = solved @ self.basis.T
            left += factor.coupling(weight, ridge)
            right -= factor.remainder(solved, ridge)
        left[self.null] = torch.eye(len(first)).to(left)[self.null]
        right[self.null] = 0  # where A is zero, so is t = A mean(q)
        pull = torch.linalg.solve(left, right).to(self.basis)  # t
        for block, factor, _ in self._blocks(sums=False):
            out[block] += factor.solve(_part(self.weight, block) * pull) @ self.basis.T
        return out

    def _invertible(self) -> bool:
        """Whether all rows have one matrix M whose inverse may be rounded: it costs cond(M) in digits."""
        diagonal = self._diagonal(slice(0, 1))
        return self.positive_weight == 0 and bool(diagonal.max() < MAX_CONDITION * diagonal.min())

    def _solve_alike(self, shift: Tensor, out: Tensor) -> Tensor:
        """x_r = sum_i v_ri M^-1 z_i - w M^-1 g: one product on the other side, none on this one."""
        inverse = (self.basis / self._diagonal(slice(0, 1))) @ self.basis.T
        solved, constant = self.vectors @ inverse, self.weight[0] * (shift.to(inverse) @ inverse)
        for block in self.rows.blocks(sparse.SHARED_BLOCK, per_entry=1, per_row=self.vectors.shape[1]):
            torch.sub(self.rows.neighbour_sums(block, solved), constant, out=out[block])
        return out

    def _rotated(self, vector: Tensor) -> Tensor:
        return vector.to(self.basis) @ self.basis

    def _blocks(self, sums: bool = True) -> Iterator[tuple[slice | Tensor, _Factor, Tensor]]:
        """(block of rows, its factorised M_r, (1 + a) sum_i v_ri z_i), the latter two in the eigenvectors of A.

        With a = 0 the sums are most of the work; they are left empty if not asked for.
        """
        dim = self.vectors.shape[1]
        if self.positive_weight == 0:
            for block in self.rows.blocks(sparse.SHARED_BLOCK, per_entry=1, per_row=dim):
                total = self.rows.neighbour_sums(block, self.vectors) @ self.basis if sums else self.basis[:0]
                yield block, _Diagonal(self._diagonal(block)), total
            return
        vectors = self.vectors @ self.basis
        for rows in self.rows.padded_blocks(sparse.SEPARATE_BLOCK, per_entry=4 * dim, per_row=4 * dim * dim):
            near, values = self.rows.neighbours(rows, vectors)
            total = (1 + self.positive_weight) * (values[:, None] @ near)[:, 0]
            near *= (self.positive_weight * values).sqrt()[..., None]
            yield rows, _factorise(self._diagonal(rows), near), total

    def _diagonal(self, block: slice | Tensor) -> Tensor:
        return (_part(self.weight, block) * self.spectrum).add_(_part(self.ridge, block))


class _Factor(ABC):
    """M_r = D_r + Z_r^T Z_r for a block of rows, factorised; D (R', dim) holds the diagonals w_r E + ridge_r.

    N_r = M_r - w_r diag(E) = ridge_r I + Z_r^T Z_r; weight and ridge are (R', 1).
    """

    @abstractmethod
    def solve(self, right: Tensor) -> Tensor:
        """M_r^-1 right_r, (R', dim)."""

    @abstractmethod
    def coupling(self, weight: Tensor, ridge: Tensor) -> Tensor:
        """sum_r w_r N_r M_r^-1, (dim, dim) float64."""

    @abstractmethod
    def remainder(self, solved: Tensor, ridge: Tensor) -> Tensor:
        """sum_r N_r solved_r, (dim,) float64."""


class _Diagonal(_Factor):
    """Z = 0."""

    def __init__(self, diagonal: Tensor) -> None:
        self.diagonal = diagonal

    def solve(self, right: Tensor) -> Tensor:
        return right.div_(self.diagonal)

    def coupling(self, weight: Tensor, ridge: Tensor) -> Tensor:
        return torch.diag(((weight * ridge).T @ self.diagonal.reciprocal())[0].double())

    def remainder(self, solved: Tensor, ridge: Tensor) -> Tensor:
        return (ridge.T @ solved)[0].double()


class _ShortRows(_Factor):
    """Rows of fewer entries than dim: M^-1 = D^-1 - D^-1 Z^T K^-1 Z D^-1 with K = I + Z D^-1 Z^T."""

    def __init__(self, diagonal: Tensor, near: Tensor) -> None:
        self.diagonal, self.near = diagonal, near
        inner = (near / diagonal[:, None]) @ near.mT
        inner.diagonal(dim1=-2, dim2=-1).add_(1)
        self.factor = _cholesky(inner)  # of K, (R', L, L)

    def solve(self, right: Tensor) -> Tensor:
        exact = right.to(self.diagonal)
        solved = self._solve_once(exact)
        # The difference in M^-1 cancels where Z dominates D; one refinement restores the accuracy.
        solved += self._solve_once(exact - self.diagonal * solved - _gram_times(self.near, solved))
        return solved.to(right)

    def _solve_once(self, right: Tensor) -> Tensor:
        inner = (right / self.diagonal)[:, None] @ self.near.mT  # (R', 1, L)
        inner = torch.cholesky_solve(inner.mT, self.factor).mT
        return (right - (inner @ self.near)[:, 0]) / self.diagonal

    def coupling(self, weight: Tensor, ridge: Tensor) -> Tensor:
        # N M^-1 = ridge D^-1 + (I - ridge D^-1) Z^T K^-1 Z D^-1, free of cancellation
        share = ridge / self.diagonal
        half = torch.linalg.solve_triangular(self.factor, self.near, upper=False)  # (R', L, dim)
        left, right = half * (1 - share)[:, None], half * (weight / self.diagonal)[:, None]
        low_rank = left.flatten(0, 1).T @ right.flatten(0, 1)
        return (torch.diag((weight * share).sum(0)) + low_rank).double()

    def remainder(self, solved: Tensor, ridge: Tensor) -> Tensor:
        return (ridge * solved + _gram_times(self.near, solved.to(self.near))).sum(0).double()


class _LongRows(_Factor):
    """Rows of at least dim entries: the Cholesky factor of M itself."""

    def __init__(self, diagonal: Tensor, near: Tensor) -> None:
        self.gram = near.mT @ near
        self.factor = _cholesky(self.gram + torch.diag_embed(diagonal))

    def solve(self, right: Tensor) -> Tensor:
        return torch.cholesky_solve(right.to(self.factor)[..., None], self.factor)[..., 0].to(right)

    def coupling(self, weight: Tensor, ridge: Tensor) -> Tensor:
        own = self.gram + torch.diag_embed(ridge.expand(-1, self.gram.shape[-1]))
        return (weight[..., None] * torch.cholesky_solve(own, self.factor)).sum(0).T.double()

    def remainder(self, solved: Tensor, ridge: Tensor) -> Tensor:
        return (ridge * solved + (solved.to(self.gram)[:, None] @ self.gram)[:, 0]).sum(0).double()


def _factorise(diagonal: Tensor, near: Tensor) -> _Factor:
    """M_r for D (R', dim) and Z (R', L, dim), in float64 where float32 has too few digits for Z next to D."""
    spread = near.square().sum((1, 2)) / diagonal.amin(1)
    if float(spread.max()) * torch.finfo(near.dtype).eps > 1e-4:
        diagonal, near = diagonal.double(), near.double()
    return _ShortRows(diagonal, near) if near.shape[1] < near.shape[2] else _LongRows(diagonal, near)


def _part(column: Tensor, block: slice | Tensor) -> Tensor:
    return column if len(column) == 1 else column[block]


def _cholesky(matrices: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(matrices)
    if failed.any():
        raise ManymaxError(f"a row's system is singular in {matrices.dtype}: raise `ridge` or use torch.float64.")
    return factor


def _gram_times(rows: Tensor, vectors: Tensor) -> Tensor:
    """rows_r^T rows_r vector_r for (R', L, dim) and (R', dim), (R', dim)."""
    return (vectors[:, None] @ rows.mT @ rows)[:, 0]  # three times faster than with columns


def weighted_sum(vectors: Tensor, weight: Tensor) -> Tensor:
    """sum_r w_r z_r, (dim,) float64."""
    return (weight @ vectors).double()


def gram(vectors: Tensor, weight: Tensor, centre: Tensor | None = None) -> Tensor:
    """sum_r w_r (z_r - centre) (z_r - centre)^T, (dim, dim) float64."""
    total = torch.zeros(vectors.shape[1], vectors.shape[1], dtype=torch.float64, device=vectors.device)
    for part, part_weight in zip(vectors.split(GRAM_ROWS), weight.split(GRAM_ROWS), strict=True):
        centred = part if centre is None else part - centre.to(part)
        total += centred.T @ (centred * part_weight[:, None])
    return total
