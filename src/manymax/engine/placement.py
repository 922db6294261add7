"""Tensors that are spread over ranks by torch (DTensor): refused in words where a head computes on one process."""

from __future__ import annotations

import sys
from typing import Any

from manymax.errors import ArgumentTypeError

MODULE = "torch.distributed.tensor"  # loaded by whoever has made such a tensor, and by nobody else


def is_distributed(value: object) -> bool:
    """Whether a value is a DTensor."""
    module: Any = sys.modules.get(MODULE)
    return module is not None and isinstance(value, module.DTensor)


def refuse_distributed(**arguments: Any) -> None:
    """Raise for a DTensor, whose parts on other ranks a head does not see."""
    for name, value in arguments.items():
        if not is_distributed(value):
            continue
        if name == "linear_weight":
            raise ArgumentTypeError(
                f"`linear_weight` is a DTensor with the placements {value.placements}, of which a head sees the part of"
                " its own rank alone. One that is sharded on dimension 0 belongs to"
                " `manymax.distributed.ShardedHead`, which takes it as its shard; of a replicated one pass"
                " `linear_weight.to_local()`. Under `fully_shard` wrap the head or the model around it, and not the"
                " head's `linear`, whose forward is never called."
            )
        raise ArgumentTypeError(
            f"`{name}` is a DTensor with the placements {value.placements}; a head takes the tensor of its own process:"
            f" pass `{name}.to_local()`, or `{name}.full_tensor()` where every rank needs all of it."
        )
