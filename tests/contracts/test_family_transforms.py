"""Forward mode, batched gradients, `torch.func` and second backwards, asked of every member and reference loss.

`tests/contracts/test_transforms.py` asks more of the exact losses on given scores.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import manymax
from manymax import FAMILY, ManymaxError, heads
from manymax.engine.member import Member
from manymax.engine.scoring import scaled_by
from manymax.heads import head_class, head_function
from manymax.members import REFERENCE_LOSSES
from tests.exact import normal

# torch's own, for forward derivatives and for vmap of rarely used operators
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*performance drop.*"),
]

N, C, DIM, DRAWN = 3, 7, 4, 5
ALL = [*FAMILY.values(), *REFERENCE_LOSSES.values()]
TARGETS = {"ids": torch.tensor([0, 3, 6]), "lists": torch.tensor([[0, 1, -100], [3, -100, -100], [2, 5, 6]])}
TREE = manymax.HuffmanTree(torch.arange(1, C + 1))
QUERIES, VECTORS = normal(N, DIM, seed=1), normal(C, DIM, seed=2)


def members(rows: list[Member]) -> Any:
    """Run a test once for each of these members."""
    return pytest.mark.parametrize("member", rows, ids=lambda member: member.name)


def functions(member: Member) -> dict[str, tuple[Callable[[Tensor], Tensor], Tensor]]:
    """The plain losses of a member as functions of one tensor each, with the tensor."""
    if member.kind == "tree":
        nodes, found = normal(C - 1, DIM, seed=3), {}
        for name, target in TARGETS.items():
            options: dict[str, Any] = {"label_smoothing": 0.1} if name == "lists" else {}
            found[f"queries, {name}"] = (lambda x, t=target: member.loss(x, nodes, t, TREE)), QUERIES
            found[f"nodes, {name}"] = (lambda w, t=target, o=options: member.loss(QUERIES, w, t, TREE, **o)), nodes
        return found
    if member.kind == "sampled":
        positive, negative = normal(N, seed=4), normal(N, DRAWN, seed=5)
        given: dict[str, Any] = {"num_classes": C} if member.name == "gbce" else {}
        if member.name in FAMILY:
            given = {"log_q_positive": normal(N, seed=6) - 3, "log_q_negative": normal(N, DRAWN, seed=7) - 3}
            given["hits"] = torch.zeros(N, DRAWN, dtype=torch.bool)
            given["hits"][0, 1] = True
        return {
            "positive": ((lambda p: member.loss(p, negative, **given).mean()), positive),
            "negative": ((lambda q: member.loss(positive, q, **given).mean()), negative),
        }
    return {name: ((lambda s, t=t: member.loss(s, t)), normal(N, C, seed=8)) for name, t in TARGETS.items()}


@pytest.mark.slow
@members(ALL)
def test_forward_mode_and_batched_gradients_of_every_loss(member: Member) -> None:
    for name, (loss, at) in functions(member).items():
        first, second = jacrev(loss)(at), jacrev(jacrev(loss))(at)
        for jacobian in (
            jacfwd(loss)(at),
            torch.autograd.functional.jacobian(loss, at, vectorize=True),
            torch.autograd.functional.jacobian(loss, at, vectorize=True, strategy="forward-mode"),
        ):
            torch.testing.assert_close(jacobian, first, msg=name)
        for found in (
            hessian(loss)(at),
            jacrev(jacfwd(loss))(at),
            torch.autograd.functional.hessian(loss, at, vectorize=True),
        ):
            torch.testing.assert_close(found, second, msg=name)
        with suppress(ManymaxError):  # torch itself is silently wrong here where a function has a rule of its own
            torch.testing.assert_close(jacfwd(jacfwd(loss))(at), second, msg=name)
        value, slope = jvp(loss, (at,), (at.cos(),))
        torch.testing.assert_close(value, loss(at))
        torch.testing.assert_close(slope, (first * at.cos()).sum())
        both = torch.stack([at, at.sin()])
        torch.testing.assert_close(vmap(loss)(both), torch.stack([loss(each) for each in both]))


def test_forward_mode_within_forward_mode_is_refused_and_not_wrong() -> None:
    with pytest.raises(ManymaxError, match="`jacfwd` of `jacrev`"):
        jacfwd(jacfwd(lambda s: manymax.softmax_loss(s, TARGETS["ids"])))(normal(N, C))


# Heads -------------------------------------------------------------------------------------------


class Head:
    """The head of a member as a function of its queries or of its class vectors; it always draws the same."""

    def __init__(self, member: Member, **keywords: Any) -> None:
        self.function = getattr(heads, f"linear_{member.loss_name}", None) or head_function(member)
        self.member, self.keywords = member, keywords
        self.vectors = VECTORS[: C - 1] if member.kind == "tree" else VECTORS

    def of_both(self, queries: Tensor, vectors: Tensor, target: Tensor = TARGETS["ids"]) -> Tensor:
        keywords = dict(self.keywords)
        if self.member.kind == "sampled":
            generator = torch.Generator().manual_seed(0)
            keywords.update(sampler=manymax.samplers.UniformSampler(C), num_negatives=DRAWN, generator=generator)
        if self.member.kind == "tree":
            keywords["tree"] = TREE
        return self.function(queries, vectors, target, **keywords)

    def of_queries(self, queries: Tensor) -> Tensor:
        return self.of_both(queries, self.vectors)

    def of_vectors(self, vectors: Tensor) -> Tensor:
        return self.of_both(QUERIES, vectors)


TRANSFORMS: dict[str, Callable[[Head], Any]] = {
    "grad": lambda head: grad(head.of_queries)(QUERIES),
    "grad of class vectors": lambda head: grad(head.of_vectors)(head.vectors),
    "vjp": lambda head: vjp(head.of_queries, QUERIES)[1](torch.ones((), dtype=torch.float64)),
    "jvp": lambda head: jvp(head.of_queries, (QUERIES,), (QUERIES,)),
    "vmap": lambda head: vmap(lambda q, t: head.of_both(q, head.vectors, t))(QUERIES, TARGETS["ids"]),
    "vmap over class vectors": lambda head: vmap(head.of_vectors)(torch.stack([head.vectors] * 2)),
    "hessian": lambda head: hessian(head.of_queries)(QUERIES),
    "jacfwd": lambda head: jacfwd(head.of_queries)(QUERIES),
    "jacrev": lambda head: jacrev(head.of_queries)(QUERIES),
}


@pytest.mark.parametrize("scaled", [False, True])
@members(ALL)
def test_transforms_of_every_head_work_or_say_what_to_use(member: Member, scaled: bool) -> None:
    by_autograd = member.kind in ("quadratic", "tree")
    keywords: dict[str, Any] = {"temperature": torch.tensor(0.5, dtype=torch.float64)}
    if member.kind in ("exact", "sampled"):
        keywords["normalize"] = True
    head = Head(member, **keywords) if scaled and member.kind != "tree" else Head(member)
    for name, transform in TRANSFORMS.items():
        if not by_autograd:
            with pytest.raises(ManymaxError, match=r"torch\.func.*plain loss of the scores"):
                transform(head)
        elif name in ("grad", "jacrev", "jacfwd"):
            leaf = QUERIES.clone().requires_grad_()
            torch.testing.assert_close(transform(head), torch.autograd.grad(head.of_queries(leaf), leaf)[0])
        elif name == "hessian":
            torch.testing.assert_close(transform(head), jacrev(jacrev(head.of_queries))(QUERIES))
        else:
            transform(head)


def test_scaled_queries_under_forward_mode() -> None:
    """Values and all derivatives, of a zero vector too."""
    queries, temperature = torch.cat([QUERIES, torch.zeros(1, DIM)]).requires_grad_(), torch.tensor(0.7).double()
    for normalize in (False, True):
        at = queries.detach()[: 4 - normalize].requires_grad_()  # a norm has no derivative at zero
        given = (at, temperature.requires_grad_(), normalize)
        assert torch.autograd.gradcheck(scaled_by, given, check_forward_ad=True, check_batched_forward_grad=True)
    tangent = jvp(
        lambda q: scaled_by(q, temperature.detach(), True), (queries.detach(),), (torch.ones(4, DIM).double(),)
    )[1]
    assert not tangent[-1].any()


@members(ALL)
def test_functional_call_of_every_head(member: Member) -> None:
    """With other parameters than its own, and their gradients; within `torch.func.grad` as any transform."""
    further = {"sampled": (manymax.samplers.UniformSampler(C), DRAWN), "tree": (TREE,)}.get(member.kind, ())
    module: nn.Module = head_class(member)(DIM, C, *further).double()
    parameters = {name: normal(*value.shape, seed=9).requires_grad_() for name, value in module.named_parameters()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        torch.manual_seed(0)
        return functional_call(module, values, (QUERIES, TARGETS["ids"]))

    value = loss(parameters)
    found = torch.autograd.grad(value, [*parameters.values()])
    own = dict(module.named_parameters())
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(parameters[name])
    torch.manual_seed(0)
    expected = module(QUERIES, TARGETS["ids"])
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(list(found), list(torch.autograd.grad(expected, [*own.values()])))
    if member.kind not in ("quadratic", "tree"):
        with pytest.raises(ManymaxError, match="plain loss of the scores"):
            grad(loss)({name: value.detach() for name, value in parameters.items()})


@members(ALL)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_head_of_one_number_under_autograd(member: Member, reduction: str) -> None:
    """Two backwards of one graph, numerical gradients without an option, and one backward for many factors."""
    head = Head(member, reduction=reduction)
    leaves = [QUERIES.clone().requires_grad_(), head.vectors.clone().requires_grad_()]
    value = head.of_both(*leaves)
    value.backward(retain_graph=True)
    once = [leaf.grad.clone() for leaf in leaves]
    value.backward(retain_graph=True)
    for leaf, first in zip(leaves, once, strict=True):
        torch.testing.assert_close(leaf.grad, 2 * first)
    if member.held is None:  # else the derivative of the loss holds something constant
        assert torch.autograd.gradcheck(head.of_both, leaves, fast_mode=True)
    factors = torch.tensor([1.0, -2.0], dtype=torch.float64)
    if member.kind == "sampled":
        with pytest.raises(ManymaxError, match="plain loss of the scores"):
            torch.autograd.grad(value, leaves, factors, is_grads_batched=True)
        return
    many = torch.autograd.grad(value, leaves, factors, is_grads_batched=True)
    for found, first in zip(many, once, strict=True):
        torch.testing.assert_close(found, torch.stack([factor * first for factor in factors]))
    each = torch.autograd.functional.jacobian(head.of_queries, QUERIES, vectorize=True)
    torch.testing.assert_close(each, once[0])
