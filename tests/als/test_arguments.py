"""Forms of interactions that `RGFactorization` takes, and arguments that it refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import scipy.sparse
import torch

from manymax.errors import ArgumentError, ManymaxError
from manymax.members.rg.als import RGFactorization
from tests.als.dense import build, generator, interactions, table_of

# --- input -----------------------------------------------------------------------------------------------------------


def forms() -> Iterator[tuple[str, tuple[Any, ...]]]:
    users, items = interactions()
    table = table_of(users, items)
    yield "sorted pairs", table.nonzero(as_tuple=True)
    yield "int32 pairs", (users.int(), items.int())
    yield "torch COO", (table.to_sparse(),)
    yield "scipy CSR", (scipy.sparse.csr_matrix(table.numpy()),)
    yield "scipy COO", (scipy.sparse.coo_array(table.numpy()),)


@pytest.mark.parametrize(("name", "arguments"), list(forms()))
def test_forms_of_the_same_interactions(name: str, arguments: tuple[Any, ...]) -> None:
    wanted = build().fit(*interactions(), sweeps=2)
    assert torch.equal(build().fit(*arguments, sweeps=2).item_vectors, wanted.item_vectors)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_torch_csr_matrix_brings_its_values() -> None:
    users, items = interactions()
    values = torch.rand(len(users), generator=generator(1), dtype=torch.float64)
    wanted = build().fit(users, items, values=values, sweeps=2)
    model = build().fit(table_of(users, items, values).to_sparse_csr(), sweeps=2)
    torch.testing.assert_close(model.item_vectors, wanted.item_vectors, rtol=1e-12, atol=1e-14)


BAD_MODELS: list[tuple[dict[str, Any], str]] = [
    ({"num_users": 0}, "`num_users` must be at least 1"),
    ({"num_items": -1}, "`num_items` must be at least 1"),
    ({"dim": 0}, "`dim` must be at least 1"),
    ({"dim": 2.0}, "`dim` must be an int"),
    ({"ridge": -1.0}, "`ridge` must be a finite number above 0"),
    ({"ridge": 0.0}, "`ridge` must be a finite number above 0"),
    ({"user_ridge": 0.0}, "`user_ridge` must be"),
    ({"item_ridge": math.nan}, "`item_ridge` must be"),
    ({"ridge_power": math.inf}, "`ridge_power` must be a finite number"),
    ({"positive_weight": -0.1}, "`positive_weight` must be a finite number at least 0"),
    ({"init_std": 0.0}, "`init_std` must be"),
    ({"prior": torch.ones(3)}, "`prior` must have one weight per item"),
    ({"prior": torch.tensor([1.0, 0.0])}, "`prior` must be positive and finite"),
    ({"dtype": torch.float16}, "`dtype` must be torch.float32 or torch.float64"),
]


@pytest.mark.parametrize(("keywords", "message"), BAD_MODELS)
def test_bad_models(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ManymaxError, match=message):
        RGFactorization(**({"num_users": 2, "num_items": 2, "dim": 2} | keywords))


ids = torch.tensor
BAD_DATA: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((ids([0, 3]), ids([0, 0])), {}, r"`users` must lie in \[0, 3\); got 0 to 3"),
    ((ids([0, -1]), ids([0, 0])), {}, r"`users` must lie in \[0, 3\); got -1 to 0"),
    ((ids([0, 1]), ids([0, 4])), {}, r"`items` must lie in \[0, 4\)"),
    ((ids([0, 1]), ids([0])), {}, "`users` and `items` must have one shape"),
    ((ids([[0]]), ids([[0]])), {}, "`users` must have one dimension"),
    ((ids([0.0]), ids([0])), {}, "`users` must be an integer tensor; got torch.float32"),
    (([0], ids([0])), {}, "`users` must be an integer tensor; got list"),
    ((ids([], dtype=torch.int64), ids([], dtype=torch.int64)), {}, "at least one interaction"),
    ((ids([0]), ids([0])), {"values": torch.ones(2)}, "`values` must have the shape of `users`"),
    ((ids([0]), ids([0])), {"values": -torch.ones(1)}, "`values` must be finite and at least 0"),
    ((ids([0, 1]),), {}, r"a sparse \(3, 4\) matrix; got \(2,\)"),
    ((torch.ones(4, 3).to_sparse(),), {}, r"a sparse \(3, 4\) matrix; got \(4, 3\)"),
    ((torch.ones(3, 4).to_sparse(),), {"values": torch.ones(12)}, "`values` cannot be given with a matrix"),
    (("pairs",), {}, "a sparse .* matrix; got str"),
]


@pytest.mark.parametrize(("arguments", "keywords", "message"), BAD_DATA)
def test_bad_data(arguments: tuple[Any, ...], keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ManymaxError, match=message):
        RGFactorization(3, 4, 2).observe(*arguments, **keywords)


def test_use_before_data() -> None:
    model = build()
    for call in (model.update_users, model.update_items, model.objective):
        with pytest.raises(ManymaxError, match="call `fit` or `observe` first"):
            call()
    with pytest.raises(ManymaxError, match="`sweeps` must be at least 1"):
        model.fit(*interactions(), sweeps=0)
    with pytest.raises(ManymaxError, match=r"`users` must lie in \[0, 9\)"):
        model.scores(torch.tensor([9]))


def test_singular_systems_say_what_to_do() -> None:
    """One user with twenty equal item vectors: a ridge far below rounding does not make the system invertible."""
    model = build(positive_weight=1e12, ridge=1e-12, dtype=torch.float32, size=(1, 40, 6))
    model.item_vectors[:20] = model.item_vectors[0]
    with pytest.raises(ManymaxError, match=r"raise `ridge` or use torch\.float64"):
        model.fit(torch.zeros(20, dtype=torch.int64), torch.arange(20))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"ridge": "a"}, "`ridge` must be a number; got 'a'"), ({"prior": [0.5, 0.5]}, "`prior` must be a tensor")],
)
def test_settings_of_another_kind(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ManymaxError, match=words):
        RGFactorization(3, 2, 2, **options)


def test_values_of_another_kind() -> None:
    pairs = torch.tensor([0, 1])
    with pytest.raises(ManymaxError, match="`values` must be a tensor or None; got list"):
        RGFactorization(3, 2, 2).fit(pairs, pairs, values=[1.0, 2.0])


@pytest.mark.parametrize("power", [1e4, -1e4])
def test_a_ridge_that_no_number_holds_is_refused(power: float) -> None:
    model = RGFactorization(2, 3, dim=2, ridge_power=power)
    with pytest.raises(ArgumentError, match=r"`ridge_power` of .* must be positive and finite"):
        model.fit(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 2]), sweeps=1)
