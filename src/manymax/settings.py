"""`Setting`: a parameter of a member, sampler, backbone or solver, with its type, range and help, declared once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from manymax.errors import ArgumentError, ArgumentTypeError, check_choice


@dataclass(frozen=True)
class Learned:
    """How a setting is learned: the head has an unconstrained parameter, from which the value is computed.

    raw: from the value to the unconstrained number.
    value: from the unconstrained number, a tensor, to the value, which is inside of its range.
    key: the name of the parameter in the state dict of a head.
    """

    raw: Callable[[float], float]
    value: Callable[[Tensor], Tensor]
    key: str


@dataclass(frozen=True)
class Setting:
    """One setting of a member, sampler, backbone or solver, declared once.

    Heads, the command line, TOML files, records and reports read the same declaration.

    name: the keyword argument of the loss and of the head.
    kind: the type, one of float, int, bool and str.
    default: the value where none is given; None if the default depends on the call.
    help: one sentence for the command line and the documentation.
    least, most: the smallest and the largest allowed number.
    above, below: like least and most, but the bound itself is not allowed.
    multiple_of: an integer that must divide the value.
    choices: the allowed words, for kind str.
    start: a function from the number of classes to the default, where that depends on it.
    option: the name on the command line, in TOML files and in records; None if it is `name`.
    learned: how the value is learned in a head that is built with `learnable=True`; None if it cannot be.
    reason: a few words for the error message that say why the range is what it is; may be empty.
    of_map: whether the map of the member takes the setting too, and not the loss alone.
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
        """The name of the setting on the command line, in TOML files and in records."""
        return self.option or self.name

    @property
    def learnable_name(self) -> str:
        """The name, in the same places, of the switch that makes the setting a learned parameter."""
        return f"learnable_{self.public_name}"

    def switches(self) -> tuple[Setting, ...]:
        """The switch that makes the setting a learned parameter, a bool setting; empty if it cannot be learned."""
        if self.learned is None:
            return ()
        return (Setting(self.learnable_name, bool, False, f"Learn {self.public_name} along with the model."),)

    def read(self, value: Any) -> Any:
        """Convert a value from the command line or a file to the type of the setting, and check it.

        Args:
            value: a text, a number or a truth value.

        Returns:
            the value as a float, int, bool or str.

        Example:
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
            found = int(value)  # a file may hold the integer 4 as 4.0
        self.check(found)
        return float(found) if self.kind is float and isinstance(found, int) else found

    def value(self, given: Any, num_classes: int) -> Any:
        """The value that a head uses: `given`, checked, or the default for this number of classes if it is None."""
        if given is None:
            given = self.default if self.start is None else self.start(num_classes)
        self.check(given)
        return given

    def check(self, value: Any) -> None:
        """Raise unless the setting can have this value.

        A tensor, as for a learned setting, is not checked here: the member does that.
        """
        if isinstance(value, Tensor) or (value is None and self.default is None):
            return
        # an integer is a number, but True, which Python counts as an int, is none
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
        """What the value must be, in words, for error messages and the documentation.

        Example:
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
    """The number or truth value that a text stands for; the text itself if it is none, which `check` then refuses."""
    if kind is bool:
        return _TRUTH.get(text.strip().lower(), text)
    try:
        return kind(text)
    except ValueError:
        return text
