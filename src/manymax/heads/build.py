"""From the record of a member to the class of its head."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor

import manymax.heads.modules as modules
from manymax.engine.member import Member
from manymax.engine.options import HeadOptions
from manymax.engine.target import Target
from manymax.heads.modules import LinearHead, LinearNCELoss, SampledHead
from manymax.heads.sampled import linear_drawn_loss
from manymax.members.hierarchical_softmax.loss import HierarchicalSoftmaxLoss
from manymax.ops.tree import HuffmanTree
from manymax.samplers.base import Draw, Sampler


def head_class(member: Member) -> type[LinearHead]:
    """The class of the head of a member of the family, or of a reference."""
    if member.kind == "tree":
        return cast(type[LinearHead], LinearHierarchicalSoftmaxLoss)
    made: type[LinearHead] | None = getattr(modules, f"Linear{member.class_name}Loss", None)
    if made is None:
        return _built(member)
    if issubclass(made, LinearNCELoss):
        return _NCE
    if member.kind == "exact":
        made.honours = frozenset(each.name for each in fields(HeadOptions))
    return made


class LinearHierarchicalSoftmaxLoss(HierarchicalSoftmaxLoss):
    """Hierarchical softmax with the constructor of the other heads."""

    honours: frozenset[str] = frozenset()

    def __init__(self, in_features: int, num_classes: int, *, tree: Any = None, **options: Any) -> None:
        super().__init__(in_features, HuffmanTree(torch.ones(num_classes)) if tree is None else tree, **options)


class _NCE(LinearNCELoss):
    """NCE that starts at log Z0 = log C."""

    def __init__(self, in_features: int | None, num_classes: int, *given: Any, **options: Any) -> None:
        if options.get("log_z") is None:
            options["log_z"] = math.log(num_classes)
        super().__init__(in_features, num_classes, *given, **options)


def _built(member: Member) -> type[LinearHead]:
    if member.kind == "sampled":
        return type(f"Linear{member.class_name}Loss", (SampledHead,), {"function": staticmethod(_drawn(member.loss))})

    class Head(modules._ExactHead):
        honours = frozenset({"matmul", "compiled"})
        function = staticmethod(_dense(member.loss))

        def __init__(self, in_features: int | None, num_classes: int, **options: Any) -> None:
            self._own = {s.name: options.pop(s.name) for s in member.settings if s.name in options}
            super().__init__(in_features, num_classes, **options)

        def settings(self) -> dict[str, Any]:
            return self._own

    return Head


def _dense(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def linear_loss(
        input: Tensor, vectors: Tensor, target: Any, *, linear_bias: Any = None, options: Any = None, **more: Any
    ) -> Tensor:
        ids = target.ids.where(target.weights != 0, -100) if isinstance(target, Target) else target  # type: ignore[union-attr]
        return loss(input @ vectors.T, ids, **more)

    return linear_loss


def _drawn(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def of_draw(positive: Tensor, negative: Tensor, draw: Draw, classes: Tensor) -> Tensor:
        return loss(positive, negative)

    def linear_loss(
        input: Tensor,
        vectors: Tensor,
        target: Tensor | Target,
        sampler: Sampler,
        num_negatives: int | None,
        **more: Any,
    ) -> Tensor:
        return linear_drawn_loss(of_draw, input, vectors, target, sampler, num_negatives, **more)

    return linear_loss
