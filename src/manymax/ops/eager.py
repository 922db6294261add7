"""Functions that torch.compile leaves out of its graphs, as a whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import CodeType
from typing import Any

# `torch.compiler.disable` does the same, but loads the compiler, for two seconds, where nothing may ever be compiled.
# The names below are private, and those of torch 2.6 are others than those of 2.13. Should a later version move them, a
# compiled model still runs, with more breaks in its graph.
try:
    from torch._C._dynamo.eval_frame import set_eval_frame
except ImportError:
    set_eval_frame = None


def _never_compile(code: CodeType) -> None:
    """Tell the compiler to leave a piece of code alone, where it can be told."""
    from torch._C._dynamo import eval_frame

    if hasattr(eval_frame, "set_code_exec_strategy"):
        strategy, action = eval_frame._FrameExecStrategy, eval_frame._FrameAction
        eval_frame.set_code_exec_strategy(code, strategy(action.SKIP, action.DEFAULT))
    elif hasattr(eval_frame, "skip_code"):
        eval_frame.skip_code(code)


def outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for which torch.compile breaks its graph once and goes on after it.

    A head looks at the values of its scores to choose what to compute, which no graph can hold: traced, it would break
    into dozens of small graphs that are slower than no graph at all.
    """
    if set_eval_frame is None:
        return function

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        # Off while the function runs, so that nothing which it calls is compiled on its own.
        before = set_eval_frame(None)
        try:
            return function(*arguments, **keywords)
        finally:
            set_eval_frame(before)

    _never_compile(call.__code__)
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = "a head looks at the values of its scores"  # type: ignore[attr-defined]
    return call
