"""Forward derivatives of autograd functions beside torch.compile, which cannot trace a function that has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def differentiable(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` with `function.tangent` as its rule of forward mode, the static method `jvp` of autograd.

    Under `torch.compile` the function is applied without that rule.
    """
    dual: Any = type(f"{function.__name__}Dual", (function,), {"jvp": staticmethod(function.tangent)})  # type: ignore[attr-defined]

    def apply(*args: Any) -> Any:
        return (function if torch.compiler.is_compiling() else dual).apply(*args)

    return apply
