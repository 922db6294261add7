"""What a call with a bad value came to: fine, or a finding."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manymax import ManymaxError
from tests.fuzz.subjects import Subject
from tests.fuzz.values import Bad


@dataclasses.dataclass(frozen=True)
class Finding:
    """A call that did not do what it must.

    kind: "internal": an error of torch or Python, and not a `ManymaxError`. "unnamed": the error names no argument of
    the call. "not finite": nan or inf came out. "accepted": a value of another kind than the annotation says was taken
    without a word. "other value": a good value in disguise gave another result than the value itself. "stopped": the
    call took too long or too much memory, or ended the process.
    """

    subject: str
    argument: str
    value: str
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.subject}({self.argument}={self.value}): {self.detail}"


def outcome(subject: Subject, argument: str, bad: Bad) -> Finding | None:
    """Call a subject with one bad value; None if the call did what it must."""

    def finding(kind: str, detail: object) -> Finding:
        return Finding(subject.name, argument, bad.name, kind, str(detail)[:300].replace("\n", " "))

    given = {name: make() for name, make in subject.good.items()}
    value = bad.make(subject.good_value(argument))
    for name, good in given.items():  # so that gradients are asked for as well
        if name in WITH_GRADIENTS and isinstance(good, Tensor) and name != argument:
            given[name] = good.requires_grad_()
    given[argument] = value
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = result(subject, given)
    except ManymaxError as error:
        return None if names(str(error), argument, subject) else finding("unnamed", error)
    except Exception as error:
        return finding("internal", f"{type(error).__name__}: {error}")
    if not fits(value, subject.kinds.get(argument, "Any")):
        return finding("accepted", f"`{subject.kinds.get(argument)}`, and it returned {found!r}")
    if any(not math.isfinite(x) for x in numbers(found)):
        return finding("not finite", found)
    if bad.plain is not None:
        plain = bad.plain(value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = result(subject, {**{n: make() for n, make in subject.good.items()}, argument: plain})
            except ManymaxError:
                return finding("accepted", f"although {plain!r} is refused")
        if not alike(found, expected):
            return finding("other value", f"{found!r}, and {expected!r} for {plain!r}")
    return None


WITH_GRADIENTS = ("scores", "input", "linear_weight", "queries", "documents", "positive", "negative")


def result(subject: Subject, given: dict[str, Any]) -> Any:
    """What a call returns, and the gradients of the arguments that want them."""
    torch.manual_seed(0)
    found = subject.call(**given)
    leaves = [x for x in given.values() if isinstance(x, Tensor) and x.requires_grad and x.is_leaf]
    if isinstance(found, Tensor) and found.requires_grad and not found.is_meta:
        grads = torch.autograd.grad(found.sum(), leaves, allow_unused=True) if leaves else ()
        return found, [None if g is None else g for g in grads]
    return found


def names(message: str, argument: str, subject: Subject) -> bool:
    """Whether an error message names the argument, or one that it has to fit."""
    known = {argument, *subject.varied} if argument in message or _shared(subject) else {argument}
    return any(re.search(rf"`[\w.]*\b{re.escape(name.rstrip('_'))}\b", message) for name in known)


def _shared(subject: Subject) -> bool:
    """Whether the arguments of a subject have to fit each other, so that an error may name either."""
    return len(subject.varied) > 1


def fits(value: object, kind: str) -> bool:
    """Whether a value is of a kind that an annotation names. Annotations that are no plain kinds take anything."""
    parts = [part.strip() for part in kind.split("|")]
    if any(part not in PLAIN for part in parts):
        return True
    return any(PLAIN[part](value) for part in parts)


def _number(value: object) -> bool:
    from fractions import Fraction

    return isinstance(value, (int, float, np.floating, np.integer, Fraction)) and not isinstance(value, bool)


PLAIN = {
    "Tensor": lambda value: isinstance(value, Tensor),
    "int": lambda value: isinstance(value, (int, np.integer)) and not isinstance(value, bool),
    "float": _number,
    "bool": lambda value: isinstance(value, (bool, np.bool_)),
    "str": lambda value: isinstance(value, str),
    "None": lambda value: value is None,
}


def numbers(found: Any) -> Iterator[float]:
    """All numbers in a result. Those in tensors without values are none; a log-probability may be -inf."""
    if isinstance(found, Tensor):
        if found.is_floating_point() and not found.is_meta and found.numel():
            dense = found.to_dense() if found.layout != torch.strided else found
            yield float(dense.detach().double().sum()) if dense.detach().isfinite().all() else math.nan
    elif isinstance(found, bool):
        return
    elif isinstance(found, float):
        yield found
    elif dataclasses.is_dataclass(found) and not isinstance(found, type):
        for field in dataclasses.fields(found):
            yield from numbers(getattr(found, field.name))
    elif isinstance(found, (list, tuple)):
        for part in found:
            yield from numbers(part)


def alike(found: Any, expected: Any) -> bool:
    """Whether two results are the same, up to rounding."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        if found.is_meta or expected.is_meta:
            return found.is_meta == expected.is_meta
        pair = [
            x.detach().to_dense().double() if x.layout != torch.strided else x.detach().double()
            for x in (found, expected)
        ]
        return pair[0].shape == pair[1].shape and torch.allclose(*pair, rtol=1e-3, atol=1e-5, equal_nan=True)
    if isinstance(found, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(alike, found, expected))
    if isinstance(found, float) and isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=1e-6)
    return True
