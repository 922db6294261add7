"""Exact heads as one operator of torch, for graphs: `torch.compile(fullgraph=True)` and `torch.export`.

A head looks at the values of its scores to choose what to compute, which no graph can hold. Traced, a call therefore
becomes one node, `manymax::linear_head`, whose arguments are tensors and one line of text that says the rest:

    softmax; input; linear_weight; target; reduction='mean'; stats='nll,argmax,'

The names that stand alone are those of the tensors, in their order. When the graph runs, the node calls the head as
eager code does, with all of its checks, and returns the loss, the statistics and, as eager heads compute gradients in
their forward, the gradients as well. Losses of rows (`reduction="none"`) have another node in the backward, because the
factors of the rows are known there alone. Outside of graphs nothing of this is used.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from manymax.engine.linear import HeadCall
from manymax.engine.options import ALL_OPTIONS, HeadOptions
from manymax.engine.statistics import LossResult
from manymax.engine.target import SoftTarget, Target
from manymax.errors import ManymaxError
from manymax.ops.checks import full_precision, visible

# Below an operator torch records no gradients, and has no public switch for it: the keys of the dispatcher are set back
# to what they are outside of it. Should a later version move the names, a head is a break in the graph.
try:
    from torch._C import _dispatch_tls_local_exclude_set, _dispatch_tls_local_include_set, _ForceDispatchKeyGuard
except ImportError:
    RECORDS = False
else:
    RECORDS = True
    _PLAIN_KEYS = _dispatch_tls_local_include_set(), _dispatch_tls_local_exclude_set()

HALVES = (torch.float16, torch.bfloat16)
TARGET_PARTS: dict[type, tuple[str, ...]] = {
    SoftTarget: SoftTarget._fields,
    Target: tuple(f.name for f in fields(Target)),
}
OPTIONS = tuple(sorted(ALL_OPTIONS))
LEARNED = frozenset({"input", "linear_weight", "linear_bias", "temperature"})


@dataclass(frozen=True)
class GraphHead:
    """A head as the operator calls it.

    read: from queries, class vectors, target and the other arguments by name to the call that was read, and what the
        loss needs beside it.
    loss: from these to the loss.
    blocks: whether it goes over blocks of scores.
    """

    read: Callable[[Tensor, Tensor, Any, dict[str, Any]], tuple[HeadCall, list[Any]]]
    loss: Callable[[HeadCall, list[Any]], Any]
    blocks: bool


_heads: dict[str, GraphHead] = {}


def register(name: str, head: GraphHead) -> str:
    """Keep a head for graphs; returns the name that it has in them, a new one if another head has this name."""
    key, number = name, 1
    while key in _heads:
        number += 1
        key = f"{name} {number}"
    _heads[key] = head
    return key


# While a graph is traced: from the arguments of a call to the node ----------------------------------------------


def call_in_graph(key: str | None, learned: frozenset[str], given: Mapping[str, Any]) -> Any:
    """The result of a head as a node of the graph that is being traced; None for a call that no graph can hold.

    Args:
        key: what `register` returned; None for a head that cannot be in a graph.
        learned: the names of settings that may be tensors with a gradient.
        given: all arguments by name.
    """
    if not RECORDS or key is None:
        return None
    words, tensors, wants = [key], [], []
    enabled = torch.is_grad_enabled()
    for name, value in _flat(given):
        if isinstance(value, Tensor):
            want = enabled and value.requires_grad
            if want and name not in LEARNED and name not in learned:
                return None  # refused by the head, with a message
            words.append(name)
            tensors.append(value)
            wants.append(want)
        elif name == "options.sparse_grad" and value:
            return None  # a graph has no sparse tensors
        elif value is not None:
            words.append(f"{name}={_constant(value)!r}")
    found = torch.ops.manymax.linear_head(tensors, "; ".join(words), wants)
    stats = given.get("stats")
    if not stats or isinstance(stats, str):  # a word alone is refused when the graph runs
        return found[0]
    rows = {name: found[1 + i].detach() for i, name in enumerate(stats)}
    return LossResult(found[0], **rows)


def _constant(value: Any) -> Any:
    """The value as one that the text of a node can have."""
    if not isinstance(value, (int, float)):
        return value
    # A number that has changed since the last graph is no constant to the compiler; as a key it becomes one again.
    (constant,) = {value: None}
    return constant


def _flat(given: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The arguments by name, those that have parts as their parts."""
    found: list[tuple[str, Any]] = []
    for name, value in given.items():
        if name == "stats" and not isinstance(value, str):
            found.append((name, "".join([f"{word}," for word in value or ()]) or None))
        elif name == "num_items" and isinstance(value, (int, float)) and not isinstance(value, bool):
            # Another one in every step: as text it would be a new graph each time.
            found.append((name, torch.full((), value, dtype=torch.float64)))
        elif isinstance(value, (SoftTarget, Target)):
            parts = TARGET_PARTS[SoftTarget] if isinstance(value, SoftTarget) else TARGET_PARTS[Target]
            found += [(f"{name}.{part}", getattr(value, part)) for part in parts]
        elif isinstance(value, HeadOptions):
            found += [(f"{name}.{part}", getattr(value, part)) for part in OPTIONS]
        elif isinstance(value, Mapping):
            found += [(f"{name}.{part}", value[part]) for part in value]
        else:
            found.append((name, value))
    return found


# When the graph runs: from the node to the head -----------------------------------------------------------------


@dataclass(frozen=True)
class Words:
    """What the text of a node says: its head, the names of its tensors, and the arguments that are no tensors."""

    head: str
    tensors: tuple[str, ...]
    constants: Mapping[str, Any]

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, text: str) -> Words:
        """The text, read."""
        head, *words = text.split("; ")
        constants = {}
        for name, _, value in (word.partition("=") for word in words if "=" in word):
            try:
                constants[name] = ast.literal_eval(value)
            except ValueError:  # infinity is no literal
                constants[name] = float(value)
        if constants.get("stats", "").endswith(","):
            constants["stats"] = tuple(constants["stats"].split(",")[:-1])
        return cls(head, tuple(word for word in words if "=" not in word), constants)

    @property
    def reduction(self) -> str:
        """How the losses of rows are reduced."""
        return str(self.constants.get("reduction", "mean"))

    @property
    def stats(self) -> tuple[str, ...]:
        """The names of the statistics."""
        named = self.constants.get("stats", ())
        return named if isinstance(named, tuple) else ()

    def arguments(self, tensors: list[Tensor]) -> dict[str, Any]:
        """All arguments by name, with parts put together."""
        given: dict[str, Any] = {}
        for name, value in (*self.constants.items(), *zip(self.tensors, tensors, strict=True)):
            whole, _, part = name.partition(".")
            if part:
                given.setdefault(whole, {})[part] = value
            else:
                given[name] = value
        target = given["target"]
        if isinstance(target, dict):
            kind: Any = SoftTarget if set(target) == set(TARGET_PARTS[SoftTarget]) else Target
            given["target"] = kind(**target)
        return given


def _recording() -> AbstractContextManager[Any]:
    """The context in which torch records gradients, within an operator too."""
    stack = ExitStack()
    stack.enter_context(_ForceDispatchKeyGuard(*_PLAIN_KEYS))
    stack.enter_context(torch.enable_grad())
    return stack


def _leaf(value: Tensor, want: bool) -> Tensor:
    """A tensor to be differentiated in; in float32 at least, so that its gradient is not rounded before the factor."""
    value = value.detach()
    if not want:
        return value
    return (value.float() if value.dtype in HALVES else value).requires_grad_()


def _call(words: Words, tensors: list[Tensor], wants: list[bool]) -> tuple[HeadCall, list[Any], list[Tensor]]:
    """A call that was read, its settings, and the tensors that its gradients are wanted in."""
    head = _heads[words.head]
    given, leaves, receiver = [], [], None
    for name, value, want in zip(words.tensors, tensors, wants, strict=True):
        if want and name == "linear_weight" and head.blocks and value.dtype in HALVES:
            # No copy of the class vectors in float32; a tensor of their shape and without memory gets the gradient.
            receiver = value.new_zeros((), dtype=torch.float32).expand(value.shape).requires_grad_()
            given.append(value.detach())
            leaves.append(receiver)
            continue
        given.append(_leaf(value, want))
        leaves += [given[-1]] if want else []
    named = words.arguments(given)
    call, settings = head.read(named.pop("input"), named.pop("linear_weight"), named.pop("target"), named)
    return replace(call, receiver=receiver), settings, leaves


def _run(tensors: list[Tensor], call: str, wants: list[bool]) -> list[Tensor]:
    """What `linear_head` returns: the loss, the statistics, and the gradients that are wanted."""
    words = Words.of(call)
    rows = words.reduction == "none"  # whose gradients are computed in the backward
    wants = [want and not rows for want in wants]
    with _recording() if any(wants) else torch.no_grad():
        read, settings, leaves = _call(words, tensors, wants)
        with full_precision(read.queries):
            result = _heads[words.head].loss(read, settings)
        value = result.loss if isinstance(result, LossResult) else result
        grads = _gradients(value, leaves, None)
    stats = [getattr(result, name) for name in words.stats]
    return [each.detach().contiguous() for each in (value, *stats, *grads)]


def _gradients(value: Tensor, leaves: list[Tensor], factor: Tensor | None) -> list[Tensor]:
    """The gradients of a value, times a factor, in leaves."""
    if not leaves:
        return []
    if not value.requires_grad:  # no row counts
        return [torch.zeros_like(leaf, memory_format=torch.contiguous_format) for leaf in leaves]
    return list(torch.autograd.grad(value, leaves, factor, allow_unused=True, materialize_grads=True))


def _run_backward(tensors: list[Tensor], factor: Tensor, call: str, wants: list[bool]) -> list[Tensor]:
    """What `linear_head_backward` returns: the gradients of the losses of rows, each times its factor."""
    words = Words.of(call)
    with _recording():
        read, settings, leaves = _call(words, tensors, wants)
        # Weights of the rows of a sum, whose forward computes the gradients at once. A sum that is infinite is refused;
        # gradients may be, where a factor was.
        as_sum = not visible(factor) or bool(factor.isfinite().all())
        if as_sum:
            weight = factor.reshape(-1).to(read.queries.dtype)
            weight = weight if read.row_weight is None else weight * read.row_weight
            read = replace(read, row_weight=weight, keywords=replace(read.keywords, reduction="sum", stats=()))
        with full_precision(read.queries):
            result = _heads[words.head].loss(read, settings)
        value = result.loss if isinstance(result, LossResult) else result
        grads = _gradients(value, leaves, None if as_sum else factor)
    wanted = [tensor for tensor, want in zip(tensors, wants, strict=True) if want]
    return [grad.detach().to(tensor.dtype).contiguous() for grad, tensor in zip(grads, wanted, strict=True)]


# The operators --------------------------------------------------------------------------------------------------


_schema = "(Tensor[] tensors, str call, bool[] wants) -> Tensor[]"
linear_head = torch.library.custom_op("manymax::linear_head", _run, mutates_args=(), schema=_schema)
_schema = "(Tensor[] tensors, Tensor factor, str call, bool[] wants) -> Tensor[]"
linear_head_backward = torch.library.custom_op(
    "manymax::linear_head_backward", _run_backward, mutates_args=(), schema=_schema
)


def _forms(tensors: list[Tensor], wants: list[bool], wide: bool) -> Iterator[Tensor]:
    """Tensors without values, of the forms of the gradients that are wanted; in float32 at least if they are wide."""
    for tensor, want in zip(tensors, wants, strict=True):
        if want:
            dtype = torch.float32 if wide and tensor.dtype in HALVES else tensor.dtype
            yield tensor.new_empty(tensor.shape, dtype=dtype)


@linear_head.register_fake
def _(tensors: list[Tensor], call: str, wants: list[bool]) -> list[Tensor]:
    words = Words.of(call)
    input = tensors[words.tensors.index("input")]
    batch = list(input.shape[:-1])
    if words.constants.get("shift"):
        batch[-1] = batch[-1] - 1
    dtype = torch.float32 if input.dtype in HALVES else input.dtype
    kinds = {"argmax": torch.int64, "support": torch.int64, "correct": torch.bool}
    rows = words.reduction == "none"
    stats = [input.new_empty(batch, dtype=kinds.get(name, dtype)) for name in words.stats]
    grads = () if rows else _forms(tensors, wants, wide=True)
    return [input.new_empty(batch if rows else (), dtype=dtype), *stats, *grads]


@linear_head_backward.register_fake
def _(tensors: list[Tensor], factor: Tensor, call: str, wants: list[bool]) -> list[Tensor]:
    return list(_forms(tensors, wants, wide=False))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Keep what the backward needs: the finished gradients, or for losses of rows the arguments."""
    tensors, ctx.call, wants = inputs
    words = Words.of(ctx.call)
    ctx.wants, ctx.dtypes = list(wants), [tensor.dtype for tensor in tensors]
    ctx.save_for_backward(*(tensors if words.reduction == "none" else output[1 + len(words.stats) :]))


def _backward(ctx: Any, grads: Any) -> tuple[Any, ...]:
    """The gradients times the factor from above, which is that of the loss alone."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise ManymaxError(
            "a head has no second derivatives: `create_graph=True` needs the plain loss on the table of scores."
        )
    factor = grads[0]
    if Words.of(ctx.call).reduction == "none":
        tensors = list(ctx.saved_tensors)
        found = torch.ops.manymax.linear_head_backward(tensors, factor, ctx.call, ctx.wants)
    else:
        found = [grad * factor for grad in ctx.saved_tensors]
    wanted = iter(found)
    each = zip(ctx.wants, ctx.dtypes, strict=True)
    return [next(wanted).to(dtype) if want else None for want, dtype in each], None, None


linear_head.register_autograd(_backward, setup_context=_keep)
