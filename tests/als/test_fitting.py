"""Fitting, new users and items, saving and copying an `RGFactorization`."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from manymax.errors import ManymaxError
from manymax.members.rg.als import RGFactorization
from tests.als.dense import (
    DIM,
    NUM_ITEMS,
    NUM_USERS,
    PRIOR,
    build,
    dense_objective,
    generator,
    interactions,
    minimiser,
    table_of,
)

# --- fitting, folding in, saving --------------------------------------------------------------------------------------


def test_fit_goes_on_and_stops_on_request() -> None:
    seen: list[int] = []
    model = build()
    model.fit(*interactions(), sweeps=10, callback=lambda model, sweep: seen.append(sweep) or sweep == 3)
    assert seen == [1, 2, 3]
    model.fit(*interactions(), sweeps=2)
    assert torch.equal(model.item_vectors, build().fit(*interactions(), sweeps=5).item_vectors)


def test_folded_in_users_equal_a_half_step_among_the_old(variant: dict[str, Any]) -> None:
    users, items = interactions()
    model = build(**variant).fit(users, items, sweeps=2)
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folded = model.fold_in_users(users, items, num_users=NUM_USERS + 1)
    assert all(torch.equal(old[name], tensor) for name, tensor in model.state_dict().items())
    model.update_users()
    torch.testing.assert_close(folded[:NUM_USERS], model.user_vectors, rtol=1e-12, atol=1e-14)
    assert folded[NUM_USERS].eq(0).all() or "prior" in variant
    assert model.fold_in_users(torch.tensor([1]), torch.tensor([0])).shape == (2, DIM)
    matrix = table_of(users, items).to_sparse()
    torch.testing.assert_close(model.fold_in_users(matrix), folded[:NUM_USERS], rtol=1e-12, atol=1e-14)


def test_folded_in_items_minimise_the_enlarged_objective(variant: dict[str, Any]) -> None:
    users, items = interactions()
    new_users, new_items = torch.tensor([0, 3, 3, 6, 8, 0]), torch.tensor([0, 0, 2, 2, 2, 2])
    model = build(**variant).fit(users, items, sweeps=2)
    prior = torch.tensor([0.1, 0.05, 0.2]) if "prior" in variant else None
    folded = model.fold_in_items(new_users, new_items, prior=prior)

    table = torch.cat([table_of(users, items), table_of(new_users, new_items, size=(NUM_USERS, 3))], 1)
    share = prior.double() if prior is not None else torch.full((3,), 1 / (NUM_ITEMS + 3), dtype=torch.float64)
    old = model.prior if model.prior is not None else torch.full((NUM_ITEMS,), 1 / NUM_ITEMS, dtype=torch.float64)
    base = torch.cat([old * (1 - share.sum()), share])

    def enlarged(new: Tensor) -> Tensor:
        return dense_objective(model, table, model.user_vectors, torch.cat([model.item_vectors, new]), base)

    torch.testing.assert_close(folded, minimiser(enlarged, (3, DIM)), rtol=1e-6, atol=1e-8)
    matrix = table[:, NUM_ITEMS:].to_sparse()
    torch.testing.assert_close(model.fold_in_items(matrix, prior=prior), folded, rtol=1e-12, atol=1e-14)


def test_fold_in_errors() -> None:
    pair = (torch.tensor([0]), torch.tensor([0]))
    model = build().fit(*interactions(), sweeps=1)
    with pytest.raises(ManymaxError, match="`prior` must be given if and only if the model has one; leave it out"):
        model.fold_in_items(*pair, prior=torch.tensor([0.5]))
    with pytest.raises(ManymaxError, match=r"`items` must lie in \[0, 7\)"):
        model.fold_in_users(torch.tensor([0]), torch.tensor([7]))
    with pytest.raises(ManymaxError, match=r"`users` must lie in \[0, 1\)"):
        model.fold_in_users(torch.tensor([1]), torch.tensor([0]), num_users=1)
    model = build(prior=PRIOR).fit(*interactions(), sweeps=1)
    with pytest.raises(ManymaxError, match="give the shares of the new items"):
        model.fold_in_items(*pair)
    with pytest.raises(ManymaxError, match="must sum to less than 1; got 1"):
        model.fold_in_items(*pair, prior=torch.tensor([1.0]))


def test_state_dict_resumes(variant: dict[str, Any]) -> None:
    wanted = build(**variant).fit(*interactions(), sweeps=4)
    first = build(**variant).fit(*interactions(), sweeps=2)
    assert set(first.state_dict()) == {"user_vectors", "item_vectors"} | ({"prior"} & variant.keys())
    second = build(seed=5, **variant)
    second.load_state_dict(first.state_dict())
    second.fit(*interactions(), sweeps=2)
    assert torch.equal(second.item_vectors, wanted.item_vectors)
    assert second.objective() == wanted.objective()


def test_copies_and_casts_keep_the_interactions(variant: dict[str, Any]) -> None:
    users, items = interactions()
    values = torch.ones(len(users))
    model = build(dtype=torch.float32, **variant).fit(users, items, values=values, sweeps=1)
    twin = copy.deepcopy(model).double()
    twin.update_users()
    model.update_users()
    torch.testing.assert_close(twin.user_vectors, model.user_vectors.double(), rtol=1e-3, atol=1e-4)


def test_generator_decides_the_start() -> None:
    assert torch.equal(build(seed=1).item_vectors, build(seed=1).item_vectors)
    assert not torch.equal(build(seed=1).item_vectors, build(seed=2).item_vectors)
    large = RGFactorization(2000, 2, 10, init_std=0.3, generator=generator(0))
    error = 0.3 / math.sqrt(2 * large.user_vectors.numel())
    assert abs(float(large.user_vectors.std()) - 0.3) < 4 * error
