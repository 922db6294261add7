"""Functions that torch.compile leaves out of its graphs, as a whole, or takes into them as one node."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import CodeType
from typing import Any

import torch

# `torch.compiler.disable` does the same, but loads the compiler, for two seconds, where nothing may ever be compiled.
# The names below are private, and those of torch 2.6 are others than those of 2.13. Should a later version move them, a
# compiled model still runs, with more breaks in its graph.
try:
    from torch._C._dynamo import eval_frame as _eval_frame
except ImportError:
    _eval_frame: Any = None  # type: ignore[no-redef]


# What torch shows where a full graph was asked for.
MESSAGE = (
    "a head looks at the values of its scores, which no graph can hold. Exact heads are one operator in a graph, unless"
    " with `sparse_grad`, `target` or `weight` that require a gradient; others are a break in it: leave"
    " `fullgraph=True` out, or compile what comes before the head"
)


def _never_compile(code: CodeType) -> None:
    """Tell the compiler to leave a piece of code alone, where it can be told."""
    frames: Any = _eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        strategy, action = frames._FrameExecStrategy, frames._FrameAction
        frames.set_code_exec_strategy(code, strategy(action.SKIP, action.DEFAULT))
    elif hasattr(frames, "skip_code"):
        frames.skip_code(code)


def outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for which torch.compile breaks its graph once and goes on after it.

    A head looks at the values of its scores to choose what to compute, which no graph can hold: traced, it would break
    into dozens of small graphs that are slower than no graph at all.
    """
    frames: Any = _eval_frame
    if not hasattr(frames, "set_eval_frame"):
        return function

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        # Off while the function runs, so that nothing which it calls is compiled on its own.
        before = frames.set_eval_frame(None)
        try:
            return function(*arguments, **keywords)
        finally:
            frames.set_eval_frame(before)

    made: Any = call
    _never_compile(made.__code__)
    made._torchdynamo_disable = True
    made._torchdynamo_disable_msg = MESSAGE
    return call


def in_graphs(node: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The function, of which torch.compile and torch.export see `node` instead.

    Args:
        node: called with the arguments while a graph is traced; returns None for those that no graph can hold, for
            which torch.compile breaks its graph.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        left_out, compiling = outside_of_graphs(function), torch.compiler.is_compiling

        @wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if compiling():
                found = node(*arguments, **keywords)
                if found is not None:
                    return found
            return left_out(*arguments, **keywords)

        # After a break the compiler is asked for the call by itself, where there is nothing to compile.
        made: Any = call
        _never_compile(made.__code__)
        return call

    return decorate
