"""Heads that update their class vectors in the backward: the steps of torch's optimisers, without the gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manymax
from manymax.engine.table_updates import KAHAN, NEAREST, STOCHASTIC
from manymax.errors import ArgumentError, ManymaxError
from tests.heads.test_memory import Largest

C, DIM, ROWS, LR = 500, 16, 40, 1e-3
MEMBERS = ["Softmax", "Sparsemax", "Entmax", "Rankmax"]
# The row-sparse steps are those of SparseAdam, the dense ones those of Adam.
TWO_STEPS = {"sgd": (torch.optim.SGD,) * 2, "adagrad": (torch.optim.Adagrad,) * 2}
TWO_STEPS["adam"] = (torch.optim.Adam, torch.optim.SparseAdam)
SMALL = {"block_scores": 128 * ROWS}  # four blocks of classes


def make_head(name: str, in_features: int = DIM, classes: int = C, **given: Any) -> Any:
    """`Linear<name>Loss` with small class vectors."""
    torch.manual_seed(3)
    given.setdefault("options", SMALL if name == "Softmax" else None)
    return getattr(manymax, f"Linear{name}Loss")(in_features, classes, **given)


def make_batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Queries and labels of a step."""
    random = torch.Generator().manual_seed(step)
    queries = 2 * torch.randn(ROWS, DIM, generator=random, dtype=torch.float64)
    return queries.to(dtype).requires_grad_(), torch.randint(C, (ROWS,), generator=random)


def compare(name: str, optimizer: str, target: Any = None, lr: float = LR, **given: Any) -> None:
    """Four steps of a fused head, and of the head with an optimiser of torch, end at the same numbers."""
    head = make_head(name, **given)
    sparse = name != "Softmax"
    options = {**(given.get("options") or {}), **({"sparse_grad": True} if sparse else {})}
    other = make_head(name, **{**given, "options": options})
    fused = head.fused(optimizer, lr=lr)
    own = TWO_STEPS[optimizer][sparse](other.parameters(), lr=lr)
    before = copy.deepcopy(head.state_dict())
    for step in range(4):
        queries, labels = make_batch(step)
        twin = queries.detach().clone().requires_grad_()
        wanted = labels if target is None else target(labels)
        loss, expected = fused(queries, wanted), other(twin, wanted)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        own.zero_grad()
        for value in (loss, expected):
            (3 * value.sum()).backward()  # the factor from above counts too
        own.step()
        unit = float(twin.grad.abs().max())  # type: ignore[union-attr]
        torch.testing.assert_close(queries.grad, twin.grad, rtol=0, atol=1e-5 * unit)
    for key, value in head.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[key], rtol=0, atol=1e-6)
        if key.startswith("linear"):
            assert not torch.equal(value, before[key]), "nothing was learned"


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad makes sparse tensors
@pytest.mark.parametrize("optimizer", TWO_STEPS)
@pytest.mark.parametrize("name", MEMBERS)
def test_steps_are_those_of_torch(name: str, optimizer: str) -> None:
    compare(name, optimizer, bias=True)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("Softmax", {"options": {**SMALL, "backend": "torch"}}),
        (
            "Softmax",
            {"options": {"block_scores": 128 * ROWS, "block_rows": 7}},
        ),  # blocks of rows within blocks of classes
        ("Softmax", {"normalize": True, "temperature": 0.1, "softcap": 5.0}),
        ("Softmax", {"label_smoothing": 0.1, "z_loss": 0.01, "weight": torch.linspace(0, 2, C)}),
        ("Softmax", {"reduction": "none"}),
        ("Entmax", {"options": {"backend": "torch", "block_rows": 7}}),
        ("Entmax", {"normalize": True, "temperature": 0.1, "softcap": 5.0, "bias": True}),
        ("Sparsemax", {"reduction": "sum", "multilabel": "normalized", "weight": torch.linspace(0, 2, C)}),
    ],
)
def test_keywords_mean_the_same(name: str, given: dict[str, Any]) -> None:
    lr = 0.1 if given.get("reduction", "mean") == "mean" else 0.1 / ROWS
    compare(name, "sgd", lr=lr, **given)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", ["Softmax", "Entmax"])
def test_several_positives_in_any_form(name: str) -> None:
    for form in (
        lambda labels: torch.stack([labels, (labels + 7) % C, torch.full_like(labels, -100)], 1),
        lambda labels: nn.functional.one_hot(labels, C).bool() | nn.functional.one_hot((labels + 7) % C, C).bool(),
        lambda labels: manymax.SoftTarget(labels.unsqueeze(1), torch.full((ROWS, 1), 0.7)),
        lambda labels: torch.where(torch.arange(ROWS) % 3 > 0, labels, -100),
    ):
        compare(name, "adagrad", form)


def test_masked_classes_fill_a_block() -> None:
    """The first block of classes has none that is alive, and the maximum of a row rises from block to block."""
    head = make_head("Softmax", bias=True)
    with torch.no_grad():
        head.linear.bias.copy_(torch.linspace(-300, 100, C))
        head.linear.bias[:130] = -torch.inf
    plain = copy.deepcopy(head)
    queries, labels = make_batch(0)
    labels = labels.clamp(min=130)
    torch.testing.assert_close(head.fused("sgd")(queries, labels), plain(queries, labels))


@pytest.mark.parametrize("name", ["Softmax", "Sparsemax"])
def test_the_gradient_of_the_class_vectors_never_exists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manymax.engine.fused.FEW_NUMBERS", 1)  # as for a table that is large
    classes, rows = 6000, 32
    queries = torch.randn(rows, DIM, requires_grad=True)
    head = make_head(name, classes=classes, options=None)
    with torch.no_grad():
        head.linear.weight.mul_(40)  # few classes in a support
    fused = head.fused("adam")
    with Largest(*head.parameters(), *fused.buffers()) as largest:
        fused(queries, torch.arange(rows)).backward()
    assert largest.size <= 0.1 * classes * DIM, largest.where
    assert head.linear.weight.grad is None


# Half precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rounding", "learns"), [(None, True), (STOCHASTIC, True), (KAHAN, True), (NEAREST, False)])
def test_small_updates_of_bfloat16_are_not_lost(rounding: str | None, learns: bool) -> None:
    """200 updates of 1/20 of the spacing of bfloat16 numbers: the nearest number is always the old one."""
    head = manymax.LinearSoftmaxLoss(1, 2, dtype=torch.bfloat16)
    with torch.no_grad():
        head.linear.weight.copy_(torch.tensor([[1.0], [1.0]]))
    # p = (1/2, 1/2) and the label is either class in turn, but for the decay nothing moves in the mean.
    fused = head.fused("sgd", lr=2**-7 / 20, weight_decay=1.0, rounding=rounding)
    for _ in range(200):
        fused(torch.zeros(1, 1), torch.tensor([0])).backward()
    moved = 1 - head.linear.weight.float().mean().item()
    expected = 1 - (1 - 2**-7 / 20) ** 200
    assert moved == pytest.approx(expected, abs=0.03) if learns else moved == 0


def test_rounding_is_right_on_average(seed: int) -> None:
    from manymax.engine.table_updates import stochastically_rounded

    values = torch.tensor([1 + 2**-9, -3.3, 1e-30, 0.0, 7.0])
    mean = torch.stack([stochastically_rounded(values, seed + draw) for draw in range(4000)]).double().mean(0)
    spacing = values.abs().double() * 2**-7
    torch.testing.assert_close(mean, values.double(), rtol=0, atol=float((4 * spacing / 4000**0.5).max()))
    assert torch.equal(
        stochastically_rounded(torch.tensor([torch.inf, -torch.inf]), 0).float().abs(), torch.full((2,), torch.inf)
    )


# State -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Softmax", "Entmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_ends_at_the_same_bits(name: str, dtype: torch.dtype) -> None:
    def train(fused: nn.Module, steps: range) -> None:
        for step in steps:
            fused(*make_batch(step)).backward()

    whole, first = (make_head(name, dtype=dtype).fused("adam", lr=0.01, seed=5) for _ in range(2))
    train(whole, range(6))
    train(first, range(3))
    second = make_head(name, dtype=dtype).fused("adam", lr=0.01)
    second.load_state_dict(first.state_dict())
    train(second, range(3, 6))
    for key, value in whole.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key


def test_nothing_is_updated_without_a_backward() -> None:
    fused = make_head("Sparsemax").fused("adam")
    before = copy.deepcopy(fused.state_dict())
    queries, labels = make_batch(0)
    fused(queries, labels)
    with torch.no_grad():
        fused(queries, labels)
    fused.eval()
    fused(queries, labels).backward()
    assert queries.grad is not None
    for key, value in fused.state_dict().items():
        assert torch.equal(value, before[key]), key


# Refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Softmax", "Sparsemax"])
def test_backwards_that_would_be_wrong_are_refused(name: str) -> None:
    fused = make_head(name).fused("sgd")
    queries, labels = make_batch(0)
    first, second = fused(queries, labels), fused(queries, labels)
    first.backward(retain_graph=True)
    kept = copy.deepcopy(fused.state_dict())
    with pytest.raises(ManymaxError, match="one backward per call"):
        first.backward()
    with pytest.raises(ManymaxError, match="have changed since this loss"):
        second.backward()
    with pytest.raises(ManymaxError, match="not finite"):
        (fused(queries, labels) * torch.inf).backward()
    with pytest.raises(ManymaxError, match="no second derivatives"):
        torch.autograd.grad(fused(queries, labels), queries, create_graph=True)
    for key, value in fused.state_dict().items():
        assert torch.equal(value, kept[key]), key


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_head("Softmax", in_features=None).fused(), "class vectors of its own"),
        (lambda: make_head("TaylorSoftmax").fused(), "no way for taylor_softmax"),
        (lambda: manymax.LinearSampledSoftmaxLoss(4, 9).fused(), "SparseAdam"),
        (lambda: make_head("Entmax", learnable=True).fused(), "is learned"),
        (lambda: make_head("Entmax", label_smoothing=0.1).fused(), "`label_smoothing`"),
        (lambda: make_head("Softmax", stats=("nll",)).fused(), "`stats`"),
        (lambda: make_head("Softmax", decoupled=True).fused(), "`decoupled`"),
        (lambda: make_head("Softmax", weight=torch.linspace(-1, 1, C)).fused(), "`weight`"),
        (lambda: make_head("Softmax").fused("lion"), "`optimizer`"),
        (lambda: make_head("Softmax").fused(lr=-1.0), "`lr`"),
        (lambda: make_head("Softmax").fused(betas=(0.9, 1.0)), "`betas`"),
        (lambda: make_head("Sparsemax").fused(weight_decay=0.1), "`weight_decay`"),
        (lambda: make_head("Softmax").fused(rounding=KAHAN), "bfloat16"),
        (lambda: setattr(make_head("Softmax").fused(), "lr", torch.nan), "`lr`"),
    ],
)
def test_what_cannot_be_fused_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_a_positive_with_a_sum_of_its_own_is_refused() -> None:
    fused = make_head("Softmax").fused()
    queries, labels = make_batch(0)
    positives = torch.stack([labels, (labels + 1) % C], 1)
    with pytest.raises(ArgumentError, match="one row for"):
        fused(queries, positives, exclude=positives)
