"""`Setting`: what a row of a table can be set to, with its type, range and meaning, declared once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from manymax.errors import ArgumentError, ArgumentTypeError, check_choice


@dataclass(frozen=True)
class Learned:
    """How a setting becomes a parameter of a head: as a free number from which its value is computed.

    raw: from the value to the free number.
    value: from the free number, a tensor, to the value.
    key: the name of the free number in the state of a head.
    """

    raw: Callable[[float], float]
    value: Callable[[Tensor], Tensor]
    key: str


@dataclass(frozen=True)
class Setting:
    """One setting of a member, sampler, backbone or solver, declared once.

    Heads, the command line, TOML files, records and reports read it.

    name: the keyword of the loss and of the head.
    kind: float, int, bool or str.
    default: None where the member has one of its own that depends on the call.
    help: one sentence.
    least, most, above, below, multiple_of: the range of a number: at least, at most, more than, less than, and what
        divides it.
    choices: of a word.
    start: from the number of classes to its value where it is left out.
    option: its name outside of the member, in commands, files and records; None if that is `name`.
    learned: how it is learned along with the model, where a head is built with `learnable=True`.
    reason: why the range of a number is what it is, in a few words for the error; empty where that is plain.
    of_map: whether the map takes it too, where the member has one, and not the loss alone.
    """

    name: str
    kind: type
    default: Any
    help: str
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    multiple_of: int | None = None
    choices: tuple[str, ...] = ()
    start: Callable[[int], float] | None = None
    option: str | None = None
    learned: Learned | None = None
    reason: str = ""
    of_map: bool = True

    @property
    def public_name(self) -> str:
        """What it is called on the command line, in TOML files and in records."""
        return self.option or self.name

    @property
    def learnable_name(self) -> str:
        """What the switch is called there that makes it a parameter."""
        return f"learnable_{self.public_name}"

    def switches(self) -> tuple[Setting, ...]:
        """The switch that makes it a parameter, a setting as well; none where it cannot be learned."""
        if self.learned is None:
            return ()
        return (Setting(self.learnable_name, bool, False, f"Learn {self.public_name} along with the model."),)

    def read(self, value: Any) -> Any:
        """The value of what a command line or a file gives, in the type of the setting and checked.

        >>> Setting("order", int, 2, "", least=2, multiple_of=2).read("4")
        4
        >>> Setting("alpha", float, 1.5, "", least=1, most=2).read(3)
        Traceback (most recent call last):
        manymax.errors.ArgumentError: `alpha` must be a number in [1, 2]; got 3.
        """
        found = value
        if isinstance(value, Tensor):
            raise ArgumentTypeError(f"`{self.public_name}` must be {_KINDS[self.kind]}; got a tensor.")
        if isinstance(value, str) and self.kind is not str:
            found = _from_text(self.kind, value)
        elif self.kind is int and isinstance(value, float) and value.is_integer():
            found = int(value)
        self.check(found)
        return float(found) if self.kind is float and isinstance(found, int) else found

    def value(self, given: Any, num_classes: int) -> Any:
        """What a head is set to: the given value, checked, or where it is left out (None) the default for C classes."""
        if given is None:
            given = self.default if self.start is None else self.start(num_classes)
        self.check(given)
        return given

    def check(self, value: Any) -> None:
        """Raise unless `value` is one that the setting can have; tensors are the member's own business."""
        if isinstance(value, Tensor) or (value is None and self.default is None):
            return
        fits = isinstance(value, self.kind) or (self.kind is float and isinstance(value, int))
        if not fits or (isinstance(value, bool) and self.kind is not bool):
            raise ArgumentTypeError(f"`{self.public_name}` must be {_KINDS[self.kind]}; got {value!r}.")
        if self.choices:
            check_choice(self.public_name, value, self.choices)
        if self.kind in (int, float) and not self._inside(value):
            because = f" ({self.reason})" if self.reason else ""
            raise ArgumentError(f"`{self.public_name}` must be {self.range}{because}; got {value!r}.")

    def _inside(self, value: float) -> bool:
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
            and (self.multiple_of is None or value % self.multiple_of == 0)
        )

    @property
    def range(self) -> str:
        """What the value must be, in words.

        >>> Setting("order", int, 2, "", least=2, multiple_of=2).range
        'an even integer of at least 2'
        >>> Setting("alpha", float, 1.5, "", least=1, most=2).range
        'a number in [1, 2]'
        """
        words = _KINDS[self.kind]
        if self.multiple_of is not None:
            words = "an even integer" if self.multiple_of == 2 else f"{words} that {self.multiple_of} divides"
        low, high = self.least if self.above is None else self.above, self.most if self.below is None else self.below
        if low is not None and high is not None:
            left, right = "[" if self.above is None else "(", "]" if self.below is None else ")"
            return f"{words} in {left}{low:g}, {high:g}{right}"
        if low is not None:
            return f"{words} {'of at least' if self.above is None else 'above'} {low:g}"
        if high is not None:
            return f"{words} {'of at most' if self.below is None else 'below'} {high:g}"
        return f"{words} that is finite"


_KINDS = {float: "a number", int: "an integer", bool: "true or false", str: "a word"}
_TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def _from_text(kind: type, text: str) -> Any:
    """A number or a truth value; the text itself where it is none, which `check` then refuses."""
    if kind is bool:
        return _TRUTH.get(text.strip().lower(), text)
    try:
        return kind(text)
    except ValueError:
        return text
