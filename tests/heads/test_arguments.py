"""Arguments that heads refuse, and options that change nothing but time and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import manymax
from manymax import ArgumentError, ArgumentTypeError, HeadOptions, UnknownNameError
from tests.heads.plain import (
    CASES,
    HeadCase,
    Problem,
    agree,
    class_weights,
    make_problem,
    make_target,
    numbers,
    value_and_gradients,
)

C, ROWS = 40, 8


def call(case: HeadCase, **changes: Any) -> Any:
    """Call a head with good arguments, some of them replaced."""
    problem = make_problem(ROWS, num_classes=C)
    arguments = {
        "input": problem.input,
        "linear_weight": problem.linear_weight,
        "linear_bias": problem.linear_bias,
        "target": make_target("ids", ROWS, num_classes=C),
        **case.setting,
        **changes,
    }
    return case.function(arguments.pop("input"), arguments.pop("linear_weight"), arguments.pop("target"), **arguments)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"input": torch.zeros(ROWS, 6, dtype=torch.long)},
        ArgumentTypeError,
        r"`input` must be a float tensor; got torch.int64",
    ),
    ({"input": [[1.0]]}, ArgumentTypeError, r"`input` must be a tensor; got list"),
    (
        {"input": torch.zeros(ROWS, 7)},
        ArgumentError,
        r"`input` must be \(\.\.\., 6\) to fit `linear_weight`; got \(8, 7\)",
    ),
    ({"input": torch.tensor(1.0)}, ArgumentError, r"`input` must be \(\.\.\., 6\)"),
    (
        {"linear_weight": torch.zeros(C, 6, dtype=torch.long)},
        ArgumentTypeError,
        r"`linear_weight` must be a float tensor",
    ),
    (
        {"linear_weight": torch.zeros(C)},
        ArgumentError,
        r"`linear_weight` must be \(classes, features\); got shape \(40,\)",
    ),
    ({"linear_weight": torch.zeros(0, 6)}, ArgumentError, r"`linear_weight` must be \(classes, features\)"),
    ({"linear_bias": torch.zeros(C - 1)}, ArgumentError, r"`linear_bias` must have shape \(40,\); got \(39,\)"),
    ({"linear_bias": torch.zeros(C, dtype=torch.long)}, ArgumentTypeError, r"`linear_bias` must be a float tensor"),
    (
        {"target": torch.zeros(ROWS + 1, dtype=torch.long)},
        ArgumentError,
        r"`target` .*must have \(8,\).*; got shape \(9,\)",
    ),
    ({"target": torch.zeros(ROWS, C + 1).bool()}, ArgumentError, r"`target` .*must have the shape.*\(8, 41\)"),
    ({"target": torch.full((ROWS,), C)}, ArgumentError, r"`target` ids must be in \[0, 40\).*got 40"),
    ({"target": torch.full((ROWS,), -1)}, ArgumentError, r"`target` ids must be in \[0, 40\).*got -1"),
    ({"target": [0] * ROWS}, ArgumentTypeError, r"`target` must be a tensor or .*; got list"),
    ({"weight": torch.ones(C + 1)}, ArgumentError, r"`weight` must have shape \(40,\); got \(41,\)"),
    ({"weight": torch.ones(C, dtype=torch.long)}, ArgumentTypeError, r"`weight` must be a float tensor"),
    ({"reduction": "meen"}, ArgumentError, r"`reduction` must be one of .* Did you mean 'mean'\?"),
    ({"multilabel": "normalised"}, ArgumentError, r"`multilabel` must be one of .* Did you mean 'normalized'\?"),
    ({"label_smoothing": 1.5}, ArgumentError, r"`label_smoothing` must be"),
    (
        {"options": {"block_row": 3}},
        UnknownNameError,
        r"unknown option 'block_row': did you mean 'block_rows'\? Known: ",
    ),
    ({"options": {"sparse": True}}, UnknownNameError, r"unknown option 'sparse'"),
    ({"options": 3}, ArgumentTypeError, r"`options` must be .*HeadOptions or a mapping.*; got 3"),
    ({"options": {"matmul": "bf61"}}, ArgumentError, r"`options.matmul` must be one of .* Did you mean 'bf16'\?"),
    ({"options": {"backend": "nativ"}}, ArgumentError, r"`options.backend` must be one of .* Did you mean 'native'\?"),
    ({"options": {"block_rows": 0}}, ArgumentError, r"`options.block_rows` must be an integer of at least 1; got 0"),
    ({"options": {"block_rows": 2.5}}, ArgumentError, r"`options.block_rows` must be an integer .*; got 2.5"),
    ({"options": {"block_scores": -1}}, ArgumentError, r"`options.block_scores` must be an integer .*; got -1"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_wrong_arguments_are_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    for case in CASES:
        with pytest.raises(error, match=message):
            call(case.values[0], **changes)


def test_what_a_member_does_not_take() -> None:
    """The head refuses what the plain loss refuses."""
    rankmax = HeadCase(manymax.FAMILY["rankmax"])
    with pytest.raises(ArgumentTypeError, match="`target` of rankmax must be ids or bool rows"):
        call(rankmax, target=make_target("float rows", ROWS, num_classes=C))
    with pytest.raises(ArgumentError, match="`label_smoothing` must be 0 for rankmax"):
        call(rankmax, label_smoothing=0.1)
    with pytest.raises(ArgumentError, match="`order` must be an even integer"):
        call(HeadCase(manymax.FAMILY["taylor_softmax"]), order=3)
    with pytest.raises(ArgumentError, match="the polynomial overflows"):
        call(
            HeadCase(manymax.FAMILY["taylor_softmax"]), order=8, input=torch.full((ROWS, 6), 1e60, dtype=torch.float64)
        )
    with pytest.raises(ArgumentTypeError, match="a many-hot row must be bool"):
        call(HeadCase(manymax.FAMILY["softmax"]), target=torch.zeros(ROWS, C, dtype=torch.long))


OPTIONS: list[HeadOptions | dict[str, Any] | None] = [
    None,
    {},
    HeadOptions(),
    HeadOptions(block_rows=3),
    {"block_scores": 100},
    {"block_scores": 1 << 30, "retain_graph": True},
    {"block_rows": 10**6, "sparse_grad": True},
]


@pytest.mark.parametrize("case", CASES)
def test_options_change_nothing_but_the_cost(case: HeadCase) -> None:
    problem, target = make_problem(20, num_classes=301), make_target("padded ids", 20, num_classes=301)
    expected = value_and_gradients(case.plain, problem.leaves(), target, weight=class_weights(301))
    for options in OPTIONS:
        leaves = problem.leaves()
        agree(
            value_and_gradients(case.head, leaves, target, weight=class_weights(301), options=options), expected, 1e-10
        )


def test_dtypes_of_vectors_and_bias_may_differ_from_the_queries() -> None:
    """The dtype of the queries is that of the arithmetic; every gradient has the dtype of its argument."""
    problem, target = make_problem(ROWS, num_classes=C), make_target("ids", ROWS, num_classes=C)
    for case in (case.values[0] for case in CASES):
        expected = value_and_gradients(case.plain, problem.leaves(), target)
        leaves = Problem(
            problem.input.float().requires_grad_(),
            problem.linear_weight.bfloat16().requires_grad_(),
            problem.linear_bias.double().requires_grad_(),  # type: ignore[union-attr]
        )
        actual = value_and_gradients(case.head, leaves, target)
        assert [result.dtype for result in actual] == [torch.float32, torch.float32, torch.bfloat16, torch.float64]
        agree(actual[:2] + actual[3:], expected[:2] + expected[3:], 1e-5)
        agree(actual[2:3], expected[2:3], 2.0**-8)


@pytest.mark.parametrize("case", CASES)
def test_a_constant_that_wants_a_gradient_gets_it_or_is_refused(case: HeadCase) -> None:
    """Blocks give no gradient to targets and class weights; RG, by plain autograd, does. None is silently missing."""
    problem = make_problem(ROWS, num_classes=C)
    constants = {"weight": class_weights(C).requires_grad_()}
    if case.member.takes.float_rows:
        constants["target"] = numbers(ROWS, C, generator=torch.Generator()).softmax(1).requires_grad_()
    for name, value in constants.items():
        options: dict[str, Any] = {"target": make_target("ids", ROWS, num_classes=C), name: value}
        if case.member.kind == "exact":
            with pytest.raises(ArgumentError, match=rf"`{name}` requires a gradient.*`{name}\.detach\(\)`"):
                call(case, **options)
            with torch.no_grad():
                assert call(case, **options).isfinite()
        else:
            expected = torch.autograd.grad(case.plain(problem, **options), value)[0]
            agree([torch.autograd.grad(call(case, **options), value)[0]], [expected], 1e-10)


def test_a_grouped_target_that_wants_a_gradient_is_refused() -> None:
    problem = make_problem(2, num_classes=C)
    _, target = manymax.group_pairs(torch.tensor([0, 1, 1]), torch.tensor([4, 5, 6]))
    target.weights.requires_grad_()
    with pytest.raises(ArgumentError, match="`target` requires a gradient"):
        manymax.linear_softmax_loss(problem.input, problem.linear_weight, target)


@pytest.mark.parametrize("case", CASES)
def test_no_positives_at_all(case: HeadCase) -> None:
    """Padded ids (N, 0), without a column."""
    assert call(case, target=torch.zeros(ROWS, 0, dtype=torch.long)) == 0


@pytest.mark.parametrize("case", CASES)
def test_the_meta_device_is_taken_or_refused(case: HeadCase) -> None:
    input, vectors = torch.empty(ROWS, 3, device="meta"), torch.empty(C, 3, device="meta", requires_grad=True)
    target = torch.empty(ROWS, dtype=torch.long, device="meta")
    if case.member.kind == "exact":
        with pytest.raises(ArgumentError, match="meta device"):
            case.function(input, vectors, target, **case.setting)
    else:
        assert case.function(input, vectors, target, **case.setting, reduction="none").shape == (ROWS,)


WRONG_MODULES: list[tuple[type, dict[str, Any], str]] = [
    (manymax.LinearSoftmaxLoss, {"weight": torch.ones(5)}, r"`weight` must have shape \(3,\); got \(5,\)"),
    (manymax.LinearNCELoss, {"weight": torch.ones(5)}, "`weight` must have shape"),
    (manymax.LinearNCELoss, {"hit_policy": "drop"}, "`hit_policy` must be"),
    (manymax.LinearSampledSoftmaxLoss, {"correction": "foo"}, "`correction` must be"),
    (manymax.LinearNCELoss, {"num_negatives": 0}, "`num_negatives` must be an integer >= 1; got 0"),
    (manymax.LinearSampledSoftmaxLoss, {"sampler": manymax.samplers.UniformSampler(5)}, "draws from 5 classes"),
]


@pytest.mark.parametrize(("module", "options", "words"), WRONG_MODULES)
def test_a_module_refuses_settings_when_it_is_built(module: type, options: dict[str, Any], words: str) -> None:
    with pytest.raises((ArgumentError, UnknownNameError), match=words):
        module(2, 3, **options)


def test_modules_without_classes_refuse_settings_when_they_are_built() -> None:
    with pytest.raises(
        ArgumentError, match=r"`weight` must have one number for each class, \(C,\); got shape \(1, 3\)"
    ):
        manymax.SoftmaxLoss(torch.ones(1, 3))
    with pytest.raises(ArgumentError, match="`temperature` must be positive and finite; got inf"):
        manymax.InBatchLoss(float("inf"))
    with pytest.raises(ArgumentError, match="`bias` must be finite; got -inf"):
        manymax.SiglipLoss(bias=-float("inf"))


def test_class_vectors_of_a_module_on_another_device_are_refused() -> None:
    """Native code would read them at the address 0, and end the process."""
    head = manymax.LinearSoftmaxLoss(2, 3, device="meta")
    with pytest.raises(ArgumentError, match="`linear_weight` is on meta and `input` on cpu"):
        head(torch.ones(1, 2), torch.tensor([0]))
