"""torch's own cases of cross entropy, as the installed torch has them, put to the softmax loss and its head.

Run as a script, because the modules of torch that hold the cases change settings of their process. Prints JSON: for
each group of cases how many agreed with torch's own loss in float64, value and gradients; how many were changed before
or left out, and why; and what failed.
"""

from __future__ import annotations

import collections
import importlib.util
import json
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import manymax

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Of values and gradients against float64, relative and absolute: some roundings of the dtype of the result.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NAMES = ("nn.functional.cross_entropy", "nn.functional.linear_cross_entropy")
MODULES = ("CrossEntropyLoss", "LinearCrossEntropyLoss")


@dataclass
class Case:
    """One call: scores, or queries with class vectors and a bias; `module` says to take the module."""

    dtype: torch.dtype
    input: Tensor
    target: Tensor
    keywords: dict[str, Any]
    vectors: Tensor | None = None
    bias: Tensor | None = None
    module: bool = False

    def __post_init__(self) -> None:
        given = dict(self.keywords)
        if given.get("ignore_index", 0) is None:  # what torch's head calls its default
            del given["ignore_index"]
        options = given.pop("options", None)
        self.block_rows = getattr(options, "batch_chunk_size", None)
        self.keywords = given

    def scaled(self) -> Case:
        """The case with rows of a target that sum to 1."""
        dim = 1 if self.target.ndim > 1 else 0
        return replace(self, target=(self.target / self.target.sum(dim, keepdim=True)).detach())

    def differentiable(self) -> list[Tensor]:
        """The tensors whose gradients are compared. A head has none for its target, and says so."""
        tensors = [self.input, self.vectors, self.bias, self.target if self.plain else None]
        return [t for t in tensors if t is not None and t.is_floating_point()]

    @property
    def plain(self) -> bool:
        """Whether it is one of the loss of given scores; also where torch has several scores for each class."""
        return self.vectors is None or self.vectors.ndim > 2

    def logits(self, *tensors: Tensor) -> Tensor:
        """The scores in torch's layout, (N, C, ...)."""
        input, *more = tensors
        if self.vectors is None:
            return input
        flat = input @ more[0].flatten(0, -2).T
        flat = flat if self.bias is None else flat + more[1].flatten()
        return flat.reshape(*input.shape[:-1], *self.vectors.shape[:-1])

    def expected(self) -> list[Tensor]:
        """torch's loss and gradients, in float64."""
        leaves = [t.detach().double().requires_grad_() for t in self.differentiable()]
        target = leaves[-1] if self.plain and self.target.is_floating_point() else self.target
        target = target.double() if target.is_floating_point() else target
        weight = self.keywords.get("weight")
        given = {**self.keywords, "weight": None if weight is None else weight.double()}
        logits = self.logits(*leaves)
        return results(functional.cross_entropy(logits, target, **given), leaves)

    def found(self) -> list[Tensor]:
        """The loss and gradients of this package."""
        leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in self.differentiable()]
        given = dict(self.keywords)
        if self.plain:
            own = leaves[-1] if self.target.is_floating_point() else self.target
            scores = classes_last(self.logits(*leaves))
            target = classes_last(own) if self.target.is_floating_point() else own
            loss = manymax.SoftmaxLoss(**given) if self.module else None
            value = manymax.softmax_loss(scores, target, **given) if loss is None else loss(scores, target)
            return results(value, leaves)
        (input, vectors, *bias), target = leaves, self.target.detach()
        options = {"block_rows": self.block_rows} if self.block_rows else None
        if self.module:
            head = manymax.LinearSoftmaxLoss(None, vectors.shape[0], options=options, **given)
            value = functional_call(head, input, target, vectors, bias)
        else:
            value = manymax.linear_softmax_loss(
                input, vectors, target, linear_bias=bias[0] if bias else None, options=options, **given
            )
        return results(value, leaves)


def functional_call(head: Any, input: Tensor, target: Tensor, vectors: Tensor, bias: list[Tensor]) -> Tensor:
    """A module's loss with class vectors and a bias from outside."""
    if not bias:
        return head(input, target, vectors)
    kept = {name: getattr(head, name) for name in ("reduction", "ignore_index", "label_smoothing", "weight", "options")}
    made = manymax.LinearSoftmaxLoss(vectors.shape[1], vectors.shape[0], bias=True, **kept).to(vectors.dtype)
    return torch.func.functional_call(made, {"linear.weight": vectors, "linear.bias": bias[0]}, (input, target))


def classes_last(scores: Tensor) -> Tensor:
    return scores.movedim(1, -1) if scores.ndim > 1 else scores


def results(value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """A value and its gradients; rows that are not reduced count differently."""
    slope = 1 + torch.arange(value.numel(), dtype=torch.float64).reshape(value.shape) % 3
    return [value.detach(), *torch.autograd.grad(value, leaves, slope.to(value.dtype))]


@dataclass
class Group:
    """What became of the cases of one kind."""

    agreed: int = 0
    changed: collections.Counter[str] = field(default_factory=collections.Counter)
    left_out: collections.Counter[str] = field(default_factory=collections.Counter)
    failed: list[str] = field(default_factory=list)

    def put(self, case: Case, name: str) -> None:
        """Compare a case with torch."""
        try:
            if no_distribution(case):
                refuse(case)
                self.changed[NO_DISTRIBUTION] += 1
                case = case.scaled()
            expected, found = case.expected(), case.found()
            if expected[0].isnan().all():
                assert found[0] == 0
                self.left_out[NOTHING_COUNTS] += 1
                return
            for a, b in zip(found, expected, strict=True):
                near = TOLERANCE[case.dtype] * max(1.0, *(float(e.abs().max()) for e in expected if e.numel()))
                torch.testing.assert_close(a.double(), b, rtol=TOLERANCE[case.dtype], atol=near)
        except Exception as error:
            shapes = [tuple(case.input.shape), tuple(case.target.shape), {k: str(v) for k, v in case.keywords.items()}]
            self.failed.append(f"{name} {case.dtype} {shapes}: {type(error).__name__}: {error}"[:600])
        else:
            self.agreed += 1


NO_DISTRIBUTION = "rows of probabilities that do not sum to 1 are refused, and were scaled"
NOTHING_COUNTS = "a mean where no row counts: nan in torch, 0 here"


def no_distribution(case: Case) -> bool:
    """Whether the rows of a target are probabilities that do not sum to 1."""
    if not case.target.is_floating_point():
        return False
    sums = case.target.detach().double().sum(1 if case.target.ndim > 1 else 0)
    rounding = max(1e-3, 8 * torch.finfo(case.dtype).eps)
    return bool(((sums - 1).abs() > rounding).any())


def refuse(case: Case) -> None:
    """Fail unless a case is refused for its target."""
    try:
        case.found()
    except manymax.ArgumentError as error:
        if "`target` as float rows must be non-negative and sum to 1" in str(error):
            return
        raise
    raise AssertionError("rows that do not sum to 1 were taken")


@cache
def databases() -> tuple[list[Any], list[Any]]:
    """torch's operators and modules with their cases."""
    # They import a package for tests of printed text, of which no case here makes use.
    if importlib.util.find_spec("expecttest") is None:
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = object  # type: ignore[attr-defined]
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    return op_db, module_db


def op_cases(name: str, noncontiguous: bool) -> Iterator[Case]:
    """The sample and reference inputs of an operator of torch, and of its variants."""
    for op in (op for op in databases()[0] if op.name == name):
        for dtype in DTYPES:
            for sample in op.reference_inputs("cpu", dtype, requires_grad=True):
                given = sample.noncontiguous() if noncontiguous else sample
                tensors = [given.input, *given.args]
                keywords = dict(given.kwargs)
                bias = keywords.pop("linear_bias", None)
                vectors = tensors[1] if len(tensors) == 3 else None
                yield Case(dtype, tensors[0], tensors[-1], keywords, vectors, bias)


def module_cases(name: str) -> Iterator[Case]:
    """The inputs of a module of torch, in training."""
    for info in (info for info in databases()[1] if info.module_cls.__name__ == name):
        for dtype in DTYPES:
            for made in info.module_inputs_func(info, "cpu", dtype, True, True):
                constructor, forward = made.constructor_input, made.forward_input
                keywords, vectors, bias = dict(constructor.kwargs), None, None
                if constructor.args:  # a head: its parameters are those of the module
                    layer = info.module_cls(*constructor.args, **constructor.kwargs)
                    shape = (layer.num_classes, *layer.out_features)
                    vectors = layer.linear.weight.detach().reshape(*shape, -1)
                    bias = None if layer.linear.bias is None else layer.linear.bias.detach().reshape(shape)
                    for own in ("out_features", "device", "dtype", "bias"):
                        keywords.pop(own, None)
                yield Case(dtype, *forward.args, keywords, vectors, bias, module=True)


def error_cases() -> Iterator[tuple[str, Any]]:
    """What torch refuses, as calls of this package."""
    operators, modules = databases()
    for op in (op for op in operators if op.name in NAMES and op.error_inputs_func is not None):
        for wrong in op.error_inputs("cpu"):
            sample = wrong.sample_input
            keywords = dict(sample.kwargs)
            yield wrong.error_regex, partial(manymax.linear_softmax_loss, sample.input, *sample.args, **keywords)
    for info in (info for info in modules if info.module_cls.__name__ in MODULES and info.module_error_inputs_func):
        for wrong in info.module_error_inputs_func(info, "cpu", torch.float32, True, True):
            constructor, forward = wrong.module_error_input.constructor_input, wrong.module_error_input.forward_input
            keywords = {k: v for k, v in constructor.kwargs.items() if k not in ("device", "dtype")}
            kind = manymax.LinearSoftmaxLoss if constructor.args else manymax.SoftmaxLoss
            input, *target = forward.args
            scores = input if constructor.args else classes_last(input)

            def call(
                kind: Any = kind, c: Any = constructor, k: Any = keywords, s: Any = scores, t: Any = target
            ) -> Any:
                return kind(*c.args, **k)(s, *t)

            yield wrong.error_regex, call


def refusals() -> Group:
    """Whether this package refuses what torch refuses, in words of its own."""
    group = Group()
    for words, call in error_cases():
        try:
            value = call()
        except manymax.ManymaxError:
            group.agreed += 1
        except Exception as error:
            group.failed.append(f"{words}: {type(error).__name__}: {error}")
        else:
            group.failed.append(f"{words}: nothing was refused, and {value} returned")
    return group


def main() -> None:
    """Go through all groups and print what became of them."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    groups: dict[str, Group] = {}
    for name in NAMES:
        for strided, title in ((False, name), (True, f"{name}, not contiguous")):
            group = groups.setdefault(title, Group())
            for number, case in enumerate(op_cases(name, strided)):
                group.put(case, f"{title} {number}")
    for name in MODULES:
        group = groups.setdefault(name, Group())
        for number, case in enumerate(module_cases(name)):
            group.put(case, f"{name} {number}")
    groups["errors"] = refusals()
    print(json.dumps({name: vars(group) for name, group in groups.items()}))


if __name__ == "__main__":
    main()
