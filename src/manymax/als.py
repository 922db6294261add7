"""Alternating least squares for RG: matrix factorisation under the quadratic member of the family.

With x_uj = <p_u, q_j>, interactions v_ui >= 0 (1 unless given), n_u = sum_i v_ui, a base distribution pi over the
items (uniform, or a prior), and mean and Var taken over j ~ pi, the objective is

    sum_u n_u (mean(x_u) + Var(x_u) / 2) - sum_ui v_ui (x_ui + log pi_i)     RG, expanded around log pi
      + a/2 sum_ui v_ui (x_ui - 1)^2                                         positive weight a
      + 1/2 sum_u l_u |p_u|^2 + 1/2 sum_j m_j |q_j|^2                        ridge

It is a convex quadratic in the users for fixed items and in the items for fixed users, so each half-step is solved
exactly. Both are many small systems of one form; for row r with neighbours z_i on the other side

    M_r x_r = (1 + a) sum_i v_ri z_i - w_r g,    M_r = w_r A + a sum_i v_ri z_i z_i^T + ridge_r I

    users   w_u = n_u     A = Cov(q)                    g = mean(q)
    items   w_j = pi_j    A = sum_u n_u p_u p_u^T       g = sum_u n_u p_u - t,  t = A mean(q)

For a = 0 all rows share the eigenvectors of A. The items are coupled through their own new mean. With b_j the
right-hand side at t = 0 and N_j = M_j - pi_j A, eliminating the items leaves one system of size dim,

    [sum_j pi_j N_j M_j^-1] t = sum_j b_j - sum_j N_j M_j^-1 b_j,    sum_j b_j = a sum_u n_u p_u

in this form well conditioned for any ridge. For a = 0, uniform pi and equal ridges t = 0: one matrix for all items.

References: Pu et al., "Is Softmax Loss all you need?" (the RG loss); Pu et al., ICML 2024 (RG^2, its uncentred
relative, by ALS); Rendle et al., RecSys 2022 (the frequency-scaled ridge).
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, SupportsFloat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manymax.errors import ArgumentError, ArgumentTypeError, ManymaxError

# Entries of a block whose rows share a matrix: the sums of a block stay in cache until they are solved for.
SHARED_BLOCK = 1 << 20
# Numbers in a block whose rows have a matrix each: the working memory of that variant.
SEPARATE_BLOCK = 1 << 22
# Rows added to a second moment at a time, in the vectors' type; the sum over blocks is in float64.
GRAM_ROWS = 1 << 11


# Up to this condition number the inverse of a matrix that all rows share is used instead of its eigenvectors.
MAX_CONDITION = 1e3


class RGFactorization(nn.Module):
    """Matrix factorisation under the RG loss, fitted by exact alternating least squares.

    Scores are <p_u, q_j>, plus log pi_j when a prior is given. Each half-step minimises the objective in this
    module's docstring over one side, so the objective never rises. A sweep costs
    O(nnz dim + (num_users + num_items) dim^2) with `positive_weight=0` and
    O(nnz dim^2 + (num_users + num_items) dim^3) otherwise, in memory O(nnz + (num_users + num_items) dim).

    The vectors and the prior are buffers, so `state_dict` holds them; the interactions are not in it: a loaded
    model goes on after `observe`. At a minimum the scores depend on the product of the two ridges only.

    Args:
        num_users, num_items: sizes of the two sides.
        dim: length of the vectors.
        ridge: weight of the squared norms, positive.
        user_ridge, item_ridge: the same for one side; None takes `ridge`.
        ridge_power: row r's ridge is multiplied by n_r ** ridge_power, n_r the sum of its interactions (1 if none).
            At 1 one value of `ridge` suits data of any size; at 0 all items share one matrix and a sweep is fastest.
        positive_weight: weight a of the term that draws x_ui of the interactions to 1.
        prior: (num_items,) positive weights, normalised to pi; None is uniform, the plain RG loss.
        init_std: standard deviation of the first vectors.
        dtype: torch.float32 or torch.float64; None takes torch's default.
        generator: source of the first vectors.

    Example:
        Two circles of users with two items each; user 1 has not met item 1 yet.

        >>> users = torch.tensor([0, 0, 1, 2, 2, 3, 3])
        >>> items = torch.tensor([0, 1, 0, 2, 3, 2, 3])
        >>> model = RGFactorization(4, 4, dim=2, generator=torch.Generator().manual_seed(0))
        >>> model = model.fit(users, items, sweeps=20)
        >>> model.scores(torch.tensor([1])).topk(2).indices
        tensor([[0, 1]])
        >>> newcomer = model.fold_in_users(torch.tensor([0]), torch.tensor([3]))
        >>> model.query_scores(newcomer).topk(2).indices.sort().values
        tensor([[2, 3]])
    """

    user_vectors: Tensor
    item_vectors: Tensor
    prior: Tensor | None

    def __init__(
        self,
        num_users: int,
        num_items: int,
        dim: int,
        *,
        ridge: float = 0.1,
        user_ridge: float | None = None,
        item_ridge: float | None = None,
        ridge_power: float = 1.0,
        positive_weight: float = 0.0,
        prior: Tensor | None = None,
        init_std: float = 0.02,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.num_users = _check_size("num_users", num_users)
        self.num_items = _check_size("num_items", num_items)
        self.dim = _check_size("dim", dim)
        ridge = _check_number("ridge", ridge, above=0.0)
        self.user_ridge = ridge if user_ridge is None else _check_number("user_ridge", user_ridge, above=0.0)
        self.item_ridge = ridge if item_ridge is None else _check_number("item_ridge", item_ridge, above=0.0)
        self.ridge_power = _check_number("ridge_power", ridge_power)
        self.positive_weight = _check_number("positive_weight", positive_weight, least=0.0)
        init_std = _check_number("init_std", init_std, above=0.0)
        dtype = _check_dtype(dtype or torch.get_default_dtype())
        device = None if generator is None else generator.device
        for name, size in (("user_vectors", num_users), ("item_vectors", num_items)):
            noise = torch.randn(size, dim, dtype=dtype, generator=generator, device=device)
            self.register_buffer(name, init_std * noise)
        weights = None if prior is None else _check_prior(prior, num_items)
        self.register_buffer("prior", None if weights is None else (weights / weights.sum()).to(dtype))
        self._by_user: _Rows | None = None
        self._by_item: _Rows | None = None

    def extra_repr(self) -> str:
        return f"num_users={self.num_users}, num_items={self.num_items}, dim={self.dim}"

    def fit(
        self,
        users: Any,
        items: Tensor | None = None,
        *,
        values: Tensor | None = None,
        sweeps: int = 15,
        callback: Callable[[RGFactorization, int], object] | None = None,
    ) -> RGFactorization:
        """Observe the interactions and alternate: all users, then all items, `sweeps` times.

        Args:
            users, items, values: see `observe`.
            sweeps: number of sweeps, on from the present vectors.
            callback: called as callback(model, sweep) after each sweep, counted from 1; a true answer stops the fit.

        Returns:
            The model itself.
        """
        _check_size("sweeps", sweeps)
        self.observe(users, items, values=values)
        for sweep in range(1, sweeps + 1):
            self.update_users()
            self.update_items()
            if callback is not None and callback(self, sweep):
                break
        return self

    def observe(self, users: Any, items: Tensor | None = None, *, values: Tensor | None = None) -> None:
        """Take the interactions that the half-steps and the objective are about, in place of earlier ones.

        Args:
            users: (nnz,) user ids in any order, or a sparse (num_users, num_items) matrix, of torch or scipy,
                whose entries are the values.
            items: (nnz,) item ids; left out with a matrix.
            values: (nnz,) non-negative weights, summed over repeats of a pair. Without them a pair counts once,
                however often it is given.
        """
        pairs = _read_pairs(users, items, values, (self.num_users, self.num_items), like=self.user_vectors)
        self._by_user = _Rows(pairs, self.num_users, self.user_vectors.dtype)
        self._by_item = _Rows(pairs.transposed(), self.num_items, self.user_vectors.dtype)

    @torch.no_grad()
    def update_users(self) -> None:
        """The user half-step: minimise the objective over all user vectors, in place."""
        by_user, _ = self._observed()
        self._solve_users(by_user, out=self.user_vectors)

    @torch.no_grad()
    def update_items(self) -> None:
        """The item half-step: minimise the objective over all item vectors, in place."""
        by_user, by_item = self._observed()
        first, second = self._user_moments(by_user.total)
        base, ridge = self._base(), self._ridge(self.item_ridge, by_item)
        if self.positive_weight == 0 and self.prior is None and self.ridge_power == 0:  # one matrix, and t = 0
            systems = self._systems(by_item, self.user_vectors, base[:1], ridge[:1], second)
            systems.solve(first, self.item_vectors)
        else:
            systems = self._systems(by_item, self.user_vectors, base, ridge, second)
            systems.solve_coupled(first, self.positive_weight * first, self.item_vectors)

    @torch.no_grad()
    def objective(self) -> float:
        """The objective of this module's docstring at the present vectors, summed in float64."""
        by_user, by_item = self._observed()
        mean = self._item_mean()
        first, second = self._user_moments(by_user.total)
        rg = first @ mean + (second * _gram(self.item_vectors, self._base(), mean)).sum() / 2
        rg -= self._linear_term(by_user, by_item)
        user_norms = _weighted_sum(self.user_vectors.square(), self._ridge(self.user_ridge, by_user)).sum()
        item_norms = _weighted_sum(self.item_vectors.square(), self._ridge(self.item_ridge, by_item)).sum()
        if self.positive_weight > 0:
            rg += self.positive_weight / 2 * self._positive_term(by_user)
        return float(rg + (user_norms + item_norms) / 2)

    def scores(self, users: Tensor) -> Tensor:
        """Scores of all items for known users.

        Args:
            users: (B,) user ids.

        Returns:
            (B, num_items) scores.
        """
        _check_ids("users", users, self.num_users)
        return self.query_scores(self.user_vectors[users])

    def query_scores(self, queries: Tensor) -> Tensor:
        """Scores of all items for user vectors, such as those of `fold_in_users`.

        Args:
            queries: (B, dim) user vectors.

        Returns:
            (B, num_items) scores.
        """
        scores = queries @ self.item_vectors.T
        return scores if self.prior is None else scores + self.prior.log()

    @torch.no_grad()
    def fold_in_users(
        self, users: Any, items: Tensor | None = None, *, values: Tensor | None = None, num_users: int | None = None
    ) -> Tensor:
        """Vectors for new users by one user half-step on their interactions alone; the model stays as it is.

        The objective is a sum over users once the items are fixed, so these are the vectors that a half-step with
        the new users among the old ones would give.

        Args:
            users: (nnz,) numbers of the new users from 0, or a sparse (num_users, num_items) matrix.
            items, values: as in `observe`.
            num_users: how many new users there are; None takes the largest number + 1, or the matrix' rows.

        Returns:
            (num_users, dim) vectors.
        """
        size = _count_new("num_users", num_users, users, axis=0)
        pairs = _read_pairs(users, items, values, (size, self.num_items), like=self.user_vectors)
        rows = _Rows(pairs, size, self.user_vectors.dtype)
        return self._solve_users(rows, out=self.user_vectors.new_empty(size, self.dim))

    @torch.no_grad()
    def fold_in_items(
        self,
        users: Any,
        items: Tensor | None = None,
        *,
        values: Tensor | None = None,
        num_items: int | None = None,
        prior: Tensor | None = None,
    ) -> Tensor:
        """Vectors for new items by one item half-step over them alone; the model stays as it is.

        They minimise the objective of the enlarged data with the present vectors fixed, all new items together: the
        catalogue has K more items, n_u counts the new interactions too, the old items keep their proportions in pi.

        Args:
            users: (nnz,) ids of known users, or a sparse (num_users, K) matrix.
            items: (nnz,) numbers of the new items, from 0.
            values: as in `observe`.
            num_items: K, the number of new items; None takes the largest number + 1, or the matrix' columns.
            prior: (K,) shares of the new items in the enlarged pi; needed if and only if the model has a prior.

        Returns:
            (K, dim) vectors.
        """
        by_user, _ = self._observed()
        size = _count_new("num_items", num_items, users if items is None else items, axis=1)
        pairs = _read_pairs(users, items, values, (self.num_users, size), like=self.user_vectors)
        rows, base = _Rows(pairs.transposed(), size, self.user_vectors.dtype), self._enlarged_base(prior, size)
        new = torch.bincount(pairs.rows, pairs.values, minlength=self.num_users).to(self.user_vectors)
        first, second = self._user_moments(by_user.total + new)
        rest = 1 - float(base.sum())
        sums = (1 + self.positive_weight) * _weighted_sum(self.user_vectors, new) - (1 - rest) * first  # of b_j
        systems = self._systems(rows, self.user_vectors, base, self._ridge(self.item_ridge, rows), second)
        out = self.item_vectors.new_empty(size, self.dim)
        return systems.solve_coupled(first, rest * second @ self._item_mean() + sums, out, rest)

    def _observed(self) -> tuple[_Rows, _Rows]:
        if self._by_user is None or self._by_item is None:
            raise ManymaxError("there are no interactions yet: call `fit` or `observe` first.")
        return self._by_user, self._by_item

    def _base(self) -> Tensor:
        """pi, (num_items,)."""
        if self.prior is not None:
            return self.prior
        return self.item_vectors.new_full((self.num_items,), 1 / self.num_items)

    def _enlarged_base(self, prior: Tensor | None, size: int) -> Tensor:
        """The shares of new items in the enlarged pi, (size,)."""
        if (prior is None) != (self.prior is None):
            hint = "give the shares of the new items" if prior is None else "leave it out, all items share equally"
            raise ArgumentError(f"`prior` must be given if and only if the model has one; {hint}.")
        if prior is None:
            return self.item_vectors.new_full((size,), 1 / (self.num_items + size))
        _check_prior(prior, size)
        if float(prior.sum()) >= 1:
            raise ArgumentError(f"`prior` of the new items must sum to less than 1; got {float(prior.sum()):.6g}.")
        return prior.to(self.item_vectors)

    def _item_mean(self) -> Tensor:
        """mean(q) over pi, (dim,) float64."""
        return _weighted_sum(self.item_vectors, self._base())

    def _user_moments(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """sum_u n_u p_u, (dim,), and sum_u n_u p_u p_u^T, (dim, dim), float64."""
        return _weighted_sum(self.user_vectors, total), _gram(self.user_vectors, total)

    def _ridge(self, ridge: float, rows: _Rows) -> Tensor:
        """The ridge of each row, (R,)."""
        return ridge * torch.where(rows.total > 0, rows.total, 1.0).pow(self.ridge_power)

    def _systems(self, rows: _Rows, vectors: Tensor, weight: Tensor, ridge: Tensor, matrix: Tensor) -> _Systems:
        return _Systems(rows, vectors, weight, ridge, matrix, self.positive_weight)

    def _solve_users(self, rows: _Rows, out: Tensor) -> Tensor:
        mean = self._item_mean()
        covariance = _gram(self.item_vectors, self._base(), mean)
        ridge = self._ridge(self.user_ridge, rows)
        return self._systems(rows, self.item_vectors, rows.total, ridge, covariance).solve(mean, out)

    def _linear_term(self, by_user: _Rows, by_item: _Rows) -> Tensor:
        """sum_ui v_ui (x_ui + log pi_i), float64."""
        total = _weighted_sum(self._base().log()[:, None], by_item.total)[0]
        for block in by_user.blocks(SHARED_BLOCK, per_entry=1, per_row=self.dim):
            sums = by_user.neighbour_sums(block, self.item_vectors)
            total += (self.user_vectors[block] * sums).sum(dtype=torch.float64)
        return total

    def _positive_term(self, by_user: _Rows) -> Tensor:
        """sum_ui v_ui (x_ui - 1)^2, float64."""
        total = self.user_vectors.new_zeros((), dtype=torch.float64)
        for block in by_user.blocks(SEPARATE_BLOCK, per_entry=3 * self.dim, per_row=1):
            offsets, items, values = by_user.entries(block)
            users = torch.arange(block.start, block.stop, device=offsets.device).repeat_interleave(offsets.diff())
            error = (self.user_vectors[users] * self.item_vectors[items]).sum(-1) - 1  # (entries,)
            total += (error.square() if values is None else error.square() * values).sum(dtype=torch.float64)
        return total


class _Pairs(NamedTuple):
    """Distinct interactions: ids on both sides, (nnz,) each, and their values, or None where all are 1."""

    rows: Tensor
    columns: Tensor
    values: Tensor | None

    def transposed(self) -> _Pairs:
        return _Pairs(self.columns, self.rows, self.values)


class _Rows(nn.Module):
    """One side of the interactions as compressed rows; a module so that it moves with the model.

    `offsets` (R + 1,), `columns` (nnz,), `values` (nnz,) or None where all are 1, `total` (R,) the sums of values.
    None of it is in `state_dict`.
    """

    offsets: Tensor
    columns: Tensor
    values: Tensor | None
    total: Tensor

    def __init__(self, pairs: _Pairs, num_rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        rows, columns, values = pairs
        entries = rows.argsort(stable=True)
        offsets = F.pad(torch.bincount(rows, minlength=num_rows).cumsum(0), (1, 0))
        # int32 where the numbers fit: the sums read the indices from memory, the vectors mostly from cache.
        index = torch.int32 if max(len(rows), int(columns.max())) < 2**31 else torch.int64
        self.register_buffer("offsets", offsets.to(index), persistent=False)
        self.register_buffer("columns", columns[entries].to(index), persistent=False)
        self.register_buffer("values", None if values is None else values[entries], persistent=False)
        total = torch.bincount(rows, values, minlength=num_rows).to(dtype)
        self.register_buffer("total", total, persistent=False)

    def blocks(self, budget: int, *, per_entry: int, per_row: int) -> Iterator[slice]:
        """Slices of neighbouring rows that cost about `budget` each, so that threads share each block evenly."""
        row = torch.arange(len(self.offsets), device=self.offsets.device)
        cost = self.offsets.long() * per_entry + row * per_row  # of all rows before this one
        cuts = torch.searchsorted(cost, torch.arange(0, int(cost[-1]), budget, device=cost.device))
        bounds = torch.cat([cuts, row[-1:]]).unique().tolist()
        return itertools.starmap(slice, itertools.pairwise(bounds))

    def padded_blocks(self, budget: int, *, per_entry: int, per_row: int) -> Iterator[Tensor]:
        """Ids of rows of like length, longest first, whose cost within `budget` counts the padding to the longest."""
        length, order = self.offsets.diff().sort(descending=True)
        start = 0
        while start < len(order):
            rows = max(1, budget // (int(length[start]) * per_entry + per_row))
            yield order[start : start + rows]
            start += rows

    def entries(self, block: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """(offsets, columns, values) of a block of neighbouring rows, the offsets from its own start."""
        offsets = self.offsets[block.start : block.stop + 1]
        part = slice(int(offsets[0]), int(offsets[-1]))
        return offsets - offsets[0], self.columns[part], None if self.values is None else self.values[part]

    def neighbour_sums(self, block: slice, vectors: Tensor) -> Tensor:
        """sum_i v_ri z_i for the block's rows, (R', dim)."""
        offsets, columns, values = self.entries(block)
        return F.embedding_bag(
            columns, vectors, offsets, mode="sum", per_sample_weights=values, include_last_offset=True
        )

    def neighbours(self, block: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """z_i and v_ri for the block's rows, padded to the longest: (R', L, dim) and (R', L), v = 0 on the padding."""
        start, length = self.offsets[block], self.offsets[block + 1] - self.offsets[block]
        steps = torch.arange(int(length.max()), device=block.device)
        inside = steps < length[:, None]
        places = torch.where(inside, start[:, None] + steps, 0)
        values = inside.to(vectors.dtype) if self.values is None else self.values[places] * inside
        return vectors[self.columns[places]], values


class _Systems:
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
        self, rows: _Rows, vectors: Tensor, weight: Tensor, ridge: Tensor, matrix: Tensor, positive_weight: float
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
        for block in self.rows.blocks(SHARED_BLOCK, per_entry=1, per_row=self.vectors.shape[1]):
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
            for block in self.rows.blocks(SHARED_BLOCK, per_entry=1, per_row=dim):
                total = self.rows.neighbour_sums(block, self.vectors) @ self.basis if sums else self.basis[:0]
                yield block, _Diagonal(self._diagonal(block)), total
            return
        vectors = self.vectors @ self.basis
        for rows in self.rows.padded_blocks(SEPARATE_BLOCK, per_entry=4 * dim, per_row=4 * dim * dim):
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


def _weighted_sum(vectors: Tensor, weight: Tensor) -> Tensor:
    """sum_r w_r z_r, (dim,) float64."""
    return (weight @ vectors).double()


def _gram(vectors: Tensor, weight: Tensor, centre: Tensor | None = None) -> Tensor:
    """sum_r w_r (z_r - centre) (z_r - centre)^T, (dim, dim) float64."""
    gram = torch.zeros(vectors.shape[1], vectors.shape[1], dtype=torch.float64, device=vectors.device)
    for part, part_weight in zip(vectors.split(GRAM_ROWS), weight.split(GRAM_ROWS), strict=True):
        centred = part if centre is None else part - centre.to(part)
        gram += centred.T @ (centred * part_weight[:, None])
    return gram


def _read_pairs(
    users: Any, items: Tensor | None, values: Tensor | None, shape: tuple[int, int], like: Tensor
) -> _Pairs:
    """Distinct pairs sorted by user then item, on the device of `like`, values in its dtype."""
    if items is None:
        users, items, values = _read_matrix(users, values, shape)
    users, items = _check_ids("users", users, shape[0]), _check_ids("items", items, shape[1])
    if users.shape != items.shape:
        raise ArgumentError(f"`users` and `items` must have one shape; got {tuple(users.shape)}, {tuple(items.shape)}.")
    if not len(users):
        raise ArgumentError("`users` and `items` must hold at least one interaction; got none.")
    key = users.to(like.device, torch.int64) * shape[1] + items.to(like.device, torch.int64)
    if values is None:
        key, weights = key.unique(), None
    else:
        key, place = key.unique(return_inverse=True)
        weights = torch.bincount(place, _check_values(values, users.shape).to(like)).to(like)
    return _Pairs(key // shape[1], key % shape[1], weights)


def _read_matrix(matrix: Any, values: Tensor | None, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """(users, items, values) of a sparse matrix of torch or scipy."""
    if values is not None:
        raise ArgumentError("`values` cannot be given with a matrix: its entries are the values.")
    if tuple(getattr(matrix, "shape", ())) != shape:
        got = tuple(getattr(matrix, "shape", ())) or type(matrix).__name__
        raise ArgumentError(f"`users` must be ids with `items`, or a sparse {shape} matrix; got {got}.")
    if isinstance(matrix, Tensor):
        entries = matrix.detach().to_sparse_coo().coalesce()
        return entries.indices()[0], entries.indices()[1], entries.values()
    entries = matrix.tocoo()
    return torch.from_numpy(entries.row).long(), torch.from_numpy(entries.col).long(), torch.from_numpy(entries.data)


def _count_new(argument: str, count: int | None, ids: Any, axis: int) -> int:
    """How many new rows there are: as said, else by the matrix' shape or the largest number."""
    if count is not None:
        return _check_size(argument, count)
    if isinstance(ids, Tensor) and ids.dim() == 1:
        return int(ids.max()) + 1 if len(ids) else 1
    return int(ids.shape[axis])


def _check_size(argument: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"`{argument}` must be an int; got {type(value).__name__}.")
    if value < 1:
        raise ArgumentError(f"`{argument}` must be at least 1; got {value}.")
    return value


def _check_number(argument: str, value: float, *, above: float = -math.inf, least: float = -math.inf) -> float:
    if not isinstance(value, SupportsFloat) or isinstance(value, bool):
        raise ArgumentTypeError(f"`{argument}` must be a number; got {type(value).__name__}.")
    if not (math.isfinite(value) and value > above and value >= least):
        wanted = f"above {above}" if above > -math.inf else f"at least {least}" if least > -math.inf else ""
        raise ArgumentError(f"`{argument}` must be a finite number {wanted}; got {value}.")
    return float(value)


def _check_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype not in (torch.float32, torch.float64):
        raise ArgumentTypeError(f"`dtype` must be torch.float32 or torch.float64; got {dtype}.")
    return dtype


def _check_tensor(argument: str, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(f"`{argument}` must be a tensor; got {type(value).__name__}.")


def _check_prior(prior: Tensor, size: int) -> Tensor:
    _check_tensor("prior", prior)
    if prior.shape != (size,):
        raise ArgumentError(f"`prior` must have one weight per item, shape ({size},); got {tuple(prior.shape)}.")
    if not bool((prior.isfinite() & (prior > 0)).all()):
        raise ArgumentError("`prior` must be positive and finite; for counts with zeros pass counts + 1.")
    return prior.detach().double()


def _check_values(values: Tensor, shape: torch.Size) -> Tensor:
    _check_tensor("values", values)
    if values.shape != shape:
        raise ArgumentError(f"`values` must have the shape of `users`, {tuple(shape)}; got {tuple(values.shape)}.")
    if not bool((values.isfinite() & (values >= 0)).all()):
        raise ArgumentError("`values` must be finite and at least 0.")
    return values.detach()


def _check_ids(argument: str, ids: Tensor, size: int) -> Tensor:
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ArgumentTypeError(f"`{argument}` must be an integer tensor; got {got}.")
    if ids.dim() != 1:
        raise ArgumentError(f"`{argument}` must have one dimension; got shape {tuple(ids.shape)}.")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise ArgumentError(f"`{argument}` must lie in [0, {size}); got {int(ids.min())} to {int(ids.max())}.")
    return ids
