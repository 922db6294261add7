"""The many small linear systems of a half-step of ALS, and how they are solved; als.py has the derivation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from manymax.errors import ManymaxError
from manymax.members.rg import interactions
from manymax.members.rg.interactions import Rows

# Rows that are added to a second moment at a time, in the vectors' dtype; the sum over these pieces is in float64, so
# that its rounding error does not grow with the number of rows.
GRAM_ROWS = 1 << 11
# Up to this condition number the inverse of a matrix that all rows share is used instead of its eigenvectors: it is
# cheaper, and costs as many digits as the condition number has.
MAX_CONDITION = 1e3


class Systems:
    """The systems M_r x_r = (1 + a) sum_i v_ri z_i - w_r g of one half-step, solved in the basis of A's eigenvectors.

    In that basis M_r = diag(w_r E + ridge_r) + Z_r^T Z_r, with E the eigenvalues of A and sqrt(a v_ri) z_i the rows of
    Z_r. For a = 0 every system is diagonal.

    Args:
        rows: interactions of the side that is solved for.
        vectors: z, the vectors of the other side.
        weight, ridge: w and the ridge of each row, (R,), or (1,) if all rows have the same.
        matrix: A, (dim, dim) float64.
        positive_weight: a.
    """

    def __init__(
        self, rows: Rows, vectors: Tensor, weight: Tensor, ridge: Tensor, matrix: Tensor, positive_weight: float
    ) -> None:
        spectrum, basis = torch.linalg.eigh(matrix)
        # Below the resolution of the vectors' dtype an eigenvalue is noise, and so is the right-hand side along its
        # eigenvector. Divided by a tiny ridge alone, that noise would swamp the solution.
        floor = spectrum[-1] * torch.finfo(vectors.dtype).eps
        self.null = spectrum <= floor  # (dim,)
        self.spectrum = spectrum.clamp(min=floor).to(vectors.dtype)
        self.basis = basis.to(vectors.dtype)
        self.rows, self.vectors, self.positive_weight = rows, vectors, positive_weight
        self.weight, self.ridge = weight[:, None], ridge[:, None]

    def solve(self, shift: Tensor, out: Tensor) -> Tensor:
        """Solve for g = shift: write x_r into `out`, (R, dim), and return it."""
        if len(self.weight) == len(self.ridge) == 1 and self._invertible():
            return self._solve_with_one_matrix(shift, out)
        shift = self._rotated(shift)
        for block, factor, sums in self._blocks():
            out[block] = factor.solve(sums.addcmul_(_part(self.weight, block), shift, value=-1)) @ self.basis.T
        return out

    def solve_coupled(self, first: Tensor, start: Tensor, out: Tensor, fixed_share: float = 0.0) -> Tensor:
        """Solve for g = first - t, where t = A mean(q) depends on the solution itself.

        Args:
            first: sum_u n_u p_u, (dim,).
            start: fixed_share A mean_fixed(q) + sum_j b_j, (dim,).
            out: (R, dim); the solution is written into it.
            fixed_share: share of pi on items whose vectors are fixed and that have no system here.

        Returns:
            `out`.
        """
        # First pass: solve all rows for t = 0, and collect the system of size dim for t, whose matrix is `left`.
        # Second pass: add M_r^-1 w_r t to every row. Two passes instead of storing M_r^-1 of all rows, (R, dim, dim).
        left, right = torch.diag(torch.full_like(first, fixed_share)), self._rotated(start).double()
        first = self._rotated(first)
        for block, factor, sums in self._blocks():
            weight, ridge = _part(self.weight, block), _part(self.ridge, block)
            solved = factor.solve(sums.addcmul_(weight, first, value=-1))
            out[block] = solved @ self.basis.T
            left += factor.coupling(weight, ridge)
            right -= factor.remainder(solved, ridge)
        # Along eigenvectors where A is zero, so is t = A mean(q): those equations become t = 0, instead of noise.
        left[self.null] = torch.eye(len(first)).to(left)[self.null]
        right[self.null] = 0
        t = torch.linalg.solve(left, right).to(self.basis)
        for block, factor, _ in self._blocks(sums=False):
            out[block] += factor.solve(_part(self.weight, block) * t) @ self.basis.T
        return out

    def _invertible(self) -> bool:
        """Whether the one matrix M of all rows is so well conditioned that its rounded inverse can be used."""
        diagonal = self._diagonal(slice(0, 1))
        return self.positive_weight == 0 and bool(diagonal.max() < MAX_CONDITION * diagonal.min())

    def _solve_with_one_matrix(self, shift: Tensor, out: Tensor) -> Tensor:
        """x_r = sum_i v_ri M^-1 z_i - w M^-1 g, where all rows share M: M^-1 is applied to the other side, once."""
        inverse = (self.basis / self._diagonal(slice(0, 1))) @ self.basis.T
        solved, constant = self.vectors @ inverse, self.weight[0] * (shift.to(inverse) @ inverse)
        for block in self.rows.blocks(interactions.SHARED_BLOCK, per_entry=1, per_row=self.vectors.shape[1]):
            torch.sub(self.rows.neighbour_sums(block, solved), constant, out=out[block])
        return out

    def _rotated(self, vector: Tensor) -> Tensor:
        """A vector (dim,) in the basis of A's eigenvectors, in the dtype of the vectors."""
        return vector.to(self.basis) @ self.basis

    def _blocks(self, sums: bool = True) -> Iterator[tuple[slice | Tensor, _Factor, Tensor]]:
        """Blocks of rows with their factorised M_r and right-hand sums (1 + a) sum_i v_ri z_i, (R', dim).

        Both are in the basis of A's eigenvectors. With a = 0 the sums are most of the work; `sums=False` leaves them
        empty.
        """
        dim = self.vectors.shape[1]
        if self.positive_weight == 0:
            for block in self.rows.blocks(interactions.SHARED_BLOCK, per_entry=1, per_row=dim):
                total = self.rows.neighbour_sums(block, self.vectors) @ self.basis if sums else self.basis[:0]
                yield block, _Diagonal(self._diagonal(block)), total
            return
        vectors = self.vectors @ self.basis
        for rows in self.rows.padded_blocks(interactions.SEPARATE_BLOCK, per_entry=4 * dim, per_row=4 * dim * dim):
            neighbours, values = self.rows.neighbours(rows, vectors)
            total = (1 + self.positive_weight) * (values[:, None] @ neighbours)[:, 0]
            neighbours *= (self.positive_weight * values).sqrt()[..., None]  # Z_r; padding has the value 0
            yield rows, _factorise(self._diagonal(rows), neighbours), total

    def _diagonal(self, block: slice | Tensor) -> Tensor:
        """w_r E + ridge_r for a block of rows, (R', dim)."""
        return (_part(self.weight, block) * self.spectrum).add_(_part(self.ridge, block))


class _Factor(ABC):
    """The matrices M_r = D_r + Z_r^T Z_r of a block of rows, factorised, with D_r = diag(w_r E + ridge_r).

    N_r = M_r - w_r diag(E) = ridge_r I + Z_r^T Z_r. Shapes: D (R', dim), Z (R', L, dim), weight and ridge (R', 1).
    """

    @abstractmethod
    def solve(self, right: Tensor) -> Tensor:
        """M_r^-1 right_r, (R', dim), for right-hand sides (R', dim), which may be overwritten."""

    @abstractmethod
    def coupling(self, weight: Tensor, ridge: Tensor) -> Tensor:
        """sum_r w_r N_r M_r^-1, (dim, dim) float64."""

    @abstractmethod
    def remainder(self, solved: Tensor, ridge: Tensor) -> Tensor:
        """sum_r N_r solved_r, (dim,) float64."""


class _Diagonal(_Factor):
    """Rows without the positive term (a = 0): Z = 0 and M_r = D_r."""

    def __init__(self, diagonal: Tensor) -> None:
        self.diagonal = diagonal

    def solve(self, right: Tensor) -> Tensor:
        return right.div_(self.diagonal)

    def coupling(self, weight: Tensor, ridge: Tensor) -> Tensor:
        return torch.diag(((weight * ridge).T @ self.diagonal.reciprocal())[0].double())

    def remainder(self, solved: Tensor, ridge: Tensor) -> Tensor:
        return (ridge.T @ solved)[0].double()


class _ShortRows(_Factor):
    """Rows with fewer entries than dim: M^-1 = D^-1 - D^-1 Z^T K^-1 Z D^-1 with K = I + Z D^-1 Z^T, (R', L, L)."""

    def __init__(self, diagonal: Tensor, scaled: Tensor) -> None:
        self.diagonal, self.scaled = diagonal, scaled  # D, Z
        inner = (scaled / diagonal[:, None]) @ scaled.mT
        inner.diagonal(dim1=-2, dim2=-1).add_(1)
        self.factor = _cholesky(inner)  # of K

    def solve(self, right: Tensor) -> Tensor:
        exact = right.to(self.diagonal)
        solved = self._solve_once(exact)
        # The difference in M^-1 cancels where Z dominates D. One step of refinement, a solve for what is left of the
        # right-hand side, restores the digits.
        solved += self._solve_once(exact - self.diagonal * solved - _gram_times(self.scaled, solved))
        return solved.to(right)

    def _solve_once(self, right: Tensor) -> Tensor:
        inner = (right / self.diagonal)[:, None] @ self.scaled.mT  # (R', 1, L)
        inner = torch.cholesky_solve(inner.mT, self.factor).mT
        return (right - (inner @ self.scaled)[:, 0]) / self.diagonal

    def coupling(self, weight: Tensor, ridge: Tensor) -> Tensor:
        # N M^-1 = ridge D^-1 + (I - ridge D^-1) Z^T K^-1 Z D^-1: no difference of nearly equal terms.
        share = ridge / self.diagonal
        half = torch.linalg.solve_triangular(self.factor, self.scaled, upper=False)  # (R', L, dim)
        left, right = half * (1 - share)[:, None], half * (weight / self.diagonal)[:, None]
        low_rank = left.flatten(0, 1).T @ right.flatten(0, 1)
        return (torch.diag((weight * share).sum(0)) + low_rank).double()

    def remainder(self, solved: Tensor, ridge: Tensor) -> Tensor:
        return (ridge * solved + _gram_times(self.scaled, solved.to(self.scaled))).sum(0).double()


class _LongRows(_Factor):
    """Rows with at least dim entries: the Cholesky factor of M itself, (R', dim, dim)."""

    def __init__(self, diagonal: Tensor, scaled: Tensor) -> None:
        self.gram = scaled.mT @ scaled  # Z^T Z
        self.factor = _cholesky(self.gram + torch.diag_embed(diagonal))

    def solve(self, right: Tensor) -> Tensor:
        return torch.cholesky_solve(right.to(self.factor)[..., None], self.factor)[..., 0].to(right)

    def coupling(self, weight: Tensor, ridge: Tensor) -> Tensor:
        own = self.gram + torch.diag_embed(ridge.expand(-1, self.gram.shape[-1]))
        return (weight[..., None] * torch.cholesky_solve(own, self.factor)).sum(0).T.double()

    def remainder(self, solved: Tensor, ridge: Tensor) -> Tensor:
        return (ridge * solved + (solved.to(self.gram)[:, None] @ self.gram)[:, 0]).sum(0).double()


def _factorise(diagonal: Tensor, scaled: Tensor) -> _Factor:
    """Factorise M_r for D (R', dim) and Z (R', L, dim), in the cheaper of two ways."""
    # How far Z^T Z can exceed D. Where that leaves D less than four digits of float32, float64 is used.
    excess = scaled.square().sum((1, 2)) / diagonal.amin(1)
    if float(excess.max()) * torch.finfo(scaled.dtype).eps > 1e-4:
        diagonal, scaled = diagonal.double(), scaled.double()
    return _ShortRows(diagonal, scaled) if scaled.shape[1] < scaled.shape[2] else _LongRows(diagonal, scaled)


def _part(column: Tensor, block: slice | Tensor) -> Tensor:
    """The entries of a block of rows, or the one entry that all rows share."""
    return column if len(column) == 1 else column[block]


def _cholesky(matrices: Tensor) -> Tensor:
    """Cholesky factors of a batch of matrices, with an error that says what to do if one of them fails."""
    factor, failed = torch.linalg.cholesky_ex(matrices)
    if failed.any():
        raise ManymaxError(f"a row's system is singular in {matrices.dtype}: raise `ridge` or use torch.float64.")
    return factor


def _gram_times(rows: Tensor, vectors: Tensor) -> Tensor:
    """rows_r^T (rows_r vector_r) for rows (R', L, dim) and vectors (R', dim), (R', dim)."""
    return (vectors[:, None] @ rows.mT @ rows)[:, 0]  # row vectors: three times faster than column vectors


def weighted_sum(vectors: Tensor, weight: Tensor) -> Tensor:
    """sum_r w_r z_r, (dim,) float64, for vectors (R, dim) and weights (R,)."""
    return (weight @ vectors).double()


def gram(vectors: Tensor, weight: Tensor, centre: Tensor | None = None) -> Tensor:
    """sum_r w_r (z_r - centre) (z_r - centre)^T, (dim, dim) float64, for vectors (R, dim) and weights (R,)."""
    total = torch.zeros(vectors.shape[1], vectors.shape[1], dtype=torch.float64, device=vectors.device)
    for part, part_weight in zip(vectors.split(GRAM_ROWS), weight.split(GRAM_ROWS), strict=True):
        centred = part if centre is None else part - centre.to(part)
        total += centred.T @ (centred * part_weight[:, None])
    return total
