"""RGFactorization: every half-step against a dense objective, its autograd gradient and its Hessian."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manymax.errors import ManymaxError
from manymax.members.rg import interactions as sparse
from manymax.members.rg import systems
from manymax.members.rg.als import RGFactorization
from manymax.members.rg.interactions import InteractionPairs, Rows

NUM_USERS, NUM_ITEMS, DIM = 9, 7, 4
PRIOR = torch.tensor([5.0, 1.0, 0.5, 8.0, 2.0, 1.0, 0.1])

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two_ridges": {"user_ridge": 0.3, "item_ridge": 2.0},
    "ridge_power": {"ridge_power": 1.0},
    "prior": {"prior": PRIOR},
    "prior_ridge_power": {"prior": PRIOR, "ridge_power": 0.5},
    "positive": {"positive_weight": 0.8},
    "positive_prior": {"positive_weight": 2.0, "prior": PRIOR, "ridge_power": -0.3},
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> dict[str, Any]:
    return VARIANTS[request.param]


@pytest.fixture(params=["whole", "single rows"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows in one block, where the longest decides how they are solved, or each row in its own."""
    if request.param == "single rows":
        monkeypatch.setattr(sparse, "SHARED_BLOCK", 1)
        monkeypatch.setattr(sparse, "SEPARATE_BLOCK", 1)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def interactions(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Unsorted pairs, each given twice: user 3 has every item but one, user 5 a single one, user 8 and item 2 none."""
    table = torch.rand(NUM_USERS, NUM_ITEMS, generator=generator(seed)) < 0.4
    table[3], table[5], table[8], table[:, 2] = True, False, False, False
    table[5, 6] = True
    users, items = table.nonzero(as_tuple=True)
    order = torch.randperm(len(users), generator=generator(seed))
    return users[order].repeat(2), items[order].repeat(2)


def build(seed: int = 0, size: tuple[int, int, int] = (NUM_USERS, NUM_ITEMS, DIM), **keywords: Any) -> RGFactorization:
    keywords = {"init_std": 0.5, "dtype": torch.float64, "ridge": 0.5, "ridge_power": 0.0} | keywords
    return RGFactorization(*size, generator=generator(seed), **keywords)


def table_of(users: Tensor, items: Tensor, values: Tensor | None = None, size: tuple[int, int] | None = None) -> Tensor:
    table = torch.zeros(size or (NUM_USERS, NUM_ITEMS), dtype=torch.float64)
    if values is None:
        table[users, items] = 1
        return table
    return table.index_put((users, items), values.double(), accumulate=True)


def dense_objective(model: RGFactorization, table: Tensor, p: Tensor, q: Tensor, base: Tensor | None = None) -> Tensor:
    """The objective written out over the full score table."""
    uniform = torch.full((q.shape[0],), 1 / q.shape[0], dtype=torch.float64)
    base = base if base is not None else uniform if model.prior is None else model.prior
    x = p @ q.T
    mean = (x * base).sum(1)
    variance = ((x - mean[:, None]).square() * base).sum(1)
    count = table.sum(1)
    rg = (count * (mean + variance / 2)).sum() - (table * (x + base.log())).sum()
    positive = model.positive_weight / 2 * (table * (x - 1).square()).sum()
    rows = [torch.where(total > 0, total, 1.0) ** model.ridge_power for total in (table.sum(1), table.sum(0))]
    user_norms = model.user_ridge * (rows[0] * p.square().sum(1)).sum()
    item_norms = model.item_ridge * (rows[1] * q.square().sum(1)).sum()
    return rg + positive + (user_norms + item_norms) / 2


def gradient_left(model: RGFactorization, table: Tensor, side: str) -> float:
    """Largest entry of the gradient for one side, relative to the terms that cancel in it: sum_i v_ri |z_i|."""
    vectors = {"user": model.user_vectors, "item": model.item_vectors}
    moved = vectors[side].clone().requires_grad_()
    scale = (table @ vectors["item"].abs() if side == "user" else table.T @ vectors["user"].abs()).max()
    vectors[side] = moved
    (gradient,) = torch.autograd.grad(dense_objective(model, table, vectors["user"], vectors["item"]), moved)
    return float(gradient.abs().max() / scale.clamp(min=1e-200))


def minimiser(function: Any, shape: tuple[int, int]) -> Tensor:
    """The minimum of a quadratic, from its gradient and Hessian at the origin in one joint solve."""
    origin = torch.zeros(shape, dtype=torch.float64)
    size = origin.numel()
    gradient = torch.autograd.functional.jacobian(function, origin).reshape(size)
    hessian = torch.autograd.functional.hessian(function, origin).reshape(size, size)
    return -torch.linalg.solve(hessian, gradient).reshape(shape)


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
    assert model.objective() == pytest.approx(wanted, rel=1e-6)  # values pass through float32 here
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
    """RG's optimum is p-hat = (1 + s - mean(s)) / C = y / |Y|, reached when the ridge fades."""
    users, items = interactions()
    model = build(size=(NUM_USERS, NUM_ITEMS, NUM_ITEMS), ridge=1e-9)
    model.fit(users, items, sweeps=200)
    scores, table = model.scores(torch.arange(8)), table_of(users, items)[:8]
    probs = (1 + scores - scores.mean(1, keepdim=True)) / NUM_ITEMS
    torch.testing.assert_close(probs, table / table.sum(1, keepdim=True), rtol=0, atol=1e-4)


def test_checkerboard(variant: dict[str, Any]) -> None:
    """Users and items of one parity belong together; the one missing pair of each user must come out on top."""
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
    for module, name in ((sparse, "SHARED_BLOCK"), (sparse, "SEPARATE_BLOCK"), (systems, "GRAM_ROWS")):
        monkeypatch.setattr(module, name, size)
    blocked = build(**variant).fit(users, items, values=values, sweeps=2)
    torch.testing.assert_close(blocked.user_vectors, wanted.user_vectors, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(blocked.item_vectors, wanted.item_vectors, rtol=1e-10, atol=1e-12)
    assert blocked.objective() == pytest.approx(wanted.objective(), rel=1e-11)


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [x for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, Tensor)]
        self.size = max([self.size, *(x.untyped_storage().nbytes() // x.element_size() for x in made)])
        return out


@pytest.mark.parametrize("keywords", [{}, {"prior": torch.ones(150)}, {"positive_weight": 1.0}])
def test_memory_is_linear(keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of entries x dim, users x items or rows x dim^2: the largest is of the data, the vectors or a block."""
    num_users, num_items, dim, count = 120, 150, 8, 6000
    users = torch.randint(num_users, (count,), generator=generator(0))
    items = torch.randint(num_items, (count,), generator=generator(1))
    for name in ("SHARED_BLOCK", "SEPARATE_BLOCK"):
        monkeypatch.setattr(sparse, name, 4000)
    model = build(size=(num_users, num_items, dim), **keywords)
    with LargestTensor() as largest:
        model.fit(users, items, sweeps=1)
        model.objective()
    assert largest.size <= count


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
    """One user with twenty times the same item vector: far below rounding, the ridge cannot hold the system up."""
    model = build(positive_weight=1e12, ridge=1e-12, dtype=torch.float32, size=(1, 40, 6))
    model.item_vectors[:20] = model.item_vectors[0]
    with pytest.raises(ManymaxError, match=r"raise `ridge` or use torch\.float64"):
        model.fit(torch.zeros(20, dtype=torch.int64), torch.arange(20))


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


def test_blocks_of_more_work_than_int32_counts() -> None:
    pairs = InteractionPairs(*[torch.tensor([0, 1, 2])] * 2, None)
    rows = Rows(pairs, 3, torch.float32)
    rows.offsets = torch.tensor([0, 8_000_000, 16_000_000, 24_000_000], dtype=torch.int32)
    assert [(b.start, b.stop) for b in rows.blocks(1 << 31, per_entry=192, per_row=1)] == [(0, 2), (2, 3)]


@pytest.mark.parametrize(
    ("options", "words"),
    [({"ridge": "a"}, "`ridge` must be a number; got str"), ({"prior": [0.5, 0.5]}, "`prior` must be a tensor")],
)
def test_settings_of_another_kind(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ManymaxError, match=words):
        RGFactorization(3, 2, 2, **options)


def test_values_of_another_kind() -> None:
    pairs = torch.tensor([0, 1])
    with pytest.raises(ManymaxError, match="`values` must be a tensor; got list"):
        RGFactorization(3, 2, 2).fit(pairs, pairs, values=[1.0, 2.0])
