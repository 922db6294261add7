"""Writes the stub file `heads/__init__.pyi`: the types of the heads for editors and type checkers.

Those do not run the code that builds the heads. `make docs` writes the file again, and a test fails where it is out of
date.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from manymax.engine.member import Member
from manymax.heads.build import class_name, function_name, head_class, head_function

OPENING = """# Written by `make docs` from the entries of the members.
from collections.abc import Callable

import torch
from torch import Tensor

from manymax.engine.head import LinearHead as LinearHead
from manymax.engine.member import Member
from manymax.engine.options import HeadOptions as HeadOptions
from manymax.engine.options import Options
from manymax.engine.ranking import linear_scores as linear_scores
from manymax.engine.ranking import linear_topk as linear_topk
from manymax.engine.row_target import group_pairs as group_pairs
from manymax.engine.statistics import LossResult as LossResult
from manymax.engine.target import SoftTarget as SoftTarget
from manymax.engine.target import Target
from manymax.heads.fused import FusedHead as FusedHead
from manymax.heads.modules import ExactHead, QuadraticHead, SampledHead
from manymax.ops.tree import ClassTree
from manymax.samplers.base import Sampler

def head_class(member: Member) -> type[LinearHead]: ...
def head_function(member: Member) -> Callable[..., Tensor]: ...
def linear_loss(
    member: str | Member, input: Tensor, linear_weight: Tensor, target: object, *more: object, **given: object
) -> Tensor: ...
"""


def stub(members: Iterable[Member]) -> str:
    """The text of the stub file for some members."""
    rows = list(members)
    functions = [_definition(f"def {function_name(member)}", head_function(member)) for member in rows]
    return "\n".join([OPENING.rstrip(), *functions, "", *map(_class, rows)]) + "\n"


def _class(member: Member) -> str:
    """The stub of a class: its settings as attributes, and its constructor."""
    made = head_class(member)
    base = made.__mro__[1].__name__ if member.head is None else "LinearHead"
    attributes = [f"    {s.name}: {_annotation(made, s.name)}" for s in member.settings]
    if member.head is not None:  # the tree, whose head has vectors of nodes and not of classes
        attributes.append("    node_vectors: Tensor")
    return "\n".join([f"class {class_name(member)}({base}):", *attributes, _constructor(made), ""])


def _annotation(made: type, name: str) -> str:
    """The type of an argument of a class's constructor."""
    return str(inspect.signature(made).parameters[name].annotation)


def _constructor(made: type) -> str:
    """The line of a class's constructor."""
    given = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    parameters = [*given, *inspect.signature(made).parameters.values()]
    return "    " + _signature("def __init__", parameters, "None")


def _definition(opening: str, function: Callable[..., Any]) -> str:
    """The line of a function."""
    return _signature(opening, list(inspect.signature(function).parameters.values()), "Tensor")


def _signature(opening: str, parameters: list[inspect.Parameter], returned: str) -> str:
    """A signature in one line, with a star before the first argument that must be given by name."""
    words, starred = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            words.append("*")
            starred = True
        kind = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        words.append(f"{parameter.name}{kind}{default}")
    return f"{opening}({', '.join(words)}) -> {returned}: ..."
