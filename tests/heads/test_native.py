"""Every back end of the exact heads against the plain losses in float64: each native level that runs here, and torch.

Sizes and scores are chosen so that every way through the C++ is taken: rows whose support is small from the start,
small after a search, or large, side by side in one block; groups of 64 classes that are not full; one class; more
positives than are worth a pass each. Where no library was compiled, plain torch is what is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import manymax
from manymax import FAMILY, ArgumentError
from manymax.engine import native_library
from tests.heads.plain import (
    TOLERANCE,
    HeadCase,
    Problem,
    agree,
    class_weights,
    make_problem,
    make_target,
    needs_library,
    value_and_gradients,
)

MEMBERS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "sparsemax": ("sparsemax", {}),
    **{f"entmax-{alpha}": ("entmax", {"alpha": alpha}) for alpha in (1.01, 1.1, 1.3, 1.5, 1.7)},
    "rankmax": ("rankmax", {}),
    "lambdaloss": ("lambda_loss", {"variant": "lambdaloss", "k": 5}),
    "lambdarank": ("lambda_loss", {"variant": "lambdarank", "k": 0}),
}
BACKENDS = ("torch", *(f"native-{level}" for level in native_library.levels_here()))
DTYPES = {"float64": torch.float64, "float32": torch.float32}
ROWS = 25
SCALES = (1 / 512, 1 / 8, 1.0, 4.0, 16.0)  # of the rows in turn: supports from all classes to one

JOINT = [label for label, (name, _) in MEMBERS.items() if FAMILY[name].joint]  # a loss of all positives of a row
every_member = pytest.mark.parametrize("label", MEMBERS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def head_case(label: str, backend: str = "torch") -> HeadCase:
    name, setting = MEMBERS[label]
    return HeadCase(FAMILY[name], setting, backend)


@cache
def problem_of(num_classes: int, bias: bool = True) -> Problem:
    """Rows of all scales in turn; a row of zeros, whose scores are all equal without a bias; masks in the bias."""
    problem = make_problem(ROWS, num_classes=num_classes, regime="near", bias=bias, masked=num_classes > 4)
    scale = torch.tensor(SCALES).double()[torch.arange(ROWS) % len(SCALES)]
    scale[7] = 0
    linear_bias = None if problem.linear_bias is None else problem.linear_bias / 16  # less than 1/64 apart, and exact
    return Problem(problem.input * scale.unsqueeze(1), problem.linear_weight, linear_bias)


def target_of(kind: str, num_classes: int) -> Tensor:
    """A target of this kind; "best" are the two classes with the highest scores, as after training."""
    if kind != "best":
        return make_target(kind, ROWS, num_classes=num_classes)
    best = problem_of(num_classes).scores().topk(min(2, num_classes), 1).indices
    best[3::10] = -100  # no positive
    return best


def differ(
    label: str, backend: str, dtype: torch.dtype, problem: Problem, target: Any, plain: list[Tensor], **options: Any
) -> None:
    """Fail unless value and gradients of the head are those of the plain loss, which is given."""
    if options.get("weight") is not None:
        options["weight"] = options["weight"].to(dtype)
    found = value_and_gradients(head_case(label, backend).head, problem.leaves(dtype), target, **options)
    unit = max(1.0, float(problem.input.abs().max()))
    agree(found, plain, TOLERANCE[dtype], (label, backend, options.keys()), unit)


# Keywords and forms of the target ----------------------------------------------------------------

# A kind of target, and keywords that go with it: together every keyword meets every way to write a row's target.
SITUATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "ids": ("ids", {}),
    "class weights": ("padded ids", {"weight": True, "reduction": "none"}),
    "normalized": ("bool rows", {"weight": True, "reduction": "sum", "multilabel": "normalized"}),
    "soft rows": ("float rows", {"weight": True}),
    "smoothing": ("padded ids", {"weight": True, "label_smoothing": 0.25}),
    "smoothed soft rows": ("float rows", {"label_smoothing": 0.1, "multilabel": "normalized", "reduction": "none"}),
    "best classes": ("best", {}),
    "sparse gradient": ("best", {"options": {"sparse_grad": True}}),
}


def situation(name: str, num_classes: int) -> tuple[str, dict[str, Any]]:
    kind, keywords = SITUATIONS[name]
    keywords = {**keywords, "options": {"block_rows": 9, **keywords.get("options", {})}}
    if "weight" in keywords:
        keywords["weight"] = class_weights(num_classes)
    return kind, keywords


@cache  # the same for all back ends and dtypes: scores are exact in float32
def plain_result(label: str, name: str, num_classes: int) -> list[Tensor]:
    kind, keywords = situation(name, num_classes)
    target = target_of(kind, num_classes)
    return value_and_gradients(head_case(label).plain, problem_of(num_classes).leaves(), target, **keywords)


@every_dtype
@every_backend
@every_member
def test_every_keyword(label: str, backend: str, dtype: torch.dtype) -> None:
    """At 1203 classes: masked ones, ignored rows, a class of weight 0, and blocks in which rows of all kinds meet."""
    for name in SITUATIONS:
        kind, keywords = situation(name, 1203)
        if head_case(label).takes(kind, keywords.get("label_smoothing", 0.0)):
            target = target_of(kind, 1203)
            differ(label, backend, dtype, problem_of(1203), target, plain_result(label, name, 1203), **keywords)


@pytest.mark.parametrize("num_classes", [1, 2, 17, 63, 64, 65, 130, 5003])
@every_backend
@every_member
def test_numbers_of_classes(label: str, backend: str, num_classes: int) -> None:
    """Fewer than a group, a group and one more, one that no vector register divides; in float32."""
    for name in ("ids", "best classes"):
        kind, keywords = situation(name, num_classes)
        target, plain = target_of(kind, num_classes), plain_result(label, name, num_classes)
        differ(label, backend, torch.float32, problem_of(num_classes), target, plain, **keywords)


@cache
def plain_pairs(label: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Pairs of rows and classes, some of them twice, and what the plain loss gives for the pairs one by one."""
    random = torch.Generator().manual_seed(3)
    rows, classes = torch.arange(ROWS).repeat(5), torch.randint(1203, (5 * ROWS,), generator=random)
    classes[:ROWS] = classes[-ROWS:]
    leaves = problem_of(1203, bias=False).leaves()
    value = head_case(label).plain(Problem(leaves.input[rows], leaves.linear_weight), classes)
    grads = torch.autograd.grad(value, leaves.parts(), torch.tensor(1.5).double())
    return rows, classes, [value.detach(), *grads]


@every_backend
@pytest.mark.parametrize("label", [label for label in MEMBERS if label not in JOINT])
def test_grouped_pairs(label: str, backend: str) -> None:
    """Without a bias; one row has all scores equal."""
    rows, classes, plain = plain_pairs(label)
    _, target = manymax.group_pairs(rows, classes)
    differ(label, backend, torch.float32, problem_of(1203, bias=False), target, plain)


@every_backend
@pytest.mark.parametrize("label", ["softmax", "sparsemax", "rankmax"])
def test_long_vectors(label: str, backend: str) -> None:
    """Packed rows are added to gradients 64 numbers at a time; 130 are two times that and a rest."""
    problem, target = problem_of(1203), target_of("best", 1203)
    wide = Problem(problem.input.repeat(1, 22)[:, :130], problem.linear_weight.repeat(1, 22)[:, :130])
    wide.linear_weight[::2, 64:] = 0  # columns are not multiples of each other
    plain = value_and_gradients(head_case(label).plain, wide.leaves(), target)
    differ(label, backend, torch.float32, wide, target, plain)


# Many positives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [2, 31, 33, 90])
@every_dtype
@every_backend
@pytest.mark.parametrize("label", ["rankmax", "sparsemax", "entmax-1.3", *JOINT])
def test_many_positives(label: str, backend: str, dtype: torch.dtype, most: int) -> None:
    """Up to 32 of a row take a pass each in rankmax; where most of them are outside of a support, it is one no more."""
    target, plain = plain_many(label, most)
    differ(label, backend, dtype, problem_of(701), target, plain, reduction="none")


@cache
def plain_many(label: str, most: int) -> tuple[Tensor, list[Tensor]]:
    """Padded ids, from none to `most` positives in a row, unsorted, with padding at any place."""
    random = torch.Generator().manual_seed(most)
    ids = torch.rand(ROWS, 701, generator=random).argsort(1)[:, :most]
    count = torch.randint(0, most + 1, (ROWS, 1), generator=random)
    count[-5:] = most  # of all scales
    target = torch.where(torch.rand(ROWS, most, generator=random).argsort(1) < count, ids, -100)
    target = torch.where(target % 5 == 3, -100, target)  # masked
    return target, value_and_gradients(head_case(label).plain, problem_of(701).leaves(), target, reduction="none")


# A learned alpha ---------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.01, 1.1, 1.3, 1.5, 1.7, 2.0])
@every_dtype
@every_backend
def test_the_gradient_in_alpha(backend: str, dtype: torch.dtype, alpha: float) -> None:
    # Rounded to float32, so that all see the same number; 1.5 and 2 are exact and have kernels of their own.
    for name in ("class weights", "smoothed soft rows", "sparse gradient"):
        kind, keywords = situation(name, 1203)
        target, results = target_of(kind, 1203), []
        for loss, kept in (("head", dtype), ("plain", torch.float64)):
            leaf = torch.tensor(alpha, dtype=torch.float32).to(kept).requires_grad_()
            case = HeadCase(FAMILY["entmax"], {"alpha": leaf}, backend)
            problem = problem_of(1203).leaves(kept)
            given = {**keywords, "weight": keywords["weight"].to(kept)} if "weight" in keywords else keywords
            results.append(value_and_gradients(getattr(case, loss), problem, target, extra=(leaf,), **given))
        agree(*results, 10 * TOLERANCE[dtype], (backend, name), 16)  # terms of both signs cancel in the sum


# Difficult numbers -------------------------------------------------------------------------------


def difficult_scores(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Rows of 1000 scores that are exact in the dtype."""
    random = torch.Generator().manual_seed(5)
    eighths = torch.randint(-40, 41, (1000,), generator=random).double() / 8
    tiny = torch.finfo(dtype).smallest_normal / 16
    last = torch.zeros(1000, dtype=torch.float64)
    yield "all equal", last
    yield "all but one equal", last - 30 * (torch.arange(1000) < 999)
    yield "only the last class is near the top", last.where(torch.arange(1000) > 997, -9.0)
    yield "an offset", eighths + 1e4
    yield "a negative offset", eighths - 1e4
    yield "an offset beyond which float32 has no eighths", (8 * eighths).round() + 2.0**22
    yield "numbers below the normal ones", eighths * tiny
    yield "far apart", eighths * 1e4
    yield "further apart than any model has them", eighths * 2.0 ** (100 if dtype == torch.float32 else 900)
    yield "two clusters", eighths / 64 + 2000 * (torch.arange(1000) % 2)
    yield "a positive far below", (eighths / 8).where(torch.arange(1000) < 999, -(2.0**26))
    few = (eighths / 8).where(torch.arange(1000) < 100, -(2.0**27))
    yield "a positive far below few others", few.where(torch.arange(1000) < 999, -(2.0**26))
    yield "just within one of the top", last.where(torch.arange(1000) != 5, 1 - 2.0**-20)


@every_dtype
@every_backend
@every_member
def test_difficult_scores(label: str, backend: str, dtype: torch.dtype) -> None:
    """Each row is a class vector over one query alone, so that scores are what is listed above."""
    case = head_case(label, backend)
    for name, scores in difficult_scores(dtype):
        many = torch.cat([torch.arange(40), torch.tensor([999])]).unsqueeze(0)
        for target in (torch.tensor([[5, -100, 999]]), torch.tensor([[0, 1, 999]]), many):
            results = []
            for loss, kept in ((case.head, dtype), (case.plain, torch.float64)):
                leaf = scores.to(kept).unsqueeze(1).requires_grad_()
                value = loss(Problem(torch.ones(1, 1, dtype=kept), leaf), target)
                results.append([value.detach(), *torch.autograd.grad(value, leaf)])
            assert torch.equal(scores.to(dtype).double(), scores), name
            agree(*results, TOLERANCE[dtype], (name, target))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@every_backend
@every_member
def test_scores_that_are_refused(label: str, backend: str, bad: float) -> None:
    """In the first class, in a full group, and in the last class of a group that is not full; a row without a class."""
    for place in (0, 70, 129) if bad != -torch.inf else (slice(None),):
        vectors = torch.zeros(130, 1)
        vectors[place] = bad
        with pytest.raises(ArgumentError, match=r"`scores` (must not hold (nan|\+inf)|has a row in which every class)"):
            head_case(label, backend).head(Problem(torch.ones(3, 1), vectors), torch.tensor([1, 2, 3]))


@every_backend
def test_a_positive_that_its_vector_masks_is_refused(backend: str) -> None:
    """The bias, which is looked at before anything is computed, does not show it."""
    vectors = torch.zeros(130, 1)
    vectors[70] = -torch.inf
    with pytest.raises(ArgumentError, match="a masked class cannot be a positive"):
        head_case("rankmax", backend).head(Problem(torch.ones(2, 1), vectors), torch.tensor([[1, -100], [2, 70]]))


# Repetition --------------------------------------------------------------------------------------


@needs_library
@every_member
def test_the_same_bits_for_any_number_of_threads(label: str) -> None:
    """Packed rows, dense ones and both, and on a second call."""
    case, target = head_case(label, "native"), target_of("best", 5003)

    def results(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        try:
            problem = problem_of(5003).leaves(torch.float32)
            return value_and_gradients(case.head, problem, target, options={"block_rows": 9})
        finally:
            torch.set_num_threads(1)

    first = results(1)
    for threads in (1, 2, 3):
        assert all(map(torch.equal, first, results(threads))), threads


def packed_rows(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Which rows of the gradients that native kernels give from here on are packed."""
    found: list[bool] = []
    real: Callable[..., Any] = manymax.engine.gradients.Gradients._add_mixed

    def add(self: Any, start: int, part: Any, *more: Any) -> None:
        found.extend((part.count >= 0).tolist())
        real(self, start, part, *more)

    monkeypatch.setattr(manymax.engine.gradients.Gradients, "_add_mixed", add)
    return found


@needs_library
@pytest.mark.parametrize("label", [label for label in MEMBERS if label not in ("softmax", "entmax-1.01", *JOINT)])
def test_rows_of_both_kinds_are_tested(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests above would cover one of the two ways to hold a gradient."""
    found = packed_rows(monkeypatch)
    target = target_of("best", 1203)
    value_and_gradients(head_case(label, "native").head, problem_of(1203).leaves(), target)
    assert 0.2 < sum(found) / len(found) < 0.9


@needs_library
@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("label", [label for label in MEMBERS if label not in JOINT])  # ranks of rounded ties differ
def test_a_soft_cap_on_rows_of_both_kinds(label: str, backend: str) -> None:
    """The slopes of a cap are taken where entries are packed, or from a copy of a row; torch keeps the whole block."""
    problem, target = problem_of(1203), target_of("best", 1203)
    for cap in (6.0, 60.0):
        results = [
            value_and_gradients(head_case(label, each).head, problem.leaves(), target, softcap=cap)
            for each in (backend, "torch")
        ]
        agree(*results, TOLERANCE[torch.float64], cap, float(problem.input.abs().max()))


# Anything ----------------------------------------------------------------------------------------


@needs_library
@settings(max_examples=100)
@given(st.data())
def test_any_rows(data: st.DataObject) -> None:
    """The best level and torch agree on scores that are no round numbers, of any size, with any number of positives."""
    draw = data.draw
    label, dtype = draw(st.sampled_from(list(MEMBERS))), draw(st.sampled_from(list(DTYPES.values())))
    num_classes, rows, dim = draw(st.integers(1, 2000)), draw(st.integers(1, 12)), draw(st.sampled_from([1, 5, 70]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    queries = torch.randn(rows, dim, generator=random, dtype=torch.float64)
    scale = 10 ** draw(st.floats(-3, 1.5)) * torch.rand(rows, 1, generator=random) ** draw(st.integers(0, 3))
    vectors = torch.randn(num_classes, dim, generator=random, dtype=torch.float64)
    problem = Problem(queries * scale / dim**0.5, vectors)
    target = torch.randint(num_classes, (rows, draw(st.sampled_from([1, 3, 40]))), generator=random)
    target[torch.rand(target.shape, generator=random) < 0.3] = -100
    sparse, options = draw(st.booleans()), {"reduction": draw(st.sampled_from(["mean", "none"]))}
    options["options"] = {"sparse_grad": sparse}
    if draw(st.booleans()) and head_case(label).member.takes.smoothing and not sparse:
        options["label_smoothing"] = 0.1
    results = [
        value_and_gradients(head_case(label, backend).head, problem.leaves(dtype), target, **options)
        for backend in ("native", "torch")
    ]
    agree(*results, 1e-9 if dtype == torch.float64 else 1e-4, options, float(queries.abs().max() * scale.max()))
