"""The modules of heads by their kind: what `manymax.heads.build` makes a member's head from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from manymax.engine.drawn import DrawSettings, check_sampler, sampled_loss
from manymax.engine.head import LinearHead
from manymax.engine.linear import HeadCall, exact_loss, quadratic_loss, read_call
from manymax.engine.member import Setting
from manymax.engine.options import EXACT_KEYWORDS, SAMPLED_KEYWORDS, Keywords, read_keywords
from manymax.engine.ranks import Shards
from manymax.engine.target import Target
from manymax.ops.checks import full_precision
from manymax.samplers.base import Sampler
from manymax.samplers.uniform import UniformSampler


class KernelHead(LinearHead):
    """A head that computes by its member's kernel. Keywords and settings are attributes, like those of torch's losses.

    `learnable=True` makes a setting that can be learned a parameter.
    """

    keywords: ClassVar[tuple[str, ...]]  # those of the shared keywords that it takes
    honours_why: ClassVar[str] = ""  # why other options have no effect
    about: ClassVar[str] = ""  # a sentence of documentation on how gradients come about
    weight: Tensor | None

    def __init__(
        self,
        in_features: int | None,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **given: Any,
    ) -> None:
        super().__init__(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        learnable = bool(given.pop("learnable", False))
        for setting in self.member.settings:
            self._keep(setting, given.pop(setting.name, None), learnable)
        read = read_keywords(given, num_classes, self.honours, self.honours_why)
        self.member.takes.check(self.member.name, None, read.label_smoothing)
        for name in self.keywords:
            if name == "weight":
                self.register_buffer("weight", read.weight)
            else:
                setattr(self, name, getattr(read, name))

    def _keep(self, setting: Setting, value: Any, learnable: bool) -> None:
        """A setting as an attribute, or as a parameter if it is to be learned."""
        value = setting.value(value, self.num_classes)
        if setting.learned is None or not learnable:
            setattr(self, _fixed(setting), value)
            return
        owner: nn.Module = self
        *path, name = setting.learned.key.split(".")
        for part in path:
            owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(name, nn.Parameter(torch.tensor(setting.learned.raw(value))))

    def settings(self) -> dict[str, Any]:
        """The member's own settings, as keyword arguments of its kernel."""
        return {setting.name: getattr(self, setting.name) for setting in self.member.settings}

    @property
    def ranking_key(self) -> Callable[[Tensor], Tensor] | None:
        """From scores to what classes are ranked by; None where that is the scores."""
        return None if self.member.ranking_key is None else self.member.ranking_key(**self.settings())

    def read(
        self, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor | Target, shards: Shards
    ) -> HeadCall:
        """A call with the class vectors of one rank, read and checked there."""
        keywords = Keywords(**{name: getattr(self, name) for name in self.keywords})
        return read_call(self.member, input, linear_weight, linear_bias, target, keywords, shards)

    def forward(self, input: Tensor, target: Tensor | Target, linear_weight: Tensor | None = None) -> Tensor:
        """The loss of queries (..., d); `linear_weight` (C, d) replaces the head's own class vectors."""
        vectors, bias = self.vectors(linear_weight)
        call = self.read(input, vectors, bias, target, Shards((self.num_classes,)))
        with full_precision(input):
            return self.compute(call)

    def extra_repr(self) -> str:
        """What the printed module shows."""
        settings = "".join(f", {name}={_shown(value)}" for name, value in self.settings().items())
        return f"{super().extra_repr()}{settings}"


def _fixed(setting: Setting) -> str:
    """The attribute of a setting that is not learned: its name, unless a property of that name tells the two apart."""
    return setting.name if setting.learned is None or setting.learned.key == setting.name else f"_{setting.name}"


def _shown(value: Any) -> str:
    return f"{float(value.detach()):.4g}" if isinstance(value, Tensor) else repr(value)


def learned_property(setting: Setting) -> property:
    """The value of a setting whose parameter is kept under another name."""
    learned = setting.learned
    assert learned is not None

    def value(self: KernelHead) -> Any:
        """The number, or the tensor that is learned."""
        parameter = dict(self.named_parameters()).get(learned.key)
        return getattr(self, _fixed(setting)) if parameter is None else learned.value(parameter)

    return property(value)


class ExactHead(KernelHead):
    """A head that sees all scores, in blocks."""

    keywords = EXACT_KEYWORDS
    about = (
        'Gradients are computed in the forward, block by block, for "mean" and "sum"; there are no second derivatives.'
    )

    def compute(self, call: HeadCall) -> Tensor:
        """The loss of a call, the same on every rank."""
        return exact_loss(self.member, call, self.settings())


class QuadraticHead(KernelHead):
    """A head that needs moments of the class vectors, and no scores."""

    keywords = EXACT_KEYWORDS
    about = "No score but those of the positives is computed, and second derivatives exist."
    honours = frozenset({"retain_graph"})  # which autograd does by itself
    honours_why = "it has no blocks of scores, and its gradient touches all class vectors"

    def compute(self, call: HeadCall) -> Tensor:
        """The loss of a call, the same on every rank."""
        return quadratic_loss(self.member, call, self.settings())


class SampledHead(KernelHead):
    """A head that draws negatives."""

    keywords = SAMPLED_KEYWORDS
    about = "A step touches the drawn class vectors alone; there are no second derivatives."
    honours = frozenset({"sparse_grad", "retain_graph"})
    honours_why = "it computes the scores that it draws and no blocks of them"

    def __init__(
        self,
        in_features: int | None,
        num_classes: int,
        sampler: Sampler | None = None,
        num_negatives: int | None = 100,
        **given: Any,
    ) -> None:
        super().__init__(in_features, num_classes, **given)
        self.sampler = UniformSampler(num_classes) if sampler is None else sampler
        check_sampler(self.sampler, num_classes)
        if self.member.check is not None:
            self.member.check(num_negatives=num_negatives, **self.settings())
        self.num_negatives = num_negatives

    def compute(self, call: HeadCall) -> Tensor:
        """The loss of a call with fresh negatives, the same on every rank."""
        return sampled_loss(self.member, call, self.settings(), DrawSettings(self.sampler, self.num_negatives))
