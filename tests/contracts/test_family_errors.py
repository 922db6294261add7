"""What every exact member refuses, and whether the error names the argument, what was expected and what arrived."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from manymax import ArgumentError, ArgumentTypeError, ManymaxError
from manymax.heads import head_function
from tests.exact import EXACT, INF, Case, cases, normal


def refused(error: type[Exception], *words: str) -> Any:
    """Expect an error of the package whose message has all of these words (patterns), in this order."""
    pattern = r"[\s\S]*".join(words)
    assert issubclass(error, ManymaxError)
    return pytest.raises(error, match=pattern)


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize(
    ("scores", "error", "words"),
    [
        ([[1.0, 2.0]], ArgumentTypeError, ["`scores`", "tensor", "list"]),
        (torch.tensor([[1, 2]]), ArgumentTypeError, ["`scores`", "float", "int64"]),
        (torch.zeros(1, 2, dtype=torch.complex64), ArgumentTypeError, ["`scores`", "float", "complex64"]),
        (torch.tensor(1.0), ArgumentError, ["`scores`", r"\(\)"]),
        (torch.zeros(1, 0), ArgumentError, ["`scores`", r"\(1, 0\)"]),
    ],
    ids=["list", "int", "complex", "scalar", "no class"],
)
def test_scores_of_the_wrong_kind(case: Case, scores: Any, error: type[Exception], words: list[str]) -> None:
    with refused(error, *words):
        case.loss(scores, torch.tensor([0]))
    if case.member.map is None:
        return
    with refused(error, *words):
        case.member.map(scores, **({"target": torch.tensor([0])} if case.needs_label else {}), **case.setting)


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        ([0, 1], ArgumentTypeError, ["`target`", "list"]),
        (torch.zeros(2, dtype=torch.complex64), ArgumentTypeError, ["`target`", "complex64"]),
        (torch.tensor(0), ArgumentError, ["`target`", r"\(2,\)", r"\(\)"]),
        (torch.tensor([0, 1, 2]), ArgumentError, ["`target`", r"\(2,\)", r"\(3,\)"]),
        (torch.zeros(3, 4, dtype=torch.long), ArgumentError, ["`target`", r"\(2,\)", r"\(3, 4\)"]),
        (torch.zeros(2, 1, 4, dtype=torch.long), ArgumentError, ["`target`", r"\(2, 1, 4\)"]),
        (torch.zeros(2, 3, dtype=torch.bool), ArgumentError, ["`target`", "bool", r"\(2, 4\)", r"\(2, 3\)"]),
        (torch.tensor([0, 4]), ArgumentError, ["`target`", r"\[0, 4\)", "4"]),
        (torch.tensor([0, -1]), ArgumentError, ["`target`", r"\[0, 4\)", "-1"]),
        (torch.tensor([[0, 1], [2, 9]]), ArgumentError, ["`target`", r"\[0, 4\)", "9"]),
        (torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0]]), ArgumentTypeError, ["`target`", "int64", r"target\.bool\(\)"]),
    ],
    ids=[
        "list",
        "complex",
        "scalar",
        "rows",
        "shape",
        "ndim",
        "bool shape",
        "id",
        "negative id",
        "ids",
        "int many-hot",
    ],
)
def test_targets_of_the_wrong_kind(case: Case, target: Any, error: type[Exception], words: list[str]) -> None:
    with refused(error, *words):
        case.loss(normal(2, 4), target)


@pytest.mark.parametrize("case", cases())
def test_one_hot_rows_of_two_classes_are_no_ids(case: Case) -> None:
    """[[1, 0]] would mean both classes. A column of padding says that it does."""
    one_hot = torch.tensor([[1, 0], [0, 1]])
    with refused(ArgumentTypeError, "`target`", "int64", r"target\.bool\(\)", r"pad\(target, \(0, 1\), value=-100\)"):
        case.loss(normal(2, 2), one_hot)
    with refused(ArgumentTypeError, "`target`", r"target\.bool\(\)"):
        head_function(case.member)(normal(2, 3), normal(2, 3), one_hot, **case.setting)
    padded = torch.nn.functional.pad(one_hot, (0, 1), value=-100)
    both = case.loss(normal(2, 2), torch.ones(2, 2, dtype=torch.bool))
    torch.testing.assert_close(case.loss(normal(2, 2), padded), both)


@pytest.mark.parametrize("case", cases(distributions=True))
@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([1.0, 1.0, 0.0], ["`target`", "sum to 1", "2"]),
        ([0.2, 0.2, 0.2], ["`target`", "sum to 1", "0.6"]),
        ([1.5, -0.5, 0.0], ["`target`", "negative"]),
        ([math.nan, 0.5, 0.5], ["`target`", "sum to 1", "nan"]),
    ],
)
def test_float_rows_that_are_no_distribution(case: Case, row: list[float], words: list[str]) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        with refused(ArgumentError, *words):
            case.loss(normal(2, 3, dtype=dtype), torch.tensor([[1.0, 0, 0], row], dtype=dtype))
    with refused(ArgumentError, "`target`", r"\(2, 3\)", r"\(2, 2\)"):
        case.loss(normal(2, 3), torch.full((2, 2), 0.5))


@pytest.mark.parametrize("member", [m for m in EXACT if not m.takes.float_rows], ids=lambda m: m.name)
def test_float_rows_are_refused_with_the_reason(member: Any) -> None:
    with refused(ArgumentTypeError, "`target`", "float rows", re.escape(member.takes.why)):
        member.loss(normal(2, 3), torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize("member", [m for m in EXACT if m.takes.float_rows], ids=lambda m: m.name)
def test_an_id_to_ignore_in_float_rows(member: Any) -> None:
    with refused(ArgumentError, "`ignore_index`", "negative", "got 1"):
        member.loss(normal(2, 3), torch.full((2, 3), 1 / 3), ignore_index=1)


@pytest.mark.parametrize("member", [m for m in EXACT if not m.takes.smoothing], ids=lambda m: m.name)
def test_smoothing_is_refused_with_the_reason(member: Any) -> None:
    with refused(ArgumentError, "`label_smoothing`", "0.1", re.escape(member.takes.why)):
        member.loss(normal(2, 3), torch.tensor([0, 1]), label_smoothing=0.1)
    with refused(ArgumentError, "`label_smoothing`", member.name, re.escape(member.takes.why)):
        member.module(label_smoothing=0.1)  # before the first batch


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"reduction": "average"}, ArgumentError, ["`reduction`", "'none', 'mean', 'sum'", "'average'"]),
        ({"reduction": "meen"}, ArgumentError, ["`reduction`", "'meen'", "Did you mean 'mean'"]),
        ({"multilabel": "normalised"}, ArgumentError, ["`multilabel`", "'normalised'", "Did you mean 'normalized'"]),
        ({"label_smoothing": -0.1}, ArgumentError, ["`label_smoothing`", r"\[0, 1\]", "-0.1"]),
        ({"label_smoothing": 1.5}, ArgumentError, ["`label_smoothing`", r"\[0, 1\]", "1.5"]),
        ({"label_smoothing": math.nan}, ArgumentError, ["`label_smoothing`", "nan"]),
    ],
)
def test_options_of_the_wrong_kind(case: Case, options: Any, error: type[Exception], words: list[str]) -> None:
    with refused(error, *words):
        case.loss(normal(2, 4), torch.tensor([0, 1]), **options)
    with refused(error, *words):
        case.module(**options)


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize(
    ("weight", "error", "words"),
    [
        ([1.0, 1.0, 1.0, 1.0], ArgumentTypeError, ["`weight`", "list"]),
        (torch.ones(4, dtype=torch.long), ArgumentTypeError, ["`weight`", "int64"]),
        (torch.ones(3), ArgumentError, ["`weight`", r"\(4,\)", r"\(3,\)"]),
        (torch.ones(1, 4), ArgumentError, ["`weight`", r"\(4,\)", r"\(1, 4\)"]),
    ],
)
def test_class_weights_of_the_wrong_kind(case: Case, weight: Any, error: type[Exception], words: list[str]) -> None:
    with refused(error, *words):
        case.loss(normal(2, 4), torch.tensor([0, 1]), weight=weight)


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("weight", [None, torch.ones(5)], ids=["plain", "weighted"])
@pytest.mark.parametrize("shape", [(2, 5, 7), (2, 5, 7, 3)])
def test_the_layout_of_torch_is_recognised(case: Case, weight: Tensor | None, shape: tuple[int, ...]) -> None:
    target = torch.zeros(shape[:1] + shape[2:], dtype=torch.long)
    with refused(ArgumentError, r"scores\.movedim\(1, -1\)"):
        case.loss(torch.zeros(shape), target, weight=weight)
    assert case.loss(torch.zeros(shape).movedim(1, -1), target, weight=weight).isfinite()


BAD_VALUES = [(math.nan, "nan"), (INF, r"\+inf")]


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize(("value", "words"), BAD_VALUES)
@pytest.mark.parametrize(("num_classes", "where"), [(1, 0), (4, 0), (4, -1), (700, 5), (700, -1)])
def test_scores_that_are_no_numbers(case: Case, value: float, words: str, num_classes: int, where: int) -> None:
    scores = normal(3, num_classes)
    scores[1, where] = value
    hot = torch.zeros(3, num_classes, dtype=torch.bool)
    hot[:, 0] = True
    for target in (
        torch.zeros(3, dtype=torch.long),
        torch.tensor([0, -100, 0]),
        torch.zeros(3, 1, dtype=torch.long),
        hot,
    ):
        with refused(ArgumentError, "`scores`", words):
            case.loss(scores, target)
    with refused(ArgumentError, "`scores`", words):
        case.probs(scores)


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("num_classes", [1, 4, 700])
def test_rows_in_which_every_class_is_masked(case: Case, num_classes: int) -> None:
    scores = normal(3, num_classes)
    scores[1] = -INF
    with refused(ArgumentError, "`scores`", "masked"):
        case.loss(scores, torch.tensor([0, -100, 0]))
    with pytest.raises(ArgumentError, match="masked"):
        case.loss(scores, torch.zeros(3, dtype=torch.long))
    with pytest.raises(ArgumentError, match="masked"):
        case.probs(scores)


MASKED = {
    "id": torch.tensor([0, 1]),
    "ids": torch.tensor([[0, -100], [0, 1]]),
    "bool": torch.tensor([[True, False, False, False], [True, True, False, False]]),
    "float": torch.tensor([[1.0, 0, 0, 0], [0.9, 0.1, 0, 0]]),
}


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("multilabel", ["sum", "normalized"])
def test_a_masked_class_cannot_be_a_positive(case: Case, multilabel: str) -> None:
    scores = normal(2, 4)
    scores[1, 1] = -INF
    for kind, target in MASKED.items():
        if kind != "float" or case.member.takes.float_rows:
            for label_smoothing in [0.0, 0.1] if case.member.takes.smoothing else [0.0]:
                with refused(ArgumentError, "`target`", "-inf", "masked"):
                    case.loss(scores, target, multilabel=multilabel, label_smoothing=label_smoothing)
