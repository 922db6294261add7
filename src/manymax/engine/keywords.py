"""The keywords that heads share: what each means, which kinds of heads take it, and how it is read and checked.

They are read once, where a caller gives them, into a frozen object that travels from there to the kernels. A new
keyword is a new field of `Keywords`: signatures, constructors and checks follow from it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from manymax.engine.options import ALL_OPTIONS, HeadOptions, read_options
from manymax.engine.target import check_options, check_weight
from manymax.errors import ArgumentError, ArgumentTypeError, check_choice
from manymax.ops.checks import visible

# What a head can tell about each row beside its loss; see `LossResult`.
STATISTICS = ("nll", "log_z", "entropy", "argmax", "correct", "target_prob", "support")


@dataclass(frozen=True)
class Keywords:
    """The keywords that heads share, read and checked. Signatures list them in the order of the fields.

    shared, sparse_grad, generator: of heads that draw negatives: whether all rows share one draw, whether the gradients
        of class vectors and bias are row-sparse, and the source of randomness.
    negatives: of heads that draw negatives: (..., H) ids that are negatives of their row beside the drawn ones.
    pair_ids: of heads that keep averages of training pairs: the number of each positive's pair, shaped like the ids.
    pair_averages: (num_pairs,) of the same: log u of each pair, changed in place; see engine/pair_averages.py.
    normalize: whether queries and class vectors are divided by their norms.
    temperature: what the products of queries and class vectors are divided by.
    softcap: c, for scores c tanh(s / c).
    exclude: (..., E) ids that are left out of the sums of their row.
    decoupled: whether a positive is left out of the sum of its own loss.
    bound: (...) what the scores of each row are compared with, instead of the K-th largest of them.
    weight: (C,) class weights.
    row_weight: (...) a factor of the loss of each row.
    reduction, ignore_index, label_smoothing, multilabel: as in `softmax_loss`.
    num_items: what a mean divides by, instead of the number of positives.
    shift: whether position t of a sequence is to predict the target of position t + 1.
    z_loss: c, for an additional loss of c (log Z)^2.
    stats: names of `STATISTICS` that the result is to hold.
    options: how the head computes.
    """

    shared: bool = False
    sparse_grad: bool = False
    generator: torch.Generator | None = None
    negatives: Tensor | None = None
    pair_ids: Tensor | None = None
    pair_averages: Tensor | None = None
    normalize: bool = False
    temperature: float | Tensor = 1.0
    softcap: float | None = None
    exclude: Tensor | None = None
    decoupled: bool = False
    bound: Tensor | None = None
    weight: Tensor | None = None
    row_weight: Tensor | None = None
    reduction: str = "mean"
    ignore_index: int | None = -100
    label_smoothing: float = 0.0
    multilabel: str = "sum"
    num_items: float | Tensor | None = None
    shift: bool = False
    z_loss: float = 0.0
    stats: tuple[str, ...] = ()
    options: HeadOptions = field(default=HeadOptions())

    @classmethod
    def parameters(cls, names: Iterable[str]) -> list[inspect.Parameter]:
        """The keywords of these names as keyword-only parameters of a signature, in the order of the fields."""
        wanted, found = set(names), []
        for f in fields(cls):
            if f.name in wanted:
                # Callers may leave options out or give a mapping, which become HeadOptions when they are read.
                default, annotation = (None, "Options") if f.name == "options" else (f.default, f.type)
                kind = inspect.Parameter.KEYWORD_ONLY
                found.append(inspect.Parameter(f.name, kind, default=default, annotation=annotation))
        return found

    def given(self) -> list[str]:
        """The names of the keywords whose values are not the defaults."""
        # Tensors are never a default, and must not be compared with one.
        values = ((f.name, getattr(self, f.name), f.default) for f in fields(self) if f.name != "options")
        return [name for name, value, default in values if isinstance(value, Tensor) or value != default]


# Keywords that hold something about each row of a batch: a module takes them in its call, others when it is built.
# Averages of pairs are a buffer of the module as well, if it is built for a number of pairs.
PER_CALL = ("negatives", "pair_ids", "pair_averages", "exclude", "bound", "row_weight", "num_items")
# The keywords of a head by its kind. One that makes no sense for a kind is not in its signature: an exact head draws
# nothing, and label smoothing would make every class a positive of a sampled head, with negatives of its own.
DRAWING = ("shared", "sparse_grad", "generator", "negatives", "pair_ids", "pair_averages")
EXACT_KEYWORDS = tuple(f.name for f in fields(Keywords) if f.name not in DRAWING)
SAMPLED_KEYWORDS = tuple(f.name for f in fields(Keywords) if f.name not in ("label_smoothing", "bound"))


def read_keywords(
    given: Mapping[str, Any], num_classes: int, honoured: frozenset[str] = ALL_OPTIONS, why: str = ""
) -> Keywords:
    """The keywords of a call over `num_classes` classes, checked; `honoured` and `why` as in `read_options`."""
    keywords = Keywords(**{**given, "options": read_options(given.get("options"), honoured, why)})
    check_options(keywords.reduction, keywords.label_smoothing, keywords.multilabel)
    check_weight(keywords.weight, num_classes)
    read_scoring(keywords.normalize, keywords.temperature, keywords.softcap)
    if not (_is_number(keywords.z_loss) and 0 <= keywords.z_loss < math.inf):
        raise ArgumentError(f"`z_loss` must be a number of at least 0; got {keywords.z_loss!r}.")
    named: str | Iterable[str] = given.get("stats", ())
    stats = (named,) if isinstance(named, str) else tuple(named)
    for name in stats:
        check_choice("stats", name, STATISTICS)
    # Sampled heads take it as a keyword and as an option; it means the same.
    sparse = keywords.sparse_grad or keywords.options.sparse_grad
    return replace(keywords, stats=stats, sparse_grad=sparse)


def read_scoring(normalize: bool, temperature: float | Tensor, softcap: float | None) -> Keywords:
    """The keywords of scores alone, checked."""
    _check_temperature(temperature)
    if softcap is not None and not (_is_number(softcap) and 0 < softcap < math.inf):
        raise ArgumentError(f"`softcap` must be a positive number, or None for no cap; got {softcap!r}.")
    return Keywords(normalize=normalize, temperature=temperature, softcap=softcap)


def check_num_items(num_items: float | Tensor | None, reduction: str) -> None:
    """Raise unless `num_items` is None, or a positive number for a mean to divide by."""
    if num_items is None:
        return
    if reduction != "mean":
        raise ArgumentError(f'`num_items` is what a mean divides by, and `reduction` is "{reduction}": leave it out.')
    number = isinstance(num_items, Tensor) and num_items.numel() == 1
    if not number and not _is_number(num_items):
        raise ArgumentTypeError(f"`num_items` must be a number or a tensor with one; got {num_items!r}.")
    if (not isinstance(num_items, Tensor) or visible(num_items)) and not num_items > 0:
        raise ArgumentError(f"`num_items` must be positive; got {float(num_items)}.")


def _check_temperature(temperature: float | Tensor) -> None:
    """Raise unless a temperature is a positive number, or a float tensor with one."""
    if isinstance(temperature, Tensor):
        if temperature.numel() != 1 or not temperature.is_floating_point():
            shape, dtype = tuple(temperature.shape), temperature.dtype
            raise ArgumentTypeError(f"`temperature` must be a float tensor with one number; got {dtype} of {shape}.")
        if not visible(temperature):
            return
    elif not _is_number(temperature):
        raise ArgumentTypeError(f"`temperature` must be a number or a tensor with one; got {temperature!r}.")
    number = float(temperature.detach()) if isinstance(temperature, Tensor) else temperature
    if not 0 < number < math.inf:
        raise ArgumentError(f"`temperature` must be positive and finite; got {number}.")


def _is_number(value: object) -> bool:
    """Whether a value is a number; a bool is an int in Python, but no number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
