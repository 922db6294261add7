"""For machines without a GPU: Triton's interpreter in bearable time, and plain torch on the way that it takes there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def patch_once() -> None:
    """Have the interpreter patch Triton's language once for a kernel, and not once more for each function it calls.

    Triton 3.9 does the latter on top of what is patched, and never undoes it: every call makes all later ones slower.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, done = interpreter._patch_lang, set()

    def call(function: Any, *arguments: Any, **constants: Any) -> Any:
        # What a kernel sees is patched for the kernel. Functions of Triton's own see its language under another name.
        other = [value for value in function.fn.__globals__.values() if value is tl.core]
        if other and "core" not in done:
            done.add("core")
            patch(function.fn)
        return function.rewrite()(*arguments, **constants)

    interpreter.InterpretedFunction.__call__ = call


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Have plain torch go the way that it goes on a GPU, where no value may be looked at."""
    homes = [
        module for name, module in sys.modules.items() if name.startswith("manymax.") and hasattr(module, "visible")
    ]
    real = homes[0].visible
    for module in homes:
        module.visible = lambda *tensors: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in homes:
            module.visible = real  # type: ignore[attr-defined]
