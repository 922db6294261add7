"""Heads: from queries and class vectors to a loss, in blocks, without the (rows, classes) table of scores.

Every entry of `FAMILY` and `REFERENCE_LOSSES` has a function, `linear_<name>_loss`, and a module, `Linear<Name>Loss`.
They are built from the entry by `head_function` and `head_class`, which take a member of your own as well.
"""

from typing import Any

from torch import Tensor

from manymax.engine.head import LinearHead
from manymax.engine.member import Member
from manymax.engine.options import HeadOptions
from manymax.engine.ranking import linear_scores, linear_topk
from manymax.engine.row_target import group_pairs
from manymax.engine.statistics import LossResult
from manymax.engine.target import SoftTarget
from manymax.heads.build import class_name, function_name, head_class, head_function
from manymax.heads.fused import FusedHead
from manymax.members import FAMILY, REFERENCE_LOSSES
from manymax.ops.arguments import checked

# Built and not written out, so that a new member has a head without another file. Editors and type checkers, which do
# not run this loop, read `__init__.pyi` beside this file; `heads/stub.py` writes it.
_built: dict[str, Any] = {}
for _member in (*FAMILY.values(), *REFERENCE_LOSSES.values()):
    _built[function_name(_member)] = head_function(_member)
    _built[class_name(_member)] = head_class(_member)
globals().update(_built)


@checked
def linear_loss(
    member: str | Member, input: Tensor, linear_weight: Tensor, target: Any, *more: Any, **given: Any
) -> Any:
    """The head of a member that is named by a string: `linear_loss("entmax", ...)` is `linear_entmax_loss(...)`.

    For code that lets its user choose the loss.

    Args:
        member: a name or an alias in `FAMILY`, the name of a reference loss, or a member of your own.
        input, linear_weight, target, more, given: as that head takes them.

    Example:
        >>> import torch, manymax
        >>> manymax.linear_loss("sparsemax", torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([0, 1]))
        tensor(0.3750)
    """
    if isinstance(member, str):
        member = REFERENCE_LOSSES[member] if member in REFERENCE_LOSSES else FAMILY[member]
    head = _built.get(function_name(member)) if member in (*FAMILY.values(), *REFERENCE_LOSSES.values()) else None
    return (head or head_function(member))(input, linear_weight, target, *more, **given)


__all__ = [
    "FusedHead",
    "HeadOptions",
    "LinearHead",
    "LossResult",
    "SoftTarget",
    "group_pairs",
    "head_class",
    "head_function",
    "linear_loss",
    "linear_scores",
    "linear_topk",
    *_built,
]
