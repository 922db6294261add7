"""What the tests of heads compare with: the plain loss on the table of scores, in float64, by autograd.

Queries and class vectors are small multiples of powers of two, so that every score is exact in float32 as well: a
float32 head and the float64 plain loss then see the same scores, and only the arithmetic after them is compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from manymax import FAMILY
from manymax.engine import native_library
from manymax.engine.member import Member
from manymax.engine.options import read_options
from manymax.heads import head_class, head_function

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
REGIMES = ("wide", "thin", "mixed")  # how far scores are apart, and so how large supports are; see `make_problem`
KINDS = ("ids", "padded ids", "bool rows", "float rows")
DIM = 6


@dataclass(frozen=True)
class HeadCase:
    """A head and its plain loss, with the same settings; `backend` is the one that the head runs on."""

    member: Member
    setting: Mapping[str, Any] = field(default_factory=dict)
    backend: str = "torch"

    @property
    def function(self) -> Callable[..., Tensor]:
        """The head as a function."""
        return head_function(self.member)

    def head(self, problem: Problem, target: Any, **options: Any) -> Tensor:
        """The loss by the head."""
        honoured = head_class(self.member).honours
        if "options" in options:  # a head refuses options that have no effect on it: they are left out
            given = read_options(options["options"])
            options["options"] = {f.name: getattr(given, f.name) for f in fields(given) if f.name in honoured}
        options["options"] = replace(read_options(options.get("options")), backend=self.backend)
        return self.function(
            problem.input,
            problem.linear_weight,
            target,
            linear_bias=problem.linear_bias,
            **{**self.setting, **options},
        )

    def plain(self, problem: Problem, target: Any, **options: Any) -> Tensor:
        """The loss on the table of scores."""
        options.pop("options", None)
        return self.member.loss(problem.scores(), target, **{**self.setting, **options})

    def takes(self, kind: str, label_smoothing: float = 0.0) -> bool:
        """Whether the member takes targets of this kind with this smoothing."""
        rows = self.member.takes.float_rows or kind != "float rows"
        return rows and (self.member.takes.smoothing or not label_smoothing)


# More settings than the examples of the members: the ways through a kernel depend on them.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "entmax": [{"alpha": alpha} for alpha in (1, 1.05, 1.3, 1.5, 1.9, 2)],
    "taylor_softmax": [{"order": 2}, {"order": 4}],
}
# The first tier takes one setting for each way through a kernel: a level kept as v, one kept as w.
QUICK: dict[str, list[dict[str, Any]]] = {"entmax": [{"alpha": 1.05}, {"alpha": 1.5}], "taylor_softmax": [{"order": 2}]}


def make_cases() -> Iterator[Any]:
    """One parameter for each setting of each member; slow for a setting that is not among the quick ones."""
    for member in FAMILY.values():
        if member.kind in ("exact", "quadratic"):
            for setting in SETTINGS.get(member.name, member.examples):
                quick = member.name not in QUICK or setting in QUICK[member.name]
                label = "-".join([member.name, *map(str, setting.values())])
                yield pytest.param(HeadCase(member, setting), id=label, marks=() if quick else pytest.mark.slow)


CASES = list(make_cases())
needs_library = pytest.mark.skipif(not native_library.available(), reason="no native library: run `make native`")
CASES += [
    pytest.param(HeadCase(FAMILY[name], setting, backend="native"), id=f"{name}-native", marks=needs_library)
    for name, setting in (
        ("sparsemax", {}),
        ("entmax", {"alpha": 1.5}),
        ("rankmax", {}),
        ("psl", {"activation": "relu", "tau": 0.4}),
    )
]


@dataclass(frozen=True)
class Problem:
    """Queries (..., d), class vectors (C, d) and a bias (C,) or None."""

    input: Tensor
    linear_weight: Tensor
    linear_bias: Tensor | None = None

    def scores(self) -> Tensor:
        """The table of scores, (..., C)."""
        scores = self.input @ self.linear_weight.T
        return scores if self.linear_bias is None else scores + self.linear_bias

    def leaves(self, dtype: torch.dtype = torch.float64) -> Problem:
        """The same numbers as leaves that require a gradient."""
        parts = (self.input, self.linear_weight, self.linear_bias)
        return Problem(*(None if p is None else p.detach().to(dtype).requires_grad_() for p in parts))  # type: ignore[arg-type]

    def parts(self) -> list[Tensor]:
        """Queries, class vectors and, if there is one, the bias."""
        parts = (self.input, self.linear_weight, self.linear_bias)
        return [part for part in parts if part is not None]


def numbers(*shape: int, generator: torch.Generator) -> Tensor:
    """Random multiples of 1/8 in [-1, 1], whose products and sums float32 holds exactly."""
    return torch.randint(-8, 9, shape, generator=generator, dtype=torch.float64) / 8


def make_problem(
    *batch: int, num_classes: int, regime: str = "mixed", bias: bool = True, masked: bool = False, seed: int = 0
) -> Problem:
    """Queries, class vectors and bias whose scores differ as much as `regime` says.

    "wide" scores are about 0.01 apart, so that supports are large; "near" ones about 1; "thin" ones about 15, so that
    supports are small; "mixed" rows are wide and thin in turn. `masked` gives classes 3, 8, 13, ... a bias of -inf.
    """
    random = torch.Generator().manual_seed(seed)
    input = numbers(*batch, DIM, generator=random)
    scale = torch.tensor({"wide": [1 / 64], "near": [1.0], "thin": [16.0], "mixed": [1 / 64, 16.0]}[regime])
    turn = torch.arange(max(1, input[..., 0].numel())) % len(scale)
    input = input * scale[turn][: input[..., 0].numel()].reshape(*batch, 1)
    linear_bias = numbers(num_classes, generator=random) / 8 if bias else None
    linear_weight = numbers(num_classes, DIM, generator=random)
    if masked and linear_bias is not None:
        linear_bias = torch.where(torch.arange(num_classes) % 5 == 3, -torch.inf, linear_bias)
    return Problem(input, linear_weight, linear_bias)


def make_target(kind: str, *batch: int, num_classes: int, seed: int = 1) -> Tensor:
    """A target of this kind that names no masked class; some rows are ignored, and some padded ids are repeated."""
    random = torch.Generator().manual_seed(seed)
    live = torch.arange(num_classes)[torch.arange(num_classes) % 5 != 3]
    pick = torch.randint(len(live), (*batch, 4), generator=random)
    ids = live[pick]
    ids = torch.where(torch.rand(*batch, 4, generator=random) < 0.25, -100, ids)
    if kind == "ids":
        return ids[..., 0]
    if kind == "padded ids":
        return torch.cat([ids, ids[..., :1]], -1)
    rows = torch.zeros(*batch, num_classes + 1, dtype=torch.float64)
    rows = rows.scatter_(-1, torch.where(ids == -100, num_classes, ids), 1.0)[..., :num_classes]
    if kind == "bool rows":
        return rows > 0
    rows = rows * (1 + torch.arange(num_classes))
    return rows / rows.sum(-1, keepdim=True).clamp(min=1)


def class_weights(num_classes: int) -> Tensor:
    """Class weights, all positive but that of class 1, whose positives do not count."""
    return torch.where(torch.arange(num_classes) == 1, 0.0, 0.5 + torch.arange(num_classes) % 4).double()


def option_sets(num_classes: int, *, smoothing: bool, odd: bool) -> Iterator[dict[str, Any]]:
    """Combinations of reduction, multilabel mode, smoothing and class weights: the even half of them, or the odd one.

    Two calls with different dtypes cover all combinations at half the time.
    """
    choices = (
        ("mean", "sum", "none"),
        ("sum", "normalized"),
        (0.0, 0.25) if smoothing else (0.0,),
        (None, class_weights(num_classes)),
    )
    names = ("reduction", "multilabel", "label_smoothing", "weight")
    for index in itertools.product(*(range(len(choice)) for choice in choices)):
        if sum(index) % 2 == odd:
            yield {name: choice[i] for name, choice, i in zip(names, choices, index, strict=True)}


def upstream(value: Tensor) -> Tensor:
    """The gradient from above: 1.5 for a scalar, and for rows a different factor each, of both signs and some 0."""
    if value.ndim == 0:
        return torch.full_like(value, 1.5)
    factors = torch.arange(value.numel(), dtype=value.dtype) % 5 - 1.5
    return torch.where(factors == 0.5, 0, factors).reshape(value.shape)


def value_and_gradients(
    loss: Callable[..., Tensor], problem: Problem, target: Any, *, extra: tuple[Tensor, ...] = (), **options: Any
) -> list[Tensor]:
    """The loss, then its gradients in input, class vectors, bias and `extra`, all dense."""
    value = loss(problem, target, **options)
    grads = torch.autograd.grad(value, [*problem.parts(), *extra], upstream(value))
    return [value.detach(), *(grad.to_dense() if grad.is_sparse else grad for grad in grads)]


def agree(actual: list[Tensor], expected: list[Tensor], tolerance: float, what: object = "", unit: float = 1.0) -> None:
    """Fail unless every pair differs by at most tolerance x (largest entry + unit / 20).

    A gradient is a sum of differences p - t of numbers near 1, times the queries: the unit is the size of the queries.
    """
    names = ("value", "input", "linear_weight", "linear_bias or other", "other")
    for name, ours, theirs in zip(names, actual, expected, strict=False):
        assert ours.shape == theirs.shape, (name, what)
        assert ours.isfinite().all(), (name, what)
        if theirs.numel():
            scale = float(theirs.abs().max())
            error = float((ours.double() - theirs.double()).abs().max())
            assert error <= tolerance * (scale + unit / 20), (name, error, scale, what)
    assert len(actual) == len(expected)


def compare(
    case: HeadCase, problem: Problem, target: Any, *, dtype: torch.dtype = torch.float64, **options: Any
) -> list[Tensor]:
    """Compare the head in `dtype` with the plain loss in float64, value and gradients; returns those of the head."""
    expected = value_and_gradients(case.plain, problem.leaves(), target, **options)
    if options.get("weight") is not None:
        options = {**options, "weight": options["weight"].to(dtype)}
    actual = value_and_gradients(case.head, problem.leaves(dtype), target, **options)
    assert actual[0].dtype == dtype
    unit = max([1.0, *problem.input.abs().flatten().tolist()])
    agree(actual, expected, TOLERANCE[dtype], (problem.linear_weight.shape, options), unit)
    return actual
