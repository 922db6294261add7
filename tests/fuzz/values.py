"""Bad values, at least 40 for each argument: things of another kind for any argument, and forms of a good tensor.

A few of them are good in disguise (`np.float32(1.5)`, a tensor of another dtype or layout). They say what they stand
for, and a call that takes them must return what it returns for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Bad:
    """A bad value.

    name: as findings show it.
    make: makes it anew from the good value of the argument, which most do not look at.
    plain: what it stands for, made from the bad value, if it is good in disguise.
    """

    name: str
    make: Callable[[Any], Any]
    plain: Callable[[Any], Any] | None = None


class _Odd:
    """An object that is nothing a function could expect."""

    def __repr__(self) -> str:
        return "an odd object"


class _TensorLike(Tensor):
    """A subclass of tensors without any behaviour of its own."""


def _item(value: Any) -> Any:
    return value.item()


ANYTHING = [
    Bad("None", lambda _: None),
    Bad("True", lambda _: True),
    Bad("False", lambda _: False),
    *(
        Bad(repr(value), lambda _, value=value: value)
        for value in (0, 1, -1, 3, 7, -100, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**64, -(10**30), 10**400)
    ),
    *(
        Bad(repr(value), lambda _, value=value: value)
        for value in (0.0, 0.5, -0.5, 1.5, 2.0, 1e-300, -1e38, 1e308, float("nan"), float("inf"), float("-inf"))
    ),
    Bad("1j", lambda _: 1j),
    Bad("Decimal('1.5')", lambda _: Decimal("1.5")),
    Bad("Fraction(3, 2)", lambda _: Fraction(3, 2)),
    Bad("''", lambda _: ""),
    Bad("'mean '", lambda _: "mean "),
    Bad("'false'", lambda _: "false"),
    Bad("an escape sequence", lambda _: "\x1b[2J"),
    Bad("bytes", lambda _: b"mean"),
    Bad("[]", lambda _: []),
    Bad("[0, 1, 2]", lambda _: [0, 1, 2]),
    Bad("[[1.0], [2.0, 3.0]]", lambda _: [[1.0], [2.0, 3.0]]),
    Bad("[None]", lambda _: [None]),
    Bad("()", lambda _: ()),
    Bad("{}", lambda _: {}),
    Bad("{'a': 1}", lambda _: {"a": 1}),
    Bad("a set", lambda _: {1, 2}),
    Bad("a range", lambda _: range(3)),
    Bad("an object", lambda _: _Odd()),
    Bad("a class", lambda _: _Odd),
    Bad("a function", lambda _: lambda *arguments: None),
    Bad("a module", lambda _: torch.nn.Linear(2, 3)),
    Bad("np.float32(1.5)", lambda _: np.float32(1.5), _item),
    Bad("np.float32(nan)", lambda _: np.float32("nan"), _item),
    Bad("np.float64(0.5)", lambda _: np.float64(0.5), _item),
    Bad("np.float16(2)", lambda _: np.float16(2), _item),
    Bad("np.int64(2)", lambda _: np.int64(2), _item),
    Bad("np.uint8(3)", lambda _: np.uint8(3), _item),
    Bad("np.bool_(True)", lambda _: np.bool_(True), _item),
    Bad("an array", lambda _: np.array([0.5, 1.0, 1.5])),
    Bad("an array of objects", lambda _: np.array([None, "a"], dtype=object)),
    Bad("torch.tensor(1.5)", lambda _: torch.tensor(1.5)),
    Bad("torch.tensor(2)", lambda _: torch.tensor(2)),
    Bad("torch.tensor(nan)", lambda _: torch.tensor(float("nan"))),
    Bad("torch.tensor(-inf)", lambda _: torch.tensor(float("-inf"))),
    Bad("a number that wants a gradient", lambda _: torch.tensor(1.5, requires_grad=True)),
    Bad("a number on meta", lambda _: torch.tensor(1.5, device="meta")),
    Bad("a complex number as a tensor", lambda _: torch.tensor(1 + 1j)),
    Bad("an empty tensor", lambda _: torch.empty(0)),
    Bad("an empty tensor of ids", lambda _: torch.empty(0, dtype=torch.long)),
    Bad("a tensor of 5 dimensions", lambda _: torch.zeros(1, 2, 1, 2, 1)),
    Bad("a tensor of 3 numbers", lambda _: torch.tensor([0.5, 1.0, 1.5])),
    Bad("a sparse tensor", lambda _: torch.eye(3).to_sparse()),
    Bad("a generator of torch", lambda _: torch.Generator().manual_seed(0)),
    Bad("a device", lambda _: torch.device("meta")),
    Bad("a device that is not there", lambda _: "cuda:99"),
    Bad("a dtype", lambda _: torch.int8),
    Bad("a half dtype", lambda _: torch.float16),
    Bad("an 8 bit dtype", lambda _: torch.float8_e4m3fn),
]


def _filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda good: torch.full_like(good, value)


def _with(*values: float) -> Callable[[Tensor], Tensor]:
    """The good tensor with these values at its front."""

    def make(good: Tensor) -> Tensor:
        flat = good.detach().clone().reshape(-1)
        flat[: len(values)] = torch.tensor(values, dtype=torch.float64).to(flat.dtype)[: flat.numel()]
        return flat.reshape(good.shape)

    return make


def _to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda good: good.detach().to(dtype)


def _float_or(good: Tensor) -> Tensor:
    return good.detach().float()


def _nested(good: Tensor) -> Tensor:
    rows = good.detach().reshape(-1) if good.ndim < 2 else good.detach()
    return torch.nested.nested_tensor(list(rows) if rows.ndim > 1 else [rows])


def _quantised(good: Tensor) -> Tensor:
    return torch.quantize_per_tensor(good.detach().float(), 0.1, 0, torch.qint8)


def _alike(value: Tensor) -> Tensor:
    return value.detach().clone()


def _strided(good: Tensor) -> Tensor:
    wide = good.detach().repeat_interleave(2, -1) if good.ndim else good.detach()
    return wide[..., ::2] if good.ndim else wide


FORMS = [
    Bad("sparse", lambda good: good.detach().to_sparse(), lambda v: v.to_dense()),
    Bad("sparse rows", lambda good: good.detach().reshape(-1, good.shape[-1] if good.ndim else 1).to_sparse_csr()),
    Bad("nested", _nested),
    Bad("mkldnn", lambda good: good.detach().float().to_mkldnn(), lambda v: v.to_dense()),
    Bad("quantised", _quantised),
    Bad("float8_e4m3fn", _to(torch.float8_e4m3fn), _float_or),
    Bad("float8_e5m2", _to(torch.float8_e5m2), _float_or),
    Bad("float8_e8m0fnu", _to(torch.float8_e8m0fnu), _float_or),
    Bad("float16", _to(torch.float16)),
    Bad("bfloat16", _to(torch.bfloat16)),
    Bad("float32", _to(torch.float32)),
    Bad("float64", _to(torch.float64)),
    Bad("complex64", _to(torch.complex64)),
    Bad("bool", _to(torch.bool)),
    *(Bad(str(dtype)[6:], _to(dtype)) for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)),
    *(Bad(str(dtype)[6:], _to(dtype)) for dtype in (torch.uint16, torch.uint32, torch.uint64)),
    Bad("meta", lambda good: good.detach().to("meta")),
    Bad("requires a gradient", lambda good: good.detach().float().requires_grad_()),
    Bad("a parameter", lambda good: torch.nn.Parameter(good.detach().clone(), requires_grad=False), _alike),
    Bad("a subclass", lambda good: good.detach().clone().as_subclass(_TensorLike), lambda v: v.as_subclass(Tensor)),
    Bad("strided", _strided, lambda v: v.contiguous()),
    Bad("an array of it", lambda good: good.detach().numpy()),
    Bad("a list of it", lambda good: good.detach().tolist()),
    *(Bad(f"full of {value}", _filled(value)) for value in (0, 1, -1, 2, 5, 127, 1e30, -1e38, 3e38)),
    Bad("full of nan", lambda good: torch.full_like(good.double(), float("nan"))),
    Bad("full of -inf", lambda good: torch.full_like(good.double(), float("-inf"))),
    Bad("a nan", lambda good: _with(float("nan"))(good.double())),
    Bad("an inf", lambda good: _with(float("inf"))(good.double())),
    Bad("a -inf", lambda good: _with(float("-inf"))(good.double())),
    Bad("both ends", lambda good: _with(3e38, -3e38)(good.float())),
    Bad("both ends of float64", lambda good: _with(1.7e308, -1.7e308)(good.double())),
    Bad("tiny numbers", lambda good: good.detach().double() * 1e-300),
    Bad("largest ids", lambda good: torch.full(good.shape, 2**63 - 1)),
    Bad("smallest ids", lambda good: torch.full(good.shape, -(2**63))),
    Bad("ids beyond the classes", lambda good: torch.full(good.shape, 5)),
    Bad("padding alone", lambda good: torch.full(good.shape, -100)),
    Bad("no rows", lambda good: good.detach()[:0]),
    Bad("one row less", lambda good: good.detach()[:-1]),
    Bad("the rows twice", lambda good: torch.cat([good.detach()] * 2)),
    Bad("no columns", lambda good: good.detach()[..., :0]),
    Bad("one column less", lambda good: good.detach()[..., :-1]),
    Bad("the columns twice", lambda good: torch.cat([good.detach()] * 2, -1)),
    Bad("a dimension more", lambda good: good.detach().unsqueeze(0)),
    Bad("a last dimension more", lambda good: good.detach().unsqueeze(-1)),
    Bad("a dimension less", lambda good: good.detach()[0]),
    Bad("transposed", lambda good: good.detach().mT),
    Bad("a conjugate", lambda good: torch.complex(good.detach().float(), good.detach().float()).conj()),
    Bad("a negative view", lambda good: torch.complex(good.detach().float(), -good.detach().float()).conj().imag),
]


def values_for(good: Any) -> Iterator[Bad]:
    """All bad values of an argument whose good value is known, None where it is not."""
    yield from ANYTHING
    if isinstance(good, Tensor):
        for form in FORMS:
            try:  # some forms do not exist for every shape and dtype
                form.make(good)
            except (RuntimeError, IndexError, NotImplementedError):
                continue
            yield form
