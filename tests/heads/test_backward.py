"""Gradients of heads: row-sparse ones, second backwards, half precision, and the same bits in every run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import manymax
from manymax import FAMILY, ArgumentError, ManymaxError
from manymax.heads import head_class, head_function
from tests.heads.plain import (
    CASES,
    DIM,
    KINDS,
    HeadCase,
    Problem,
    agree,
    make_problem,
    make_target,
    upstream,
    value_and_gradients,
)

C = 1003
BLOCKED = [case for case in CASES if case.values[0].member.kind == "exact"]  # RG is plain autograd
ROW_SPARSE = [case for case in BLOCKED if case.values[0].member.sparse]
SPARSE = ("sparsemax", "entmax-1.3", "entmax-1.5", "entmax-1.9", "entmax-2", "rankmax")


def raw_gradients(case: HeadCase, problem: Problem, target: Any, **options: Any) -> list[Tensor]:
    """The gradients as they come, sparse ones too."""
    value = case.head(problem, target, **options)
    return list(torch.autograd.grad(value, problem.parts(), upstream(value)))


# Row-sparse gradients of class vectors and bias --------------------------------------------------


@pytest.mark.parametrize("regime", ["thin", "mixed", "wide"])
@pytest.mark.parametrize("case", ROW_SPARSE)
def test_a_sparse_gradient_equals_the_dense_one(case: HeadCase, regime: str) -> None:
    problem = make_problem(12, num_classes=C, regime=regime)
    for kind, reduction, rows in (("ids", "mean", 5), ("padded ids", "none", 5), ("bool rows", "mean", 1)):
        target = make_target(kind, 12, num_classes=C)
        dense, sparse = (
            raw_gradients(
                case,
                problem.leaves(),
                target,
                reduction=reduction,
                options={"block_rows": rows, "sparse_grad": sparse_grad},
            )
            for sparse_grad in (False, True)
        )
        assert [grad.is_sparse for grad in dense] == [False] * 3
        assert [grad.is_sparse and grad.is_coalesced() for grad in sparse] == [False, True, True]
        agree([grad.to_dense() for grad in sparse], dense, 1e-12)
        # Optimizers move every row that is there: rows of zeros must not be.
        rows = [set(grad.indices()[0].tolist()) for grad in sparse[1:]]
        assert rows[0] <= rows[1]
        if regime == "wide":
            assert rows[0] == set(dense[1].any(1).nonzero().flatten().tolist())


@pytest.mark.parametrize("regime", ["thin", "wide"])
@pytest.mark.parametrize("case", ROW_SPARSE)
def test_a_sparse_gradient_with_other_scores_equals_the_dense_one(case: HeadCase, regime: str) -> None:
    """Normalised vectors, whose gradients are projected at the end; a soft cap; classes that are left out."""
    problem, target = make_problem(12, num_classes=C, regime=regime), make_target("ids", 12, num_classes=C)
    exclude = torch.arange(12).unsqueeze(1) + torch.arange(3)
    for keywords in ({"normalize": True, "temperature": 0.1}, {"softcap": 30.0, "exclude": exclude}):
        dense, sparse = (
            raw_gradients(case, problem.leaves(), target, options={"block_rows": 5, "sparse_grad": given}, **keywords)
            for given in (False, True)
        )
        assert [grad.is_sparse for grad in sparse] == [False, True, True]
        agree([grad.to_dense() for grad in sparse], dense, 1e-12)


@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_gradient_has_the_rows_of_supports_and_positives(name: str) -> None:
    (case,) = (case.values[0] for case in CASES if case.id == name)
    problem = make_problem(12, num_classes=C, regime="thin")
    target = problem.scores().topk(3).indices[:, 2]  # rankmax has a small support where the positive is near the top
    gradient = raw_gradients(case, problem.leaves(), target, options={"sparse_grad": True})[1]
    scores = problem.leaves().scores().detach().requires_grad_()
    (table,) = torch.autograd.grad(case.member.loss(scores, target, **case.setting), scores)
    needed = (table != 0).any(0).nonzero().flatten()
    touched = gradient.coalesce().indices()[0]
    assert set(needed.tolist()) <= set(touched.tolist())
    assert len(touched) < 100
    rows = gradient.to_dense()
    assert (rows[needed] != 0).any(1).all()


@pytest.mark.parametrize("case", ROW_SPARSE)
def test_rows_of_a_wide_support_are_those_that_are_not_zero(case: HeadCase) -> None:
    """One row with half of the classes in its support, beside thin ones: no rows of zeros, in blocks or together."""
    thin = make_problem(12, num_classes=C, regime="thin")
    queries = torch.cat([thin.input, torch.full((1, DIM), 2.0**-13, dtype=torch.float64)])
    problem = Problem(queries, thin.linear_weight, torch.where(torch.arange(C) % 2 == 0, 0.0, -1000.0).double())
    target = problem.scores().topk(3).indices[:, 2]
    for rows in (1, 5, 13):
        grads = raw_gradients(case, problem.leaves(), target, options={"block_rows": rows, "sparse_grad": True})
        for grad in grads[1:]:
            assert C / 3 < grad.indices().shape[1] < 2 * C / 3
            assert (grad.values() == 0).reshape(-1, grad[0].numel()).all(1).sum() <= 36  # listed entries that cancel


@pytest.mark.parametrize("name", ["softmax", "taylor_softmax"])
def test_members_whose_gradient_touches_all_rows_refuse(name: str) -> None:
    problem, member = make_problem(12, num_classes=C), FAMILY[name]
    arguments = problem.input, problem.linear_weight, make_target("ids", 12, num_classes=C)
    with pytest.raises(ArgumentError, match=r"`options.sparse_grad` .* its gradient touches all .* Leave it out"):
        head_function(member)(*arguments, options={"sparse_grad": True})
    with pytest.raises(ArgumentError, match=r"`options.sparse_grad` .* its gradient touches all .* Leave it out"):
        head_class(member)(4, C, options={"sparse_grad": True})
    smooth = {"label_smoothing": 0.1, "options": {"sparse_grad": True}}
    with pytest.raises(ArgumentError, match=r"`label_smoothing` must be 0 with `sparse_grad`; got 0\.1"):
        manymax.linear_sparsemax_loss(*arguments, **smooth)
    with pytest.raises(ArgumentError, match=r"`label_smoothing` must be 0 with `sparse_grad`; got 0\.1"):
        manymax.LinearSparsemaxLoss(4, C, **smooth)


@pytest.mark.parametrize("regime", ["thin", "wide"])
@pytest.mark.parametrize("case", ROW_SPARSE)
def test_a_sparse_optimizer_takes_the_gradients(case: HeadCase, regime: str) -> None:
    """All parameters of a head with a bias, and again after a batch without positives."""
    problem, target = make_problem(12, num_classes=C, regime=regime), make_target("ids", 12, num_classes=C)
    parts = [torch.nn.Parameter(part.float()) for part in (problem.linear_weight, problem.linear_bias)]
    optimizer = torch.optim.SparseAdam(parts)
    for labels in (target, torch.full_like(target, -100)):
        before = [part.detach().clone() for part in parts]
        optimizer.zero_grad()
        case.head(Problem(problem.input.float(), *parts), labels, options={"sparse_grad": True}).backward()
        optimizer.step()
        changed = [not torch.equal(part, old) for part, old in zip(parts, before, strict=True)]
        assert changed == [bool((labels >= 0).any())] * 2


# A second backward -------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", BLOCKED)
def test_a_second_backward_says_what_to_do(case: HeadCase, reduction: str) -> None:
    problem = make_problem(12, num_classes=40).leaves()
    value = case.head(problem, make_target("ids", 12, num_classes=40), reduction=reduction)
    torch.autograd.grad(value, problem.parts())
    with pytest.raises((ManymaxError, RuntimeError), match="retain_graph=True"):  # of the head, or torch's own
        torch.autograd.grad(value, problem.parts())


@pytest.mark.parametrize("sparse_grad", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("case", CASES)
def test_a_second_backward_of_a_retained_graph(case: HeadCase, reduction: str, sparse_grad: bool) -> None:
    """With another factor from above; the gradients that the first backward gave stay as they were."""
    problem = make_problem(12, num_classes=40, regime="thin").leaves()
    options = {"sparse_grad": sparse_grad}
    value = case.head(problem, make_target("ids", 12, num_classes=40), reduction=reduction, options=options)
    first = torch.autograd.grad(value, problem.parts(), torch.ones_like(value), retain_graph=True)
    kept = [gradient.to_dense().clone() for gradient in first]
    second = torch.autograd.grad(value, problem.parts(), torch.full_like(value, 3), retain_graph=True)
    third = torch.autograd.grad(value, problem.parts(), torch.ones_like(value))
    agree([gradient.to_dense() for gradient in first], kept, 0.0)
    agree([gradient.to_dense() for gradient in second], [3 * gradient for gradient in kept], 1e-12)
    agree([gradient.to_dense() for gradient in third], kept, 0.0)


@pytest.mark.parametrize("case", CASES)
def test_what_a_backward_reads_may_not_change_before_it(case: HeadCase) -> None:
    """As in torch: an error, or the gradient at the values of the forward; never a gradient in between."""
    smoothing = 0.25 if case.takes("ids", 0.25) else 0.0
    grouped = manymax.group_pairs(torch.arange(12).repeat(2), torch.arange(24))[1]
    targets = {kind: make_target(kind, 12, num_classes=40) for kind in KINDS if case.takes(kind)} | {"grouped": grouped}
    for kind, target in targets.items():
        weight = torch.linspace(0.5, 1.5, 40, dtype=torch.float64)
        memory = [target.ids, target.weights] if isinstance(target, manymax.Target) else [target]
        for changed in [*memory, weight]:
            problem = make_problem(12, num_classes=40)
            options = {"reduction": "none", "weight": weight if changed is weight or kind == "ids" else None}
            options["label_smoothing"] = smoothing if changed is weight else 0.0
            expected = raw_gradients(case, problem.leaves(), target, **options)
            leaves = problem.leaves()
            value, before = case.head(leaves, target, **options), changed.clone()
            changed.copy_(changed.flip(0))
            try:
                actual = torch.autograd.grad(value, leaves.parts(), upstream(value))
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)  # noqa: PT017
            else:
                agree(list(actual), expected, 1e-12, kind)
            changed.copy_(before)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("case", BLOCKED)
def test_second_derivatives_are_refused(case: HeadCase, reduction: str) -> None:
    """An error, and not a gradient that autograd silently takes for a constant."""
    problem = make_problem(12, num_classes=40).leaves()
    value = case.head(problem, make_target("ids", 12, num_classes=40), reduction=reduction).sum()
    with pytest.raises(ManymaxError, match=r"no second derivatives.*create_graph.*plain loss"):
        torch.autograd.grad(value, problem.input, create_graph=True)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("loss", ["sampled_softmax", "nce"])
def test_second_derivatives_of_sampled_heads_are_refused(loss: str, shared: bool) -> None:
    problem = make_problem(12, num_classes=40).leaves()
    sampler = manymax.samplers.UniformSampler(40)
    value = getattr(manymax, f"linear_{loss}_loss")(
        problem.input, problem.linear_weight, torch.arange(12), sampler, 5, shared=shared
    )
    with pytest.raises(ManymaxError, match="no second derivatives"):
        torch.autograd.grad(value, problem.linear_weight, create_graph=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, for forward derivatives
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("case", [*BLOCKED[:2], pytest.param("drawn")])
def test_transforms_of_a_head_are_refused_with_the_way_out(case: HeadCase | str, reduction: str) -> None:
    """By the names of torch, and not as a missing rule of autograd."""
    problem, target = make_problem(12, num_classes=40), make_target("ids", 12, num_classes=40)

    def head(queries: Tensor) -> Tensor:
        if isinstance(case, str):
            sampler = manymax.samplers.UniformSampler(40)
            return manymax.linear_nce_loss(
                queries, problem.linear_weight, target, sampler, 5, reduction=reduction
            ).sum()
        return case.head(Problem(queries, *problem.parts()[1:]), target, reduction=reduction).sum()

    ones = torch.ones_like(problem.input)
    calls = [
        lambda: torch.func.grad(head)(problem.input),
        lambda: torch.func.jvp(head, (problem.input,), (ones,)),
        lambda: torch.func.vmap(head, randomness="same")(torch.stack([problem.input] * 2)),
    ]
    for call in calls:
        with pytest.raises(ManymaxError, match=r"torch\.func.*plain loss of the scores"):
            call()


@pytest.mark.parametrize("case", BLOCKED)
def test_one_backward_for_many_factors(case: HeadCase) -> None:
    """A mean and a sum have their gradients already; the rows of "none" do not, and say so."""
    problem = make_problem(12, num_classes=40).leaves()
    value = case.head(problem, make_target("ids", 12, num_classes=40))
    factors = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    many = torch.autograd.grad(value, problem.parts(), factors, is_grads_batched=True, retain_graph=True)
    single = torch.autograd.grad(value, problem.parts())
    agree(list(many), [torch.stack([factor * gradient for factor in factors]) for gradient in single], 1e-12)
    rows = case.head(problem, make_target("ids", 12, num_classes=40), reduction="none")
    with pytest.raises(ManymaxError, match="plain loss of the scores"):
        torch.autograd.grad(rows, problem.parts(), torch.ones(3, 12, dtype=torch.float64), is_grads_batched=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, for forward derivatives
@pytest.mark.parametrize("target", [[0, 4, 2, 5], [[0, 4], [3, -100], [2, 1], [-100, -100]]])
def test_rg_has_second_derivatives_and_forward_ones(target: list[Any]) -> None:
    problem, case = make_problem(4, num_classes=6).leaves(), HeadCase(FAMILY["rg"])

    def loss(*parts: Tensor) -> Tensor:
        return case.head(Problem(*parts), torch.tensor(target))

    assert torch.autograd.gradcheck(loss, problem.parts(), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, problem.parts(), fast_mode=True)


@pytest.mark.parametrize("case", CASES)
def test_a_factor_from_above_and_a_sum_of_two_losses(case: HeadCase) -> None:
    """The gradients that the forward kept are not scaled where another loss still needs them."""
    problem, target = make_problem(12, num_classes=40).leaves(), make_target("ids", 12, num_classes=40)
    single = torch.autograd.grad(case.head(problem, target), problem.parts())
    both = 0.5 * case.head(problem, target) - 2 * case.head(problem, target)
    agree(list(torch.autograd.grad(both, problem.parts())), [-1.5 * gradient for gradient in single], 1e-12)


# Half precision ----------------------------------------------------------------------------------

HALVES = [torch.bfloat16, torch.float16]
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_half_precision_comes_back_as_it_came(case: HeadCase, half: torch.dtype) -> None:
    """All arithmetic is in float32: only the gradients are rounded, and the loss stays float32."""
    problem = make_problem(12, num_classes=C, regime="near")
    rounded = Problem(*(part.to(half).double() for part in problem.parts()))
    for reduction, sparse_grad in itertools.product(("mean", "none"), (False, True)):
        options = {"sparse_grad": sparse_grad}
        target = make_target("ids", 12, num_classes=C)
        expected = value_and_gradients(case.plain, rounded.leaves(), target, reduction=reduction)
        actual = value_and_gradients(case.head, problem.leaves(half), target, reduction=reduction, options=options)
        assert [result.dtype for result in actual] == [torch.float32, *[half] * (len(actual) - 1)]
        agree(actual[:1], expected[:1], 1e-5)
        agree(actual[1:], expected[1:], ROUNDING[half])


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("case", CASES)
def test_autocast_computes_in_float32(case: HeadCase, reduction: str) -> None:
    """The loss is float32 and right to its rounding, even if the backward runs under autocast."""
    problem, target = make_problem(12, num_classes=C, regime="near"), make_target("padded ids", 12, num_classes=C)
    label_smoothing = 0.25 if case.member.takes.smoothing else 0.0
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    expected = value_and_gradients(case.plain, problem.leaves(), target, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        leaves = problem.leaves(torch.float32)
        value = case.head(leaves, target, **options)
        if case in [blocked.values[0] for blocked in BLOCKED]:  # RG's matmuls are torch's own, and autocast takes them
            grads = torch.autograd.grad(value, leaves.parts(), upstream(value))
    if case.member.name == "rg":
        grads = torch.autograd.grad(value, leaves.parts(), upstream(value))
    agree([value.detach(), *grads], expected, 1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = Problem(leaves.input.bfloat16(), leaves.linear_weight, leaves.linear_bias)
        value = case.head(mixed, target, **options)
    exact = Problem(mixed.input.detach().double(), problem.linear_weight, problem.linear_bias)
    assert value.dtype == torch.float32
    agree([value.detach()], [case.plain(exact, target, **options)], 1e-5)


@pytest.mark.parametrize("loss", ["sampled_softmax", "nce"])
def test_sampled_heads_compute_in_float32(loss: str) -> None:
    problem, sampler = make_problem(12, num_classes=40, regime="near"), manymax.samplers.UniformSampler(40)

    def value(problem: Problem, **options: Any) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        arguments = (problem.input, problem.linear_weight, torch.arange(12), sampler, 5)
        function = getattr(manymax, f"linear_{loss}_loss")
        return function(*arguments, linear_bias=problem.linear_bias, generator=generator, **options)

    for shared in (False, True):
        expected = value(problem, shared=shared)
        for half in HALVES:
            rounded = Problem(*(part.to(half) for part in problem.parts()))  # exact: eighths
            plain = value(rounded, shared=shared)
            assert plain.dtype == torch.float32
            agree([plain], [expected], 1e-5)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                inside = value(rounded, shared=shared)
            assert inside.dtype == torch.float32
            agree([inside], [expected], 1e-5)
        narrow = Problem(*(torch.rand_like(part).float() for part in problem.parts()))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = value(narrow, shared=shared)
        agree([inside], [value(Problem(*(part.double() for part in narrow.parts())), shared=shared)], 1e-5)


@pytest.mark.parametrize("case", BLOCKED)
def test_bf16_matmuls_change_the_loss_by_less_than_1e_4(case: HeadCase) -> None:
    """The scores are rounded, everything else is in float32. A sparse map averages over fewer scores."""
    random = torch.Generator().manual_seed(0)
    vectors, bias = torch.randn(C, 16, generator=random), torch.randn(C, generator=random) / 4
    problem = Problem(torch.randn(512, 16, generator=random) / 4, vectors, bias)
    target = problem.scores().softmax(1).multinomial(1, generator=random).squeeze(1)
    expected = value_and_gradients(case.head, problem.leaves(torch.float32), target)
    actual = value_and_gradients(case.head, problem.leaves(torch.float32), target, options={"matmul": "bf16"})
    assert actual[0] != expected[0]
    few = case.member.joint or (case.member.name in ("sparsemax", "entmax") and case.setting.get("alpha", 2) > 1)
    assert abs(actual[0] / expected[0] - 1) < (3e-4 if few else 1e-4)
    for ours, theirs in zip(actual[1:], expected[1:], strict=True):
        assert ours.dtype == torch.float32
        # Rankmax's gradient jumps at its cuts, and that of a loss of ranks wherever two scores change places.
        assert (ours - theirs).norm() < (0.25 if case.member.joint else 0.05) * theirs.norm()


# The same in every run ---------------------------------------------------------------------------


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES)
def test_two_runs_agree_to_the_last_bit(case: HeadCase, threads: Any) -> None:
    problem, target = make_problem(24, num_classes=301), make_target("padded ids", 24, num_classes=301)
    for count, reduction in ((1, "mean"), (1, "none"), (2, "mean")):
        threads(count)
        runs = [
            value_and_gradients(case.head, problem.leaves(torch.float32), target, reduction=reduction) for _ in range(2)
        ]
        assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))
