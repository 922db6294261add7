"""Arguments of public functions, checked at the call against the annotations of their parameters.

    @checked
    def precision_at_k(ranking: Tensor, target: Tensor, cutoff: int, *, reduction: str = "mean") -> Tensor: ...

A value of another kind is an error that names the argument, before any arithmetic can fail in the middle or do
something that nobody asked for: `normalize="no"` is true in Python. What stands for a value of the right kind becomes
one: an integer or a float of numpy is a number. What values mean together stays with the functions.
"""

from __future__ import annotations

import collections.abc
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.checks import ORDINARY_FLOATS, check_dense, check_devices
from manymax.ops.forms import TensorForm, check_forms

F = TypeVar("F", bound=Callable[..., Any])
Check = Callable[[str, Any], Any]  # from the name of an argument and its value to the value that the function gets

NO_BOUNDS: Mapping[str, float] = {}
NO_FORMS: Mapping[str, str] = {}
INT64 = torch.iinfo(torch.int64)
WORDS: dict[Any, str] = {
    Tensor: "a tensor",
    float: "a number",
    int: "an integer",
    bool: "True or False",
    str: "a string",
    type(None): "None",
    torch.Generator: "a torch.Generator",
    torch.dtype: "a torch.dtype",
    torch.device: "a device",
}


@overload
def checked(function: F) -> F: ...
@overload
def checked(*, least: Mapping[str, float] = ..., **forms: str) -> Callable[[F], F]: ...
def checked(function: Any = None, *, least: Mapping[str, float] = NO_BOUNDS, **forms: str) -> Any:
    """The function with a check of its arguments before each call.

    Args:
        function: whose parameters are annotated; those without an annotation may be anything.
        least: the smallest allowed values of numbers, by the name of the parameter.
        forms: what tensors hold and how their shapes belong together, by the name of the parameter; see ops/forms.py.
            They look at values, and are for measurements: a loss has better ways.
    """
    if function is None:
        return lambda later: _wrapped(later, Arguments(inspect.signature(later), later.__globals__, least, forms))
    if isinstance(function, type):  # a dataclass, whose constructor has its module's names too
        function.__init__ = checked(function.__init__)  # type: ignore[misc]
        return function
    return _wrapped(function, Arguments(inspect.signature(function), function.__globals__))


def _wrapped(function: Any, arguments: Arguments) -> Any:
    def call(*given: Any, **named: Any) -> Any:
        if not compiling():  # a graph has no errors to raise, and its values are not there to look at
            given, named = read(given, named)
        return function(*given, **named)

    compiling, read = torch.compiler.is_compiling, arguments.read
    # With the globals of the function's own module, by which doctest decides whether a function belongs to a module.
    made = types.FunctionType(call.__code__, function.__globals__, function.__name__, None, call.__closure__)
    return wraps(function)(made)


class Arguments:
    """The checks of the arguments of a function.

    Args:
        signature: of the function, with annotations as text or as types.
        names: what the words of an annotation mean, such as the globals of the function's module.
        least: the smallest allowed values of numbers, by the name of the parameter.
        forms: of tensors, by the name of the parameter.
    """

    def __init__(
        self,
        signature: inspect.Signature,
        names: Mapping[str, Any],
        least: Mapping[str, float] = NO_BOUNDS,
        forms: Mapping[str, str] = NO_FORMS,
    ) -> None:
        self._forms = {name: TensorForm.of(text) for name, text in forms.items()}
        self._names, self._least = names, least
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self._parameters = [p for p in signature.parameters.values() if p.kind not in several]
        self._positional = [p.name for p in self._parameters if p.kind is not p.KEYWORD_ONLY]
        self._checks: dict[str, Check] | None = None  # made at the first call, when all modules have been imported

    def read(self, given: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call as the function gets them; raises if one is of another kind than its annotation."""
        checks = self._checks
        if checks is None:
            checks = self._checks = dict(self._made())
        more = given[len(self._positional) :]
        values = [
            check(name, value) if (check := checks.get(name)) else value
            for name, value in zip(self._positional, given, strict=False)
        ]
        keywords = {name: check(name, value) if (check := checks.get(name)) else value for name, value in named.items()}
        found = {**dict(zip(self._positional, values, strict=False)), **keywords}
        check_devices(found)
        if self._forms:
            check_forms(self._forms, found)
        return (*values, *more), keywords

    def _made(self) -> Iterator[tuple[str, Check]]:
        for parameter in self._parameters:
            annotation = parameter.annotation
            if isinstance(annotation, str):
                annotation = eval(annotation, {**vars(typing), **self._names})  # the module's own text
            check = _check_of(annotation, self._least.get(parameter.name))
            if check is not None:
                yield parameter.name, check


def _check_of(annotation: Any, least: float | None) -> Check | None:
    """The check of one annotation; None if it takes anything."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = tuple(_plain(kind) for kind in (typing.get_args(annotation) if union else (annotation,)))
    if any(kind is None for kind in kinds):
        return None
    readers = [(kind, READERS.get(kind, _instance)) for kind in kinds]

    def check(name: str, value: Any) -> Any:
        for kind, reader in readers:
            found = reader(name, value, kind)
            if found is not NO_SUCH_KIND:
                if least is not None and found is not None and not isinstance(found, Tensor) and not found >= least:
                    raise ArgumentError(f"`{name}` must be at least {least:g}; got {value!r}.")
                return found
        words = " or ".join(dict.fromkeys(_words(kind) for kind in kinds))
        raise ArgumentTypeError(f"`{name}` must be {words}; got {shown(value)}.")

    return check


class _Refused:
    """What a reader returns for a value that is none of its kind."""


NO_SUCH_KIND = _Refused()


def _plain(annotation: Any) -> Any:
    """The class by which a value can be told, or None where an annotation says too little for that."""
    origin = typing.get_origin(annotation)
    if annotation is inspect.Parameter.empty or annotation is Any or isinstance(annotation, TypeVar):
        return None
    if annotation is None:
        return type(None)
    if origin is typing.Literal:
        return str
    found = origin or annotation
    return found if isinstance(found, type) and found is not object else None


def _words(kind: Any) -> str:
    if kind in WORDS:
        return WORDS[kind]
    names = {tuple: "a sequence", collections.abc.Callable: "a function", collections.abc.Mapping: "a mapping"}
    names |= {collections.abc.Sequence: "a sequence", collections.abc.Iterable: "an iterable"}
    return names.get(kind) or str(getattr(kind, "in_words", f"of the class {kind.__name__}"))


def shown(value: Any) -> str:
    """A value in an error: its text if that is short, else its class; with control characters as text."""
    if isinstance(value, Tensor):
        return f"a tensor of dtype {value.dtype}" if value.layout == torch.strided else f"a {value.layout} tensor"
    if isinstance(value, int) and abs(value) >> 64:  # thousands of digits may be too many for Python to print
        return "an integer beyond 64 bits"
    kind = type(value).__name__
    if isinstance(value, (bool, str)):  # the kind of `True` and of "3" is what is wrong with them
        return f"{value!r:.80} ({kind})"
    return repr(value) if value is None or isinstance(value, (int, float)) else kind


# Readers: of one kind each, the value as the function gets it, or NO_SUCH_KIND. ----------------------------


def _instance(name: str, value: Any, kind: type) -> Any:
    return value if isinstance(value, kind) else NO_SUCH_KIND


def _tensor(name: str, value: Any, kind: Any) -> Any:
    if not isinstance(value, Tensor):
        return NO_SUCH_KIND
    check_dense(name, value)
    # Ids of data formats, for which torch has no arithmetic.
    return value.long() if value.dtype in (torch.uint16, torch.uint32, torch.uint64) else value


def _float(name: str, value: Any, kind: Any) -> Any:
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            return NO_SUCH_KIND
        try:
            # integers stay what they are as long as a tensor can hold them
            exact = isinstance(value, numbers.Integral) and -(1 << 53) < int(value) < 1 << 53
            value = int(value) if exact else float(value)  # type: ignore[call-overload]
        except OverflowError as error:
            raise ArgumentError(f"`{name}` must be a number that a float can hold; got {shown(value)}.") from error
    if math.isnan(value):
        raise ArgumentError(f"`{name}` must be a number; got nan.")
    return value


def _int(name: str, value: Any, kind: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return NO_SUCH_KIND
    value = int(value)
    if not INT64.min <= value <= INT64.max:
        raise ArgumentError(f"`{name}` must be an integer of 64 bits; got one beyond them.")
    return value


def _bool(name: str, value: Any, kind: Any) -> Any:
    # np.bool_ has no base in Python, and this package does without numpy
    return bool(value) if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_") else NO_SUCH_KIND


def _sequence(name: str, value: Any, kind: type) -> Any:
    # by what it can do, so that arrays are sequences; a string is one of Python's, but nobody means its letters
    needed = ("__iter__",) if kind is collections.abc.Iterable else ("__len__", "__getitem__")
    fits = all(hasattr(type(value), method) for method in needed)
    return value if fits and not isinstance(value, (str, bytes, collections.abc.Mapping, Tensor)) else NO_SUCH_KIND


def _dtype(name: str, value: Any, kind: Any) -> Any:
    if isinstance(value, torch.dtype) and value not in ORDINARY_FLOATS:
        raise ArgumentTypeError(f"`{name}` must be a float dtype of 16, 32 or 64 bits; got {value}.")
    return _instance(name, value, torch.dtype)


def _device(name: str, value: Any, kind: Any) -> Any:
    if not isinstance(value, (str, torch.device)):
        return NO_SUCH_KIND
    try:
        torch.empty(0, device=value)  # the only question that a device answers before it is needed
    except Exception as error:
        raise ArgumentError(f"`{name}` is {str(value)!r}, which cannot be used here: {error}") from error
    return value


READERS: dict[Any, Callable[[str, Any, Any], Any]] = {
    Tensor: _tensor,
    float: _float,
    int: _int,
    bool: _bool,
    torch.dtype: _dtype,
    torch.device: _device,
    tuple: _sequence,
    collections.abc.Sequence: _sequence,
    collections.abc.Iterable: _sequence,
}
