"""Half-steps of `RGFactorization` against a dense objective, its gradient and its Hessian; blocks and memory."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manymax.members.rg import interactions as interaction_rows
from manymax.members.rg import systems
from manymax.members.rg.als import RGFactorization
from manymax.members.rg.interactions import InteractionPairs, Rows
from tests.als.dense import (
    DIM,
    NUM_ITEMS,
    NUM_USERS,
    build,
    dense_objective,
    generator,
    gradient_left,
    interactions,
    minimiser,
    table_of,
)

# --- the objective ---------------------------------------------------------------------------------------------------


def test_objective_equals_the_dense_one(variant: dict[str, Any]) -> None:
    model = build(**variant)
    model.observe(*interactions())
    wanted = dense_objective(model, table_of(*interactions()), model.user_vectors, model.item_vectors)
    assert model.objective() == pytest.approx(float(wanted), rel=1e-12)


def test_plain_objective_is_the_rg_loss_of_every_interaction() -> None:
    model = build()
    model.observe(*interactions())
    scores = model.scores(torch.arange(NUM_USERS))
    spread = (scores - scores.mean(1, keepdim=True)).square().mean(1)
    log_partition = math.log(NUM_ITEMS) + scores.mean(1) + spread / 2
    loss = sum(log_partition[u] - scores[u, i] for u, i in table_of(*interactions()).nonzero())
    norms = 0.5 * (model.user_vectors.square().sum() + model.item_vectors.square().sum()) / 2
    assert model.objective() == pytest.approx(float(loss + norms), rel=1e-12)


def test_uniform_prior_is_plain() -> None:
    plain, prior = build(), build(prior=torch.ones(NUM_ITEMS))
    for model in (plain, prior):
        model.fit(*interactions(), sweeps=3)
    torch.testing.assert_close(prior.item_vectors, plain.item_vectors, rtol=1e-10, atol=1e-12)
    assert prior.objective() == pytest.approx(plain.objective(), rel=1e-12)
    torch.testing.assert_close(
        prior.scores(torch.arange(3)), plain.scores(torch.arange(3)) - math.log(NUM_ITEMS), rtol=1e-10, atol=1e-12
    )


# --- half-steps ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("blocks")
def test_gradient_vanishes_after_each_half_step(variant: dict[str, Any]) -> None:
    model, table = build(**variant), table_of(*interactions())
    model.observe(*interactions())
    for _ in range(3):
        model.update_users()
        assert gradient_left(model, table, "user") < 1e-12
        model.update_items()
        assert gradient_left(model, table, "item") < 1e-12


@pytest.mark.usefixtures("blocks")
def test_half_steps_equal_a_joint_dense_solve(variant: dict[str, Any]) -> None:
    model, table = build(**variant), table_of(*interactions())
    model.observe(*interactions())
    users = minimiser(lambda p: dense_objective(model, table, p, model.item_vectors), (NUM_USERS, DIM))
    model.update_users()
    torch.testing.assert_close(model.user_vectors, users, rtol=1e-9, atol=1e-11)
    items = minimiser(lambda q: dense_objective(model, table, model.user_vectors, q), (NUM_ITEMS, DIM))
    model.update_items()
    torch.testing.assert_close(model.item_vectors, items, rtol=1e-9, atol=1e-11)


def test_values_weigh_the_interactions(variant: dict[str, Any]) -> None:
    users, items = interactions()
    values = torch.rand(len(users), generator=generator(1)) * (torch.arange(len(users)) % 5 > 0)  # some are zero
    model, table = build(**variant), table_of(users, items, values)
    model.observe(users, items, values=values)
    wanted = float(dense_objective(model, table, model.user_vectors, model.item_vectors))
    assert model.objective() == pytest.approx(wanted, rel=1e-6)  # these values are float32
    model.observe(users, items, values=values.double())
    for side, update in (("user", model.update_users), ("item", model.update_items)):
        update()
        assert gradient_left(model, table, side) < 1e-12


@st.composite
def problems(draw: st.DrawFn) -> tuple[RGFactorization, Tensor, Tensor]:
    num_users, num_items, dim = draw(st.integers(1, 8)), draw(st.integers(1, 8)), draw(st.integers(1, 12))
    count, seed = draw(st.integers(1, 40)), draw(st.integers(0, 10**6))
    users = torch.randint(num_users, (count,), generator=generator(seed))
    items = torch.randint(num_items, (count,), generator=generator(seed + 1))
    prior = torch.rand(num_items, generator=generator(seed)) + 0.01 if draw(st.booleans()) else None
    model = build(
        seed,
        (num_users, num_items, dim),
        prior=prior,
        user_ridge=draw(st.sampled_from([1e-6, 0.01, 1.0, 100.0])),
        item_ridge=draw(st.sampled_from([1e-6, 0.01, 1.0, 100.0])),
        ridge_power=draw(st.sampled_from([0.0, 0.5, 1.0])),
        positive_weight=draw(st.sampled_from([0.0, 0.0, 0.05, 3.0])),
        init_std=draw(st.sampled_from([0.01, 1.0])),
    )
    return model, users, items


@settings(max_examples=100)
@given(problems())
def test_objective_never_rises(problem: tuple[RGFactorization, Tensor, Tensor]) -> None:
    model, users, items = problem
    model.observe(users, items)
    table = table_of(users, items, size=(model.num_users, model.num_items))
    before = model.objective()
    for _ in range(4):
        for side, update in (("user", model.update_users), ("item", model.update_items)):
            update()
            after = model.objective()
            assert after <= before + 1e-9 * max(1.0, abs(before))
            before = after
            assert gradient_left(model, table, side) < 1e-9


def test_objective_never_rises_in_float32(variant: dict[str, Any]) -> None:
    model = build(dtype=torch.float32, **variant)
    model.observe(*interactions())
    values = [model.objective()]
    for _ in range(10):
        for update in (model.update_users, model.update_items):
            update()
            values.append(model.objective())
    assert all(after <= before + 1e-5 * abs(before) for before, after in itertools.pairwise(values))


@pytest.mark.parametrize("ridge", [1e-3, 1e-6, 1e-12])
@pytest.mark.parametrize("dim", [2, 12])
def test_tiny_ridge_in_float32(variant: dict[str, Any], ridge: float, dim: int) -> None:
    """More dimensions than items leave directions without data: rounding noise must not be divided by the ridge."""
    keywords = variant | {"ridge": ridge, "user_ridge": ridge, "item_ridge": ridge, "dtype": torch.float32}
    model = build(size=(NUM_USERS, NUM_ITEMS, dim), **keywords)
    model.observe(*interactions())
    values = [model.objective()]
    for _ in range(8):
        for update in (model.update_users, model.update_items):
            update()
            values.append(model.objective())
    assert all(after <= before + 1e-5 * abs(before) for before, after in itertools.pairwise(values))


def test_float32_follows_float64(variant: dict[str, Any]) -> None:
    single, double = build(dtype=torch.float32, **variant), build(**variant)
    single.load_state_dict(double.state_dict())
    for model in (single, double):
        model.fit(*interactions(), sweeps=5)
    torch.testing.assert_close(
        single.scores(torch.arange(NUM_USERS)).double(), double.scores(torch.arange(NUM_USERS)), rtol=1e-3, atol=1e-4
    )


def test_rows_without_interactions() -> None:
    model = build()
    model.fit(*interactions(), sweeps=2)
    assert model.user_vectors[8].eq(0).all()
    # an item nobody met is pushed the opposite way to the mean user, like every item
    assert model.item_vectors[2].ne(0).any()


def test_enough_dimensions_reproduce_the_data() -> None:
    """RG's optimum is (1 + s - mean(s)) / C = y / |Y|, which a tiny ridge hardly moves."""
    users, items = interactions()
    model = build(size=(NUM_USERS, NUM_ITEMS, NUM_ITEMS), ridge=1e-9)
    model.fit(users, items, sweeps=200)
    scores, table = model.scores(torch.arange(8)), table_of(users, items)[:8]
    probs = (1 + scores - scores.mean(1, keepdim=True)) / NUM_ITEMS
    torch.testing.assert_close(probs, table / table.sum(1, keepdim=True), rtol=0, atol=1e-4)


def test_checkerboard(variant: dict[str, Any]) -> None:
    """Users like the items of their own parity; the item left out of each user's data must get the highest score."""
    size = 12
    table = (torch.arange(size)[:, None] + torch.arange(size)) % 2 == 0
    missing = table.clone().fill_diagonal_(False)
    keywords = variant | ({"prior": torch.ones(size)} if "prior" in variant else {})
    model = build(size=(size, size, 4), **keywords)
    model.fit(*missing.nonzero(as_tuple=True), sweeps=15)
    scores = model.scores(torch.arange(size)).masked_fill(missing, -math.inf)
    assert scores.argmax(1).tolist() == list(range(size))


# --- blocks and memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 40, 300])
def test_block_sizes_do_not_matter(variant: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    users, items = interactions()
    values = torch.rand(len(users), generator=generator(1), dtype=torch.float64)
    wanted = build(**variant).fit(users, items, values=values, sweeps=2)
    for module, name in (
        (interaction_rows, "SHARED_BLOCK"),
        (interaction_rows, "SEPARATE_BLOCK"),
        (systems, "GRAM_ROWS"),
    ):
        monkeypatch.setattr(module, name, size)
    blocked = build(**variant).fit(users, items, values=values, sweeps=2)
    torch.testing.assert_close(blocked.user_vectors, wanted.user_vectors, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(blocked.item_vectors, wanted.item_vectors, rtol=1e-10, atol=1e-12)
    assert blocked.objective() == pytest.approx(wanted.objective(), rel=1e-11)


class LargestTensor(TorchDispatchMode):
    """Keeps the size of the largest tensor that any operation returns."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [x for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, Tensor)]
        self.size = max([self.size, *(x.untyped_storage().nbytes() // x.element_size() for x in made)])
        return out


@pytest.mark.parametrize("keywords", [{}, {"prior": torch.ones(150)}, {"positive_weight": 1.0}])
def test_memory_is_linear(keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor has entries x dim, users x items or rows x dim^2 numbers: the largest are data, vectors and blocks."""
    num_users, num_items, dim, count = 120, 150, 8, 6000
    users = torch.randint(num_users, (count,), generator=generator(0))
    items = torch.randint(num_items, (count,), generator=generator(1))
    for name in ("SHARED_BLOCK", "SEPARATE_BLOCK"):
        monkeypatch.setattr(interaction_rows, name, 4000)
    model = build(size=(num_users, num_items, dim), **keywords)
    with LargestTensor() as largest:
        model.fit(users, items, sweeps=1)
        model.objective()
    assert largest.size <= count


def test_blocks_of_more_work_than_int32_counts() -> None:
    pairs = InteractionPairs(*[torch.tensor([0, 1, 2])] * 2, None)
    rows = Rows(pairs, 3, torch.float32)
    rows.offsets = torch.tensor([0, 8_000_000, 16_000_000, 24_000_000], dtype=torch.int32)
    assert [(b.start, b.stop) for b in rows.blocks(1 << 31, per_entry=192, per_row=1)] == [(0, 2), (2, 3)]
