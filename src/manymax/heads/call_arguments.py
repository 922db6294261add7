"""The arguments of a head's call under their names, refused as Python refuses them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

DEPRECATED = {"sparse": "sparse_grad"}  # old names of keywords, which still work with a warning


def bind_positional(
    name: str, more: tuple[Any, ...], positional: list[str], given: Mapping[str, Any]
) -> dict[str, Any]:
    """All arguments by name: the further positional ones under the names `positional`, and those given by name.

    Too many, or one that is given twice, raise the error that Python would raise.
    """
    if len(more) > len(positional):
        raise TypeError(f"{name}() takes {len(positional)} further positional arguments; got {len(more)}")
    bound = dict(zip(positional, more, strict=False))
    for key in bound.keys() & given.keys():
        raise TypeError(f"{name}() got multiple values for argument {key!r}")
    return {**bound, **given}


def read_names(name: str, given: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Keyword arguments under their present names; unknown ones raise the error that Python would raise."""
    read = {}
    for key, value in given.items():
        present = DEPRECATED[key] if DEPRECATED.get(key) in known else key
        if present != key:
            # Level 3 is the line that called the head.
            warnings.warn(f"`{key}` is called `{present}` now.", DeprecationWarning, stacklevel=3)
        if present not in known:
            raise TypeError(f"{name}() got an unexpected keyword argument {key!r}")
        read[present] = value
    return read
