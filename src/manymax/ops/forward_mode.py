"""Forward derivatives of autograd functions beside torch.compile, which cannot trace a function that has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from manymax.errors import ManymaxError

# PyTorch has no public question for "which transforms of `torch.func` is this within?". Where a later version has moved
# the private names, nothing is refused.
try:
    from torch._C._functorch import TransformType, get_interpreter_stack
except ImportError:

    def _forward_modes() -> int:
        """0: torch does not tell."""
        return 0

else:

    def _forward_modes() -> int:
        """How many transforms of forward mode, one within the other, a call is in."""
        return sum(transform.key() == TransformType.Jvp for transform in get_interpreter_stack() or ())


def differentiable(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` with `function.tangent` as its rule of forward mode, the static method `jvp` of autograd.

    Under `torch.compile` the function is applied without that rule.
    """
    dual: Any = type(f"{function.__name__}Dual", (function,), {"jvp": staticmethod(function.tangent)})  # type: ignore[attr-defined]

    def apply(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return function.apply(*args)
        # torch takes the tangents of a function of one's own for constants then, and second derivatives would be 0
        if _forward_modes() > 1:
            raise ManymaxError(
                "forward mode within forward mode, such as `jacfwd` of `jacfwd`, gives wrong derivatives of functions"
                " with rules of their own in torch: take `torch.func.hessian`, or `jacfwd` of `jacrev`."
            )
        return dual.apply(*args)

    return apply
