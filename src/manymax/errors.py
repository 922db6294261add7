"""Errors that say which argument is wrong, what was expected, what arrived and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ManymaxError(Exception):
    """Base class of all errors that manymax raises on purpose."""


class ArgumentError(ManymaxError, ValueError):
    """An argument has a value or a shape that cannot be used."""


class ArgumentTypeError(ManymaxError, TypeError):
    """An argument has a type or a dtype that cannot be used."""


class UnknownNameError(ManymaxError, KeyError, ValueError):
    """A name is not in the table in which it was looked up."""

    def __str__(self) -> str:  # KeyError would print the message in quotes
        return str(self.args[0])


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """The error for an unknown name; its message suggests the nearest known name and lists all of them.

    Args:
        kind: what the name was meant to be, for example "loss".
        name: the unknown name.
        known: all known names.

    Example:
        >>> raise unknown_name("loss", "sparsmax", ["softmax", "sparsemax"])
        Traceback (most recent call last):
        manymax.errors.UnknownNameError: unknown loss 'sparsmax': did you mean 'sparsemax'? Known: softmax, sparsemax.
    """
    names = list(known)
    nearest = difflib.get_close_matches(str(name), names, n=1)
    hint = f" did you mean {nearest[0]!r}?" if nearest else ""
    return UnknownNameError(f"unknown {kind} {name!r}:{hint} Known: {', '.join(names)}.")


def check_choice(argument: str, value: object, choices: Iterable[str]) -> None:
    """Raise an `ArgumentError` unless `value` is one of `choices`."""
    known = tuple(choices)
    if not isinstance(value, str) or value not in known:
        nearest = difflib.get_close_matches(str(value), known, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ArgumentError(f"`{argument}` must be one of {', '.join(map(repr, known))}; got {value!r}.{hint}")
