"""Heads: from queries and class vectors to a loss, in blocks, without the (rows, classes) table of scores.

Every entry of `FAMILY` and `REFERENCE_LOSSES` has a function, `linear_<name>_loss`, and a module, `Linear<Name>Loss`.
They are built from the entry by `head_function` and `head_class`, which take a member of your own as well.
"""

from typing import Any

from manymax.engine.head import LinearHead
from manymax.engine.options import HeadOptions
from manymax.engine.ranking import linear_scores, linear_topk
from manymax.engine.row_target import group_pairs
from manymax.heads.build import class_name, function_name, head_class, head_function
from manymax.members import FAMILY, REFERENCE_LOSSES

# Built and not written out, so that a new member has a head without another file. Editors and type checkers, which do
# not run this loop, read `__init__.pyi` beside this file; `heads/stub.py` writes it.
_built: dict[str, Any] = {}
for _member in (*FAMILY.values(), *REFERENCE_LOSSES.values()):
    _built[function_name(_member)] = head_function(_member)
    _built[class_name(_member)] = head_class(_member)
globals().update(_built)


__all__ = [
    "HeadOptions",
    "LinearHead",
    "group_pairs",
    "head_class",
    "head_function",
    "linear_scores",
    "linear_topk",
    *_built,
]
