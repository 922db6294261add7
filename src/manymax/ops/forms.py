"""Forms of tensors, written as text: what they hold, and their shapes, which name sizes that several tensors share.

    scores = "scores N C", target = "ids N < C"

A form is a kind, then dimensions, then perhaps a bound of ids. A dimension is a name, whose size is that of the first
tensor that has it and at least 1, or "...", any number of dimensions before the others. Kinds:

    floats    floats of any value               scores   floats without nan and +inf; -inf masks a class
    finite    floats, all of them finite        wide     the same, in float32 or float64
    probs     finite and not negative           ids      integers, from 0 to below the bound
    bools     True and False                    any      whatever a tensor may hold
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.checks import visible

CONTENTS = {
    "floats": "a float tensor",
    "finite": "a float tensor of finite numbers",
    "wide": "a float32 or float64 tensor of finite numbers",
    "scores": "a float tensor without nan or +inf",
    "probs": "a float tensor of finite numbers that are not negative",
    "ids": "an integer tensor",
    "bools": "a bool tensor",
    "any": "a tensor",
}


@dataclass(frozen=True)
class TensorForm:
    """One form: its kind, its dimensions, and the name of the size that ids must be below."""

    kind: str
    dimensions: tuple[str, ...]
    bound: str = ""

    @classmethod
    def of(cls, text: str) -> TensorForm:
        """The form that a text stands for."""
        body, _, bound = text.partition("<")
        kind, *dimensions = body.split()
        return cls(kind, tuple(dimensions), bound.strip())

    @property
    def shape(self) -> str:
        """The dimensions as a shape is printed."""
        inner = ", ".join(self.dimensions)
        return f"({inner},)" if len(self.dimensions) == 1 else f"({inner})"


def check_forms(forms: Mapping[str, TensorForm], values: Mapping[str, Any]) -> None:
    """Raise unless those of `values` that are tensors have their forms; sizes are bound in the order of `forms`."""
    sizes: dict[str, Any] = {}
    for name, form in forms.items():
        value = values.get(name)
        if isinstance(value, Tensor):
            _check_kind(name, form, value)
            _check_shape(name, form, value, sizes)
            _check_values(name, form, value, sizes)


def _check_kind(name: str, form: TensorForm, value: Tensor) -> None:
    dtype = value.dtype
    fits = {
        "ids": not dtype.is_floating_point and dtype != torch.bool,
        "bools": dtype == torch.bool,
        "wide": dtype in (torch.float32, torch.float64),
        "any": True,
    }.get(form.kind, dtype.is_floating_point)
    if not fits:
        raise ArgumentTypeError(f"`{name}` must be {CONTENTS[form.kind]} {form.shape}; got dtype {dtype}.")


def _check_shape(name: str, form: TensorForm, value: Tensor, sizes: dict[str, Any]) -> None:
    shape, dimensions = tuple(value.shape), form.dimensions
    given: list[tuple[str, Any]] = list(zip(dimensions, shape, strict=False))
    if "..." in dimensions:  # as many dimensions as the others leave; the same ones wherever it stands
        after = len(dimensions) - 1
        cut = len(shape) - after
        given = [("...", shape[:cut]), *zip(dimensions[1:], shape[max(cut, 0) :], strict=False)]
        fits = cut >= 0
    else:
        fits = len(shape) == len(dimensions)
    known = [dimension for dimension, _ in given if dimension in sizes]
    if fits and all(sizes.setdefault(d, size) == size and (d == "..." or size > 0) for d, size in given):
        return
    where = ", ".join(f"{d} = {sizes[d]}" for d in known if d != "...")
    raise ArgumentError(
        f"`{name}` must have shape {form.shape}{f' with {where}' if where else ''}, none of them 0; got {shape}."
    )


def _check_values(name: str, form: TensorForm, value: Tensor, sizes: Mapping[str, Any]) -> None:
    if value.is_meta:
        raise ArgumentError(f"`{name}` is on the meta device and has no values to look at.")
    if not visible(value):
        return
    if form.kind == "ids" and form.bound and value.numel():
        low, high = (int(bound) for bound in torch.aminmax(value))
        if low < 0 or high >= sizes[form.bound]:
            raise ArgumentError(f"`{name}` must hold ids in [0, {sizes[form.bound]}); got {low if low < 0 else high}.")
    numbers = value.detach()
    bad = {
        "finite": lambda: not numbers.isfinite().all(),
        "wide": lambda: not numbers.isfinite().all(),
        "probs": lambda: not (numbers.isfinite() & (numbers >= 0)).all(),
        "scores": lambda: bool(numbers.isnan().any() or (numbers == torch.inf).any()),
    }.get(form.kind)
    if bad is not None and bad():
        raise ArgumentError(f"`{name}` must be {CONTENTS[form.kind]}; got {_worst(numbers)}.")


def _worst(numbers: Tensor) -> str:
    """A number that is no good, for an error: one that is not finite, or the smallest."""
    odd = numbers[~numbers.isfinite()]
    return str(float(odd[0] if len(odd) else numbers.min()))
