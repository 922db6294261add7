"""Whether a tensor's values may be read, checks of scores, and the dtype in which the arithmetic runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from manymax.errors import ArgumentError, ArgumentTypeError, ManymaxError

# PyTorch has no public question for "is this a fake tensor?" nor for "is this tensor wrapped by vmap, grad or another
# `torch.func` transform?". The private names below exist in torch 2.6 to 2.13; should a later version move them, the
# library still imports and answers by other signs.
try:
    from torch._subclasses.fake_tensor import FakeTensor
except ImportError:

    def _is_fake(tensor: Tensor) -> bool:
        """Whether `tensor` is a fake tensor, judged by the name of its class: lost if the class is renamed too."""
        return any(base.__name__ == "FakeTensor" for base in type(tensor).__mro__)

else:

    def _is_fake(tensor: Tensor) -> bool:
        """Whether `tensor` is a fake tensor: a shape and a dtype without values."""
        return isinstance(tensor, FakeTensor)


try:
    from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor

    def _is_transformed(tensor: Tensor) -> bool:
        """Whether `tensor` is wrapped by a `torch.func` transform, or by the older vmap of `is_grads_batched=True`."""
        return is_functorch_wrapped_tensor(tensor) or is_legacy_batchedtensor(tensor)

except ImportError:

    def _is_transformed(tensor: Tensor) -> bool:
        """Whether `tensor` is wrapped by a `torch.func` transform, judged by its missing memory address.

        Two things are lost against the private question: tensors inside `torch.func.functionalize`, which have an
        address, count as plain ones, and wrapper subclasses (DTensor), which have none, as transformed.
        """
        if _is_fake(tensor):  # asking these for their address warns, and may fail
            return False
        try:
            tensor.data_ptr()
        except RuntimeError:
            return True
        return False


def visible(*tensors: Tensor) -> bool:
    """Whether the values of all `tensors` may be read in Python: True in eager use on the CPU.

    Under `torch.compile`, inside the `torch.func` transforms and in fake tensors there are no values to read, and on a
    GPU reading one would make the host wait. Callers then leave out checks and shortcuts that depend on values.

    Example:
        >>> visible(torch.zeros(2)), visible(torch.zeros(2, device="meta"))
        (True, False)
    """
    # the device last: torch.compile turns the first question into a constant and traces nothing after it
    return readable(*tensors) and all(t.device.type == "cpu" for t in tensors)


def readable(*tensors: Tensor) -> bool:
    """Whether all `tensors` have values at all, on a GPU too, where reading one makes the host wait.

    For shortcuts that are worth one such wait.

    Example:
        >>> readable(torch.zeros(2)), readable(torch.zeros(2, device="meta"))
        (True, False)
    """
    # first, and with nothing before it: torch.compile turns the question into the constant True and never traces the
    # private functions below
    if torch.compiler.is_compiling():
        return False
    # a generator, so that nothing private is asked where the device already decides
    hidden = (_is_fake(t) or _is_transformed(t) for t in tensors)
    return not any(t.is_meta for t in tensors) and not any(hidden)


def learned(tensor: Tensor) -> bool:
    """Whether a gradient with respect to `tensor` may be asked for."""
    # `requires_grad` is False inside `torch.func.jvp`, and inside a vmap within `torch.func.grad`, although there is a
    # derivative. So every wrapped tensor counts as learned: a gradient too many costs time, one too few is wrong.
    return tensor.requires_grad or (not torch.compiler.is_compiling() and _is_transformed(tensor))


def refuse_transforms(*tensors: Tensor | None) -> None:
    """Raise for tensors inside of `torch.func` transforms and for dual ones: a head is no function for those."""
    # Short of a transform both questions are attribute lookups; torch.compile has its own way around a head.
    if torch.compiler.is_compiling():
        return
    given = [tensor for tensor in tensors if tensor is not None]
    if any(_is_transformed(t) for t in given) or any(forward_ad.unpack_dual(t).tangent is not None for t in given):
        raise ManymaxError(
            "a head does not run inside of `torch.func` transforms (grad, jvp, vmap, ...) and has no forward"
            " derivatives: take the plain loss of the scores, which has all of them: the function named as the head,"
            " without `linear_`, of `input @ linear_weight.T`."
        )


# In others, of 8 bits and fewer, torch stores numbers and has no arithmetic.
ORDINARY_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check_dense(name: str, value: Tensor) -> None:
    """Raise unless a tensor has numbers, one after the other: those of other kinds fail in the middle of a sum."""
    if value.layout != torch.strided or value.is_nested:
        kind, way = (
            ("nested", f"torch.nested.to_padded_tensor({name}, 0)")
            if value.is_nested
            else (f"a tensor of layout {value.layout}", f"{name}.to_dense()")
        )
        raise ArgumentTypeError(f"`{name}` must be a dense tensor; got {kind}. Pass `{way}`.")
    if value.is_quantized:
        raise ArgumentTypeError(f"`{name}` must not be quantised; got {value.dtype}. Pass `{name}.dequantize()`.")
    if value.dtype.is_complex:
        raise ArgumentTypeError(f"`{name}` must be a float tensor or one of integers; got {value.dtype}.")
    if value.dtype.is_floating_point and value.dtype not in ORDINARY_FLOATS:
        raise ArgumentTypeError(
            f"`{name}` has the dtype {value.dtype}, in which nothing can be computed: pass `{name}.float()`."
        )


def check_devices(arguments: Mapping[str, Any]) -> None:
    """Raise if tensors are on different devices; single numbers on the CPU go with any."""
    first: tuple[str, Tensor] | None = None
    for name, value in arguments.items():
        if not isinstance(value, Tensor) or (value.ndim == 0 and value.device.type == "cpu"):
            continue
        if first is None:
            first = name, value
        elif value.device != first[1].device:
            raise ArgumentError(
                f"`{name}` is on {value.device} and `{first[0]}` on {first[1].device}: move one of them with `.to`."
            )


def check_scores(scores: Tensor, argument: str = "scores") -> None:
    """Raise unless `scores` is a float tensor with at least one class in its last dimension."""
    if not isinstance(scores, Tensor):
        raise ArgumentTypeError(f"`{argument}` must be a tensor; got {type(scores).__name__}.")
    if not scores.is_floating_point():
        raise ArgumentTypeError(f"`{argument}` must be a float tensor; got dtype {scores.dtype}. Use `.float()`.")
    check_dense(argument, scores)
    if scores.ndim == 0 or scores.shape[-1] == 0:
        raise ArgumentError(
            f"`{argument}` must be (..., classes) with at least 1 class; got shape {tuple(scores.shape)}."
        )


def classes_last(scores: Tensor, dim: int) -> Tensor:
    """Scores with the classes in dimension `dim` as scores with the classes last; raises if there is no such one."""
    check_scores(scores)
    if not -scores.ndim <= dim < scores.ndim:
        raise ArgumentError(f"`dim` must be in [{-scores.ndim}, {scores.ndim}) for these `scores`; got {dim}.")
    if scores.shape[dim] == 0:
        raise ArgumentError(f"`scores` must have at least 1 class in dimension {dim}; got {tuple(scores.shape)}.")
    return scores.movedim(dim, -1)


def check_finite(maximum: Tensor) -> None:
    """Raise if `maximum`, the maxima of rows of scores, shows nan, +inf or a row in which every class is masked.

    Args:
        maximum: the largest score of each row, of any shape.
    """
    # The maxima are enough, and every kernel has them at hand: `amax` keeps nan, a +inf is the maximum of its row, and
    # only a row of nothing but -inf has the maximum -inf. One look at (rows,) numbers replaces one at all scores.
    if not visible(maximum) or maximum.isfinite().all():
        return
    if maximum.isnan().any():
        raise ArgumentError("`scores` must not hold nan; got at least one row with nan.")
    if (maximum == torch.inf).any():
        raise ArgumentError("`scores` must not hold +inf; got at least one row with +inf. Mask a class with -inf.")
    raise ArgumentError("`scores` has a row in which every class is masked (-inf); leave at least one class alive.")


def working(scores: Tensor) -> tuple[Tensor, torch.dtype]:
    """The scores in the dtype of the arithmetic, which is float32 at least, and the dtype of the result.

    Half precision is computed in float32. The result has the dtype of the scores, except under autocast, where it is
    float32 as that of `torch.nn.functional.cross_entropy`.
    """
    # bfloat16 has 8 bits: a sum over classes stops growing once it is 256 times as large as its terms, and float16
    # overflows at 65504
    if scores.dtype not in (torch.float16, torch.bfloat16):
        return scores, scores.dtype
    autocast = torch.is_autocast_enabled(scores.device.type)
    return scores.float(), torch.float32 if autocast else scores.dtype


def full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """Context in which autocast is off, so that products keep the precision of their operands."""
    # a device that knows no autocast, such as "meta", refuses to have it switched off
    device = tensor.device.type
    # torch.compile of torch 2.6 cannot trace the question, and what it compiles runs on a device that has autocast
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if known else nullcontext()
