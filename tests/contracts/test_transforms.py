"""Derivatives of every order, torch.func, vmap and torch.compile, for every exact member."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from tests.exact import INF, Case, cases, labels, normal

# torch's own, for forward derivatives.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

IDS = torch.tensor([0, 3, 4])
LISTS = torch.tensor([[0, 3, -100], [2, -100, -100], [4, 1, 0]])
HOT = torch.tensor([[1, 0, 0, 1, 0], [0, 0, 1, 0, 0], [1, 1, 0, 0, 1]]).bool()
ROWS = normal(3, 5, seed=1).softmax(-1)
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0], dtype=torch.float64)
TARGETS = {"id": IDS, "ids": LISTS, "bool": HOT, "float": ROWS}


def targets(case: Case) -> dict[str, Tensor]:
    """The forms of target that the member takes, by name."""
    return {kind: target for kind, target in TARGETS.items() if kind != "float" or case.member.takes.float_rows}


def modes(case: Case) -> list[dict[str, Any]]:
    """Options that lead through different code of the loss."""
    plain: list[dict[str, Any]] = [{}, {"weight": WEIGHT, "reduction": "none"}, {"multilabel": "normalized"}]
    return [*plain, {"label_smoothing": 0.2, "weight": WEIGHT}] if case.member.takes.smoothing else plain


def generic(rows: int = 3, classes: int = 5) -> Tensor:
    """Scores away from the kinks of sparse maps, with classes inside and outside of the supports."""
    return normal(rows, classes, seed=2)


def masked() -> Tensor:
    """Scores with a sixth class that is masked in every row, and is no positive of any target above."""
    return torch.cat([generic(), torch.full((3, 1), -INF, dtype=torch.float64)], -1)


# Derivatives -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases(derivatives=True))
def test_derivatives_of_the_map(case: Case) -> None:
    scores = generic().requires_grad_()
    assert gradcheck(lambda s: case.probs(s, IDS), scores)
    assert gradgradcheck(lambda s: case.probs(s, IDS), scores)


@pytest.mark.parametrize("case", cases(derivatives=True))
@pytest.mark.parametrize("kind", TARGETS)
def test_derivatives_of_the_loss(case: Case, kind: str) -> None:
    if kind not in targets(case):
        assert not case.member.takes.float_rows
        return
    scores = generic().requires_grad_()
    for options in modes(case):

        def loss(s: Tensor, options: dict[str, Any] = options) -> Tensor:
            return case.loss(s, TARGETS[kind], **options)

        assert gradcheck(loss, scores, fast_mode=True)
        assert gradgradcheck(loss, scores, fast_mode=True)


@pytest.mark.parametrize("case", cases(derivatives=True))
@pytest.mark.slow
def test_forward_mode_and_batched_gradients(case: Case) -> None:
    scores = generic().requires_grad_()
    modes = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    for function in (case.probs, case.loss):
        assert gradcheck(lambda s, function=function: function(s, IDS), scores, **modes)
        assert gradgradcheck(lambda s, function=function: function(s, IDS), scores, check_fwd_over_rev=True)


@pytest.mark.parametrize("case", cases(derivatives=True))
def test_derivatives_in_long_rows(case: Case) -> None:
    # Rows of 600 classes take another way than short ones. Along one direction for each row, peaked, flat and in
    # between: a whole numerical Jacobian would take a minute.
    directions = normal(3, 600, seed=7)
    base = torch.stack([normal(600, scale=2), normal(600, scale=1e-3), normal(600, scale=0.5)])
    target = torch.tensor([5, 100, 599])

    def along(x: Tensor) -> Tensor:
        return base + (x[:, None] * directions)

    x = torch.tensor([0.02, -0.01, 0.03], dtype=torch.float64, requires_grad=True)
    for function in (case.probs, case.loss):
        classes = [5, 100, 599, int(base[0].argmax()), int(base[2].argmax())]

        def at_classes(x: Tensor, function: Callable[..., Tensor] = function, classes: list[int] = classes) -> Tensor:
            value = function(along(x), target)
            return value[..., classes] if value.ndim else value

        assert gradcheck(at_classes, x)
        assert gradgradcheck(at_classes, x)


@pytest.mark.parametrize("case", cases(derivatives=True))
def test_create_graph_gives_a_real_second_derivative(case: Case) -> None:
    scores = generic(1, 4)[0].requires_grad_()
    for function in (lambda s: case.loss(s, torch.tensor(1)), lambda s: case.probs(s, torch.tensor(1)).square().sum()):
        (grad,) = torch.autograd.grad(function(scores), scores, create_graph=True)
        assert grad.requires_grad
        hessian = torch.stack([torch.autograd.grad(g, scores, retain_graph=True)[0] for g in grad])
        step = 1e-5 * torch.eye(4, dtype=torch.float64)
        for j in range(4):
            up, down = (scores.detach() + sign * step[j] for sign in (1, -1))
            slopes = [torch.func.grad(function)(s) for s in (up, down)]
            torch.testing.assert_close(hessian[:, j], (slopes[0] - slopes[1]) / 2e-5, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("case", cases())
def test_second_derivatives_at_masked_classes_are_zero(case: Case) -> None:
    scores = masked().requires_grad_()
    for target in (IDS, LISTS, torch.nn.functional.pad(HOT, (0, 1))):
        (grad,) = torch.autograd.grad(case.loss(scores, target), scores, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), scores)
        assert second.isfinite().all()
        assert second[:, 5].tolist() == grad[:, 5].tolist() == [0.0] * 3
    (grad,) = torch.autograd.grad(case.probs(scores, IDS).square().sum(), scores, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), scores)
    assert second.isfinite().all()
    assert second[:, 5].tolist() == grad[:, 5].tolist() == [0.0] * 3


@pytest.mark.parametrize("case", cases())
def test_two_backward_passes_agree(case: Case) -> None:
    """The backward of first order and the one that can be differentiated again give the same gradient."""
    for classes in (5, 600):
        for target in (labels(3, num_classes=5), LISTS):
            scores = normal(3, classes, seed=3).requires_grad_()
            upstream = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
            first = torch.autograd.grad(case.loss(scores, target, reduction="none"), scores, upstream)
            again = torch.autograd.grad(
                case.loss(scores, target, reduction="none"), scores, upstream, create_graph=True
            )
            torch.testing.assert_close(first[0], again[0].detach(), rtol=1e-12, atol=1e-14)
        probs, other = case.probs(scores, IDS), normal(3, classes, seed=4)
        first = torch.autograd.grad(probs, scores, other, retain_graph=True)
        again = torch.autograd.grad(probs, scores, other, create_graph=True)
        torch.testing.assert_close(first[0], again[0].detach(), rtol=1e-12, atol=1e-14)


def test_backward_leaves_its_inputs_alone() -> None:
    for parameter in cases():
        case: Case = parameter.values[0]
        scores, upstream = generic().requires_grad_(), torch.ones(3, dtype=torch.float64)
        before = scores.detach().clone()
        rows = case.loss(scores, LISTS, reduction="none")
        first = torch.autograd.grad(rows, scores, upstream, retain_graph=True)[0].clone()
        second = torch.autograd.grad(rows, scores, upstream)[0]
        assert torch.equal(first, second)
        assert torch.equal(scores, before)
        assert upstream.tolist() == [1.0, 1.0, 1.0]


# torch.func --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases())
def test_hessians_by_forward_mode_and_of_many_vectors_at_once(case: Case) -> None:
    """Forward over reverse, and `vectorize=True`, which runs one backward for a batch of vectors."""
    for classes, target in ((5, IDS), (5, LISTS), (600, IDS)):
        scores = normal(3, classes, seed=2)

        def along(x: Tensor, scores: Tensor = scores, target: Tensor = target) -> Tensor:
            return case.loss(scores + x[:, None] * scores.cos(), target).sin()

        x = torch.zeros(3, dtype=torch.float64)
        expected = torch.func.jacrev(torch.func.jacrev(along))(x)
        torch.testing.assert_close(torch.func.hessian(along)(x), expected, rtol=1e-9, atol=1e-12)
        many = torch.autograd.functional.hessian(along, x, vectorize=True)
        torch.testing.assert_close(many, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", cases())
def test_func_grad_is_autograd(case: Case) -> None:
    for classes in (5, 600):
        scores = normal(3, classes, seed=2)
        for target in (IDS, LISTS):
            leaf = scores.clone().requires_grad_()
            (expected,) = torch.autograd.grad(case.loss(leaf, target), leaf)
            actual = torch.func.grad(lambda s, t=target: case.loss(s, t))(scores)
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("kind", TARGETS)
def test_vmap_is_a_loop(case: Case, kind: str) -> None:
    if kind not in targets(case):
        assert not case.member.takes.float_rows
        return
    scores, target = generic(), TARGETS[kind]
    for options in modes(case):

        def loss(s: Tensor, t: Tensor, options: dict[str, Any] = options) -> Tensor:
            return case.loss(s, t, **options)

        both = torch.stack([loss(s, t) for s, t in zip(scores, target, strict=True)])
        torch.testing.assert_close(torch.vmap(loss)(scores, target), both)
        by_target = torch.stack([loss(scores[0], t) for t in target])
        torch.testing.assert_close(torch.vmap(loss, (None, 0))(scores[0], target), by_target)
        by_scores = torch.stack([loss(s, target[2]) for s in scores])
        torch.testing.assert_close(torch.vmap(loss, (0, None))(scores, target[2]), by_scores)
        grads = torch.stack([torch.func.grad(loss)(s, t) for s, t in zip(scores, target, strict=True)])
        torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(scores, target), grads)
        torch.testing.assert_close(torch.vmap(loss, (1, 0))(scores.t().contiguous(), target), both)


@pytest.mark.parametrize("case", cases())
def test_vmap_over_class_weights(case: Case) -> None:
    weights = torch.rand(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    scores = generic()

    def loss(weight: Tensor) -> Tensor:
        return case.loss(scores, LISTS, weight=weight)

    torch.testing.assert_close(torch.vmap(loss)(weights), torch.stack([loss(w) for w in weights]))


@pytest.mark.parametrize("case", cases())
def test_gradients_of_constants_under_vmap(case: Case) -> None:
    """Class weights and float targets get their gradients in nested transforms, where `requires_grad` is False."""

    def total(weight: Tensor, target: Tensor) -> Tensor:
        rows = torch.vmap(lambda s, t: case.loss(s, t, weight=weight, reduction="sum"))(generic(), target)
        return rows.sum()

    def looped(weight: Tensor, target: Tensor) -> Tensor:
        return case.loss(generic(), target, weight=weight, reduction="sum")

    for kind, target in targets(case).items():
        leaf = WEIGHT.clone().requires_grad_()
        expected = torch.autograd.grad(looped(leaf, target), leaf)[0]
        torch.testing.assert_close(torch.func.grad(total)(WEIGHT, target), expected)
        if kind == "float":
            sparse = torch.eye(5, dtype=torch.float64)[IDS]
            leaf = sparse.clone().requires_grad_()
            expected = torch.autograd.grad(looped(WEIGHT, leaf), leaf)[0]
            torch.testing.assert_close(torch.func.grad(total, argnums=1)(WEIGHT, sparse), expected)


@pytest.mark.parametrize("case", cases(mapped=True))
def test_vmap_of_the_map_is_a_loop(case: Case) -> None:
    for classes in (5, 600):
        scores = normal(3, classes, seed=2)
        loop = torch.stack([case.probs(s, t) for s, t in zip(scores, IDS, strict=True)])
        torch.testing.assert_close(torch.vmap(case.probs)(scores, IDS), loop)
        nested = torch.vmap(torch.vmap(case.probs))(scores.expand(2, 3, classes), IDS.expand(2, 3))
        torch.testing.assert_close(nested, loop.expand(2, 3, classes))


@pytest.mark.parametrize("case", cases(derivatives=True))
def test_jacrev_and_jacrev_of_jacrev(case: Case) -> None:
    scores, label = generic(1, 4)[0], torch.tensor(2)

    def probs(s: Tensor) -> Tensor:
        return case.probs(s, label)

    def loss(s: Tensor) -> Tensor:
        return case.loss(s, label)

    jacobian = torch.func.jacrev(probs)
    torch.testing.assert_close(jacobian(scores), torch.autograd.functional.jacobian(probs, scores))
    hessian = torch.func.jacrev(torch.func.jacrev(loss))
    torch.testing.assert_close(hessian(scores), torch.autograd.functional.hessian(loss, scores))
    step = 1e-5 * torch.eye(4, dtype=torch.float64)
    differences = torch.stack([(jacobian(scores + h) - jacobian(scores - h)) / 2e-5 for h in step], -1)
    torch.testing.assert_close(torch.func.jacrev(jacobian)(scores), differences, rtol=1e-6, atol=1e-7)
    batched = torch.vmap(hessian)(torch.stack([scores, scores]))
    torch.testing.assert_close(batched, hessian(scores).expand(2, 4, 4))


@pytest.mark.parametrize("case", cases(foundation=True))
def test_conjugate_and_omega_under_transforms(case: Case) -> None:
    scores, probs = generic(), generic().softmax(-1)
    conjugate = lambda s: case.member.conjugate(s, **case.setting)  # noqa: E731
    omega = lambda p: case.member.omega(p, **case.setting)  # noqa: E731
    assert gradcheck(conjugate, scores.clone().requires_grad_())
    assert gradgradcheck(conjugate, scores.clone().requires_grad_())
    assert gradcheck(omega, probs.clone().requires_grad_())
    assert gradgradcheck(omega, probs.clone().requires_grad_())
    torch.testing.assert_close(torch.vmap(conjugate)(scores), conjugate(scores))
    torch.testing.assert_close(torch.vmap(omega)(probs), omega(probs))
    torch.testing.assert_close(torch.vmap(torch.func.grad(conjugate))(scores), case.probs(scores))
    bregman = lambda p, q: case.member.bregman(p, q, **case.setting)  # noqa: E731
    torch.testing.assert_close(torch.vmap(bregman)(probs, probs.flip(0)), bregman(probs, probs.flip(0)))


# torch.compile -----------------------------------------------------------------------------------


def slow_but_first(rows: list[Any]) -> list[Any]:
    """The cases, marked slow but for the first: compiling takes a second each, and most faults show in any of them."""
    return [rows[0], *(pytest.param(*row.values, id=row.id, marks=[*row.marks, pytest.mark.slow]) for row in rows[1:])]


@pytest.fixture
def compiler() -> Iterator[Callable[..., Any]]:
    """torch.compile with an empty cache of compiled functions, and without torch's own warnings."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield lambda function, backend: torch.compile(function, fullgraph=True, backend=backend)
    torch._dynamo.reset()


def assert_compiles(compiled: Callable[[Tensor], Tensor], eager: Callable[[Tensor], Tensor], scores: Tensor) -> None:
    """The compiled function gives the value and the gradient of the eager one."""
    ours, theirs = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    value, expected = compiled(ours), eager(theirs)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
    upstream = normal(*value.shape, seed=8, dtype=value.dtype)
    (grad,) = torch.autograd.grad(value, ours, upstream)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, theirs, upstream)[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", slow_but_first(cases(mapped=True)))
def test_map_compiles(case: Case, compiler: Callable[..., Any]) -> None:
    function = lambda s: case.probs(s, IDS)  # noqa: E731
    assert_compiles(compiler(function, "aot_eager"), function, normal(3, 600, dtype=torch.float32))


@pytest.mark.parametrize("case", slow_but_first(cases(first=True)))
@pytest.mark.parametrize("kind", TARGETS)
def test_loss_compiles(case: Case, kind: str, compiler: Callable[..., Any]) -> None:
    if kind not in targets(case):
        assert not case.member.takes.float_rows
        return
    options: dict[str, Any] = {"weight": WEIGHT.float(), "reduction": "none"}
    if kind == "bool":
        options = {"multilabel": "normalized"}
    if kind == "id" and case.member.takes.smoothing:
        options = {"label_smoothing": 0.1}
    target = ROWS.float() if kind == "float" else TARGETS[kind]
    function = lambda s: case.loss(s, target, **options)  # noqa: E731
    assert_compiles(compiler(function, "aot_eager"), function, generic().float())


@pytest.mark.parametrize("case", slow_but_first(cases()))
def test_module_compiles(case: Case, compiler: Callable[..., Any]) -> None:
    module = case.module()
    compiled = compiler(module, "aot_eager")
    assert_compiles(lambda s: compiled(s, IDS), lambda s: module(s, IDS), generic().float())
    with torch.no_grad():
        torch.testing.assert_close(compiled(generic().bfloat16(), IDS), module(generic().bfloat16(), IDS))


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="inductor needs a C++ compiler"
)
@pytest.mark.parametrize("case", cases())
def test_map_and_loss_compile_with_inductor(case: Case, compiler: Callable[..., Any]) -> None:
    for function in (lambda s: case.probs(s, IDS), lambda s: case.loss(s, IDS)):
        assert_compiles(compiler(function, "inductor"), function, normal(3, 600, dtype=torch.float32))
