"""Alternating least squares (ALS) for RG: factorisation of a matrix of interactions under the RG loss.

Each user u has a vector p_u and each item j a vector q_j. With scores x_uj = <p_u, q_j>, interactions v_ui >= 0 (1 if
no values are given), n_u = sum_i v_ui, a base distribution pi over the items (uniform, or a prior), and mean and Var
taken over j ~ pi, the objective is

    sum_u n_u (mean(x_u) + Var(x_u) / 2) - sum_ui v_ui (x_ui + log pi_i)     RG, expanded around log pi
      + a/2 sum_ui v_ui (x_ui - 1)^2                                         positive weight a
      + 1/2 sum_u l_u |p_u|^2 + 1/2 sum_j m_j |q_j|^2                        ridge

For fixed items it is a convex quadratic in the users, and for fixed users in the items, so each half-step (all users,
or all items) is solved exactly. Both consist of many small linear systems of one form. For row r (a user or an item),
with the vectors z_i of its neighbours i on the other side,

    M_r x_r = (1 + a) sum_i v_ri z_i - w_r g,    M_r = w_r A + a sum_i v_ri z_i z_i^T + ridge_r I

    users   w_u = n_u     A = Cov(q)                    g = mean(q)
    items   w_j = pi_j    A = sum_u n_u p_u p_u^T       g = sum_u n_u p_u - t,  t = A mean(q)

For a = 0 all rows share the eigenvectors of A. The items are coupled: their systems contain t, which depends on the
mean of the new item vectors. With b_j the right-hand side at t = 0 and N_j = M_j - pi_j A, eliminating the items leaves
one system of size dim for t,

    [sum_j pi_j N_j M_j^-1] t = sum_j b_j - sum_j N_j M_j^-1 b_j,    sum_j b_j = a sum_u n_u p_u

which in this form is well conditioned for any ridge. For a = 0, uniform pi and equal ridges the solution is t = 0, and
all items share one matrix.

Citations: Pu et al., "Is Softmax Loss all you need?" (the RG loss); Pu et al., ICML 2024 (RG^2, its uncentred relative,
by ALS); Rendle et al., RecSys 2022 (the ridge that grows with the number of interactions).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from manymax.errors import ArgumentError, ManymaxError
from manymax.members.rg import interactions
from manymax.members.rg.als_arguments import check_dtype, check_ids, check_number, check_prior, check_size, count_new
from manymax.members.rg.interactions import Rows, read_interactions
from manymax.members.rg.systems import Systems, gram, weighted_sum
from manymax.ops.arguments import checked
from manymax.settings import Setting

SETTINGS = (
    Setting("ridge", float, 0.1, "Weight of the squared norms in ALS.", above=0),
    Setting("ridge_power", float, 1.0, "Power of a row's sum of interactions that its ridge grows with."),
    Setting(
        "positive_weight", float, 0.0, "Weight of the term that pulls scores of interactions to 1 in ALS.", least=0
    ),
)


class RGFactorization(nn.Module):
    """Matrix factorisation under the RG loss, fitted by exact alternating least squares.

    Scores are <p_u, q_j>, plus log pi_j if a prior is given. Each half-step minimises the objective, which is written
    out at the top of this module, over the vectors of one side, so the objective never rises. A sweep (all users, then
    all items) costs O(nnz dim + (num_users + num_items) dim^2) with `positive_weight=0` and O(nnz dim^2 + (num_users +
    num_items) dim^3) otherwise, where nnz is the number of interactions; it needs O(nnz + (num_users + num_items) dim)
    memory.

    The vectors and the prior are buffers, so `state_dict` holds them. The interactions are not in it: call `observe`
    or `fit` to go on with a loaded model. At a minimum the scores depend on the product of the two ridges only.

    Args:
        num_users, num_items: sizes of the two sides.
        dim: length of the vectors.
        ridge: weight of the squared norms, positive.
        user_ridge, item_ridge: the same for one side; None means `ridge`.
        ridge_power: the ridge of row r is multiplied by n_r ** ridge_power, with n_r the sum of its interactions (1 if
            it has none). At 1 one value of `ridge` suits data of any size; at 0 all items share one matrix, and a
            sweep is fastest.
        positive_weight: weight a of the term that pulls the scores x_ui of interactions to 1.
        prior: (num_items,) positive weights, normalised to pi; None means uniform, the plain RG loss.
        init_std: standard deviation of the first vectors.
        dtype: torch.float32 or torch.float64; None means torch's default.
        generator: torch generator of the first vectors.

    Example:
        Users 0 and 1 like items 0 and 1, users 2 and 3 like items 2 and 3; user 1 has not met item 1 yet.

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

    @checked
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
        self.num_users = check_size("num_users", num_users)
        self.num_items = check_size("num_items", num_items)
        self.dim = check_size("dim", dim)
        ridge = check_number("ridge", ridge, above=0.0)
        self.user_ridge = ridge if user_ridge is None else check_number("user_ridge", user_ridge, above=0.0)
        self.item_ridge = ridge if item_ridge is None else check_number("item_ridge", item_ridge, above=0.0)
        self.ridge_power = check_number("ridge_power", ridge_power)
        self.positive_weight = check_number("positive_weight", positive_weight, least=0.0)
        init_std = check_number("init_std", init_std, above=0.0)
        dtype = check_dtype(dtype or torch.get_default_dtype())
        device = None if generator is None else generator.device
        for name, size in (("user_vectors", num_users), ("item_vectors", num_items)):
            noise = torch.randn(size, dim, dtype=dtype, generator=generator, device=device)
            self.register_buffer(name, init_std * noise)
        weights = None if prior is None else check_prior(prior, num_items)
        self.register_buffer("prior", None if weights is None else (weights / weights.sum()).to(dtype))
        self._by_user: Rows | None = None
        self._by_item: Rows | None = None

    def extra_repr(self) -> str:
        """Sizes shown when the module is printed."""
        return f"num_users={self.num_users}, num_items={self.num_items}, dim={self.dim}"

    @checked
    def fit(
        self,
        users: Any,
        items: Tensor | None = None,
        *,
        values: Tensor | None = None,
        sweeps: int = 15,
        callback: Callable[[RGFactorization, int], object] | None = None,
    ) -> RGFactorization:
        """Take the interactions and make `sweeps` sweeps, each over all users and then all items.

        Args:
            users, items, values: see `observe`.
            sweeps: number of sweeps; they start from the present vectors.
            callback: called as callback(model, sweep) after each sweep, counted from 1; a true result stops the fit.

        Returns:
            The model itself.
        """
        check_size("sweeps", sweeps)
        self.observe(users, items, values=values)
        for sweep in range(1, sweeps + 1):
            self.update_users()
            self.update_items()
            if callback is not None and callback(self, sweep):
                break
        return self

    @checked
    def observe(self, users: Any, items: Tensor | None = None, *, values: Tensor | None = None) -> None:
        """Take interactions for the half-steps and the objective; they replace earlier ones.

        Args:
            users: (nnz,) user ids in any order, or a sparse (num_users, num_items) matrix, of torch or scipy,
                whose entries are the values.
            items: (nnz,) item ids; left out with a matrix.
            values: (nnz,) non-negative weights, summed over repeats of a pair. Without them a pair counts once,
                however often it is given.
        """
        pairs = read_interactions(users, items, values, (self.num_users, self.num_items), like=self.user_vectors)
        self._by_user = Rows(pairs, self.num_users, self.user_vectors.dtype)
        self._by_item = Rows(pairs.transposed(), self.num_items, self.user_vectors.dtype)

    @torch.no_grad()
    def update_users(self) -> None:
        """User half-step: set all user vectors to those that minimise the objective for the present items."""
        by_user, _ = self._observed()
        self._solve_users(by_user, out=self.user_vectors)

    @torch.no_grad()
    def update_items(self) -> None:
        """Item half-step: set all item vectors to those that minimise the objective for the present users."""
        by_user, by_item = self._observed()
        first, second = self._user_moments(by_user.total)
        base, ridge = self._base(), self._ridge(self.item_ridge, by_item)
        # With these settings all items share one matrix and t = 0: no coupled system has to be solved.
        if self.positive_weight == 0 and self.prior is None and self.ridge_power == 0:
            systems = self._systems(by_item, self.user_vectors, base[:1], ridge[:1], second)
            systems.solve(first, self.item_vectors)
        else:
            systems = self._systems(by_item, self.user_vectors, base, ridge, second)
            systems.solve_coupled(first, self.positive_weight * first, self.item_vectors)

    @torch.no_grad()
    def objective(self) -> float:
        """Value of the objective (written out at the top of this module) at the present vectors, summed in float64."""
        # sum_u n_u (mean(x_u) + Var(x_u) / 2) = <sum_u n_u p_u, mean(q)> + <sum_u n_u p_u p_u^T, Cov(q)> / 2: moments
        # of both sides are enough, no table of scores is made.
        by_user, by_item = self._observed()
        mean = self._item_mean()
        first, second = self._user_moments(by_user.total)
        rg = first @ mean + (second * gram(self.item_vectors, self._base(), mean)).sum() / 2
        rg -= self._linear_term(by_user, by_item)
        user_norms = weighted_sum(self.user_vectors.square(), self._ridge(self.user_ridge, by_user)).sum()
        item_norms = weighted_sum(self.item_vectors.square(), self._ridge(self.item_ridge, by_item)).sum()
        if self.positive_weight > 0:
            rg += self.positive_weight / 2 * self._positive_term(by_user)
        return float(rg + (user_norms + item_norms) / 2)

    @checked
    def scores(self, users: Tensor) -> Tensor:
        """Scores of all items for known users.

        Args:
            users: (B,) user ids.

        Returns:
            (B, num_items) scores.
        """
        check_ids("users", users, self.num_users)
        return self.query_scores(self.user_vectors[users])

    @checked
    def query_scores(self, queries: Tensor) -> Tensor:
        """Scores of all items for given user vectors, such as those from `fold_in_users`.

        Args:
            queries: (B, dim) user vectors.

        Returns:
            (B, num_items) scores.
        """
        scores = queries @ self.item_vectors.T
        return scores if self.prior is None else scores + self.prior.log()

    @torch.no_grad()
    @checked
    def fold_in_users(
        self, users: Any, items: Tensor | None = None, *, values: Tensor | None = None, num_users: int | None = None
    ) -> Tensor:
        """Vectors of new users, by one user half-step on their interactions alone; the model is not changed.

        For fixed items the objective is a sum over users, so these are the vectors that a half-step with the new users
        among the old ones would give.

        Args:
            users: (nnz,) ids of the new users, counted from 0, or a sparse (num_users, num_items) matrix.
            items, values: as in `observe`.
            num_users: number of new users; None means the largest id + 1, or the number of rows of the matrix.

        Returns:
            (num_users, dim) vectors.
        """
        size = count_new("num_users", num_users, users, axis=0)
        pairs = read_interactions(users, items, values, (size, self.num_items), like=self.user_vectors)
        rows = Rows(pairs, size, self.user_vectors.dtype)
        return self._solve_users(rows, out=self.user_vectors.new_empty(size, self.dim))

    @torch.no_grad()
    @checked
    def fold_in_items(
        self,
        users: Any,
        items: Tensor | None = None,
        *,
        values: Tensor | None = None,
        num_items: int | None = None,
        prior: Tensor | None = None,
    ) -> Tensor:
        """Vectors of K new items, by one item half-step over them alone; the model is not changed.

        They minimise the objective of the enlarged data, all new items together, with the present vectors fixed: there
        are K more items, n_u counts the new interactions too, and the old items keep their proportions in pi.

        Args:
            users: (nnz,) ids of known users, or a sparse (num_users, K) matrix.
            items: (nnz,) ids of the new items, counted from 0.
            values: as in `observe`.
            num_items: K; None means the largest id + 1, or the number of columns of the matrix.
            prior: (K,) shares of the new items in the enlarged pi; needed if and only if the model has a prior.

        Returns:
            (K, dim) vectors.
        """
        by_user, _ = self._observed()
        size = count_new("num_items", num_items, users if items is None else items, axis=1)
        pairs = read_interactions(users, items, values, (self.num_users, size), like=self.user_vectors)
        rows, base = Rows(pairs.transposed(), size, self.user_vectors.dtype), self._enlarged_base(prior, size)
        new = torch.bincount(pairs.rows, pairs.values, minlength=self.num_users).to(self.user_vectors)
        first, second = self._user_moments(by_user.total + new)
        # The old items keep the share `old_share` of pi and their vectors: they enter the system for t as a constant.
        # `right_sum` is sum_j b_j over the new items.
        old_share = 1 - float(base.sum())
        right_sum = (1 + self.positive_weight) * weighted_sum(self.user_vectors, new) - (1 - old_share) * first
        systems = self._systems(rows, self.user_vectors, base, self._ridge(self.item_ridge, rows), second)
        out = self.item_vectors.new_empty(size, self.dim)
        return systems.solve_coupled(first, old_share * second @ self._item_mean() + right_sum, out, old_share)

    def _observed(self) -> tuple[Rows, Rows]:
        """The interactions by user and by item."""
        if self._by_user is None or self._by_item is None:
            raise ManymaxError("there are no interactions yet: call `fit` or `observe` first.")
        return self._by_user, self._by_item

    def _base(self) -> Tensor:
        """The base distribution pi, (num_items,)."""
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
        check_prior(prior, size)
        if float(prior.sum()) >= 1:
            raise ArgumentError(f"`prior` of the new items must sum to less than 1; got {float(prior.sum()):.6g}.")
        return prior.to(self.item_vectors)

    def _item_mean(self) -> Tensor:
        """Mean of the item vectors under pi, (dim,) float64."""
        return weighted_sum(self.item_vectors, self._base())

    def _user_moments(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """sum_u n_u p_u, (dim,), and sum_u n_u p_u p_u^T, (dim, dim), float64."""
        return weighted_sum(self.user_vectors, total), gram(self.user_vectors, total)

    def _ridge(self, ridge: float, rows: Rows) -> Tensor:
        """The ridge of each row, (R,)."""
        found = ridge * torch.where(rows.total > 0, rows.total, 1.0).pow(self.ridge_power)
        if not bool((found.isfinite() & (found > 0)).all()):
            raise ArgumentError(
                f"`ridge_power` of {self.ridge_power} and a ridge of {ridge} give a row the ridge"
                f" {found[~(found.isfinite() & (found > 0))][0].item()}, which must be positive and finite: take a"
                " `ridge_power` nearer to 0."
            )
        return found

    def _systems(self, rows: Rows, vectors: Tensor, weight: Tensor, ridge: Tensor, matrix: Tensor) -> Systems:
        """The systems of a half-step, with the positive weight of this model."""
        return Systems(rows, vectors, weight, ridge, matrix, self.positive_weight)

    def _solve_users(self, rows: Rows, out: Tensor) -> Tensor:
        """Write the vectors of users with the given interactions into `out`, (R, dim), and return it."""
        mean = self._item_mean()
        covariance = gram(self.item_vectors, self._base(), mean)
        ridge = self._ridge(self.user_ridge, rows)
        return self._systems(rows, self.item_vectors, rows.total, ridge, covariance).solve(mean, out)

    def _linear_term(self, by_user: Rows, by_item: Rows) -> Tensor:
        """sum_ui v_ui (x_ui + log pi_i), float64."""
        total = weighted_sum(self._base().log()[:, None], by_item.total)[0]
        for block in by_user.blocks(interactions.SHARED_BLOCK, per_entry=1, per_row=self.dim):
            sums = by_user.neighbour_sums(block, self.item_vectors)
            total += (self.user_vectors[block] * sums).sum(dtype=torch.float64)
        return total

    def _positive_term(self, by_user: Rows) -> Tensor:
        """sum_ui v_ui (x_ui - 1)^2, float64."""
        total = self.user_vectors.new_zeros((), dtype=torch.float64)
        for block in by_user.blocks(interactions.SEPARATE_BLOCK, per_entry=3 * self.dim, per_row=1):
            offsets, items, values = by_user.entries(block)
            users = torch.arange(block.start, block.stop, device=offsets.device).repeat_interleave(offsets.diff())
            error = (self.user_vectors[users] * self.item_vectors[items]).sum(-1) - 1  # (entries,): x_ui - 1
            total += (error.square() if values is None else error.square() * values).sum(dtype=torch.float64)
        return total
