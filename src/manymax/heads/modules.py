"""The base classes of heads, one for each kind of member; `manymax.heads.build` makes a member's class from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from manymax.engine.call_keywords import check_keywords
from manymax.engine.drawn import DrawSettings, check_sampler, sampled_loss
from manymax.engine.head import LinearHead
from manymax.engine.keywords import EXACT_KEYWORDS, PER_CALL, SAMPLED_KEYWORDS, Keywords, read_keywords
from manymax.engine.linear import HeadCall, exact_loss, quadratic_loss, read_call
from manymax.engine.member import Setting
from manymax.engine.pair_averages import averages_of, read_num_pairs
from manymax.engine.ranks import Shards
from manymax.engine.target import SoftTarget, Target
from manymax.heads.fused import FusedHead
from manymax.heads.operator import call_in_graph
from manymax.ops.arguments import checked
from manymax.ops.checks import full_precision
from manymax.ops.eager import in_graphs, outside_of_graphs
from manymax.samplers.base import Sampler
from manymax.samplers.checks import check_positive_integer
from manymax.samplers.uniform import UniformSampler


def _node(head: KernelHead, input: Tensor, target: Any, linear_weight: Tensor | None = None, **rows: Any) -> Any:
    """A call of a head in a graph, as a call of the function of the same name."""
    vectors, bias = head.vectors(linear_weight)
    kept = {name: getattr(head, name) for name in head.keywords if name not in PER_CALL}
    tensors = {"input": input, "linear_weight": vectors, "target": target, "linear_bias": bias}
    return call_in_graph(head.graph_key, head.graph_learned, {**tensors, **head.settings(), **kept, **rows})


class KernelHead(LinearHead):
    """A head that computes by its member's kernel. Keywords and settings are attributes, like those of torch's losses.

    With `learnable=True` a setting that can be learned becomes a parameter.
    """

    keywords: ClassVar[tuple[str, ...]]  # which of the shared keywords it takes
    honours_why: ClassVar[str] = ""  # why the other options have no effect, for the error
    about: ClassVar[str] = ""  # a sentence of documentation on how gradients are computed
    graph_key: ClassVar[str | None] = None  # its name in graphs; None for a head that cannot be in one
    graph_learned: ClassVar[frozenset[str]] = frozenset()  # the settings that may be tensors with a gradient there
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
        # Read here, so that a bad keyword fails at construction and not at the first step.
        read = read_keywords(given, num_classes, self.honours, self.honours_why)
        self.member.takes.check(self.member.name, None, read.label_smoothing)
        check_keywords(self.member, read)
        for name in self.keywords:
            value = getattr(read, name)
            if name in PER_CALL:
                continue
            # A buffer moves with `.to(device)` and is in the state dict; `setattr` makes a parameter of a parameter.
            if name == "weight" or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter)):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def _keep(self, setting: Setting, value: Any, learnable: bool) -> None:
        """Keep a setting as an attribute, or as a parameter if it is to be learned."""
        value = setting.value(value, self.num_classes)
        if setting.learned is None or not learnable:
            setattr(self, _fixed(setting), value)
            return
        # A key such as "order.raw_alpha" names a parameter of a submodule: so it is in state dicts of version 0.1.0.
        owner: nn.Module = self
        *path, name = setting.learned.key.split(".")
        for part in path:
            owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(name, nn.Parameter(torch.tensor(setting.learned.raw(value))))

    def settings(self) -> dict[str, Any]:
        """The member's own settings, as keyword arguments of its kernel."""
        return {setting.name: getattr(self, setting.name) for setting in self.member.settings}

    def scoring(self) -> dict[str, Any]:
        """The keywords of how scores follow from queries and class vectors, for `linear_scores` and `linear_topk`."""
        return {name: getattr(self, name) for name in ("normalize", "temperature", "softcap")}

    def sparse_parameters(self) -> list[nn.Parameter]:
        """The parameters of the head whose gradients are row-sparse: class vectors and bias, if it was asked for."""
        # A keyword of heads that draw, for which the option means the same; the option alone of all others.
        asked = self.sparse_grad if "sparse_grad" in self.keywords else getattr(self, "options").sparse_grad  # noqa: B009
        return list(self.linear.parameters()) if asked and self.linear is not None else []

    @property
    def ranking_key(self) -> Callable[[Tensor], Tensor] | None:
        """A function from scores to the numbers that classes are ranked by; None where those are the scores."""
        return None if self.member.ranking_key is None else self.member.ranking_key(**self.settings())

    def read(
        self,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor | Target | SoftTarget,
        shards: Shards,
        **per_call: Any,
    ) -> HeadCall:
        """Read and check a call with the class vectors of one rank, without any exchange."""
        # From the attributes as they are now: they may have been changed since construction, like those of torch's
        # losses.
        kept = {name: getattr(self, name) for name in self.keywords if name not in PER_CALL}
        keywords = Keywords(**kept, **per_call)
        return read_call(self.member, input, linear_weight, linear_bias, target, keywords, shards)

    @in_graphs(_node)
    @checked
    def forward(
        self,
        input: Tensor,
        target: Tensor | Target | SoftTarget,
        linear_weight: Tensor | None = None,
        *,
        exclude: Tensor | None = None,
        bound: Tensor | None = None,
        row_weight: Tensor | None = None,
        num_items: float | Tensor | None = None,
    ) -> Tensor:
        """The loss of queries (..., d); `linear_weight` (C, d) replaces the head's own class vectors.

        The other keywords are those of the function of the same name that hold something about each row.
        """
        rows = {"exclude": exclude, "bound": bound, "row_weight": row_weight, "num_items": num_items}
        return self._call(input, target, linear_weight, **rows)

    def _call(
        self, input: Tensor, target: Tensor | Target | SoftTarget, linear_weight: Tensor | None, **per_call: Any
    ) -> Tensor:
        """The loss on this process, which is the one rank that holds all classes."""
        vectors, bias = self.vectors(linear_weight)
        call = self.read(input, vectors, bias, target, Shards((self.num_classes,)), **per_call)
        with full_precision(input):
            return self.compute(call)

    def extra_repr(self) -> str:
        """What the printed module shows."""
        settings = "".join(f", {name}={_shown(value)}" for name, value in self.settings().items())
        return f"{super().extra_repr()}{settings}"


def _fixed(setting: Setting) -> str:
    """The attribute that keeps a setting that is not learned.

    It has the name of the setting, unless a property of that name (`learned_property`) chooses between it and the
    parameter; then it has an underscore.
    """
    return setting.name if setting.learned is None or setting.learned.key == setting.name else f"_{setting.name}"


def _shown(value: Any) -> str:
    """A setting as the printed module shows it; a learned one by its present value."""
    return f"{float(value.detach()):.4g}" if isinstance(value, Tensor) else repr(value)


def learned_property(setting: Setting) -> property:
    """A property with the value of a setting whose parameter is kept under another name."""
    learned = setting.learned
    assert learned is not None

    def value(self: KernelHead) -> Any:
        """The value of the setting: a number, or a tensor with a gradient if it is learned."""
        parameter = dict(self.named_parameters()).get(learned.key)
        return getattr(self, _fixed(setting)) if parameter is None else learned.value(parameter)

    return property(value)


class ExactHead(KernelHead):
    """A head that sees all scores, in blocks."""

    keywords = EXACT_KEYWORDS
    about = (
        'Gradients are computed in the forward, block by block, for "mean" and "sum". There are no second derivatives.'
    )

    def compute(self, call: HeadCall) -> Any:
        """The loss of a call, the same on every rank: a tensor, or a `LossResult` with `stats`."""
        return exact_loss(self.member, call, self.settings())

    def fused(self, optimizer: str = "adam", lr: float = 1e-3, **more: Any) -> FusedHead:
        """A module around this head whose backward is also the step for its class vectors; see `FusedHead`."""
        return FusedHead(self, optimizer, lr, **more)


class QuadraticHead(KernelHead):
    """A head that needs moments of the class vectors, and only the scores of the positives."""

    keywords = EXACT_KEYWORDS
    about = "Only the scores of the positives are computed, and second derivatives exist."
    honours = frozenset({"retain_graph"})  # accepted for a common interface: autograd keeps its own graph
    honours_why = "it has no blocks of scores, and its gradient touches all class vectors"

    def compute(self, call: HeadCall) -> Tensor:
        """The loss of a call, the same on every rank."""
        return quadratic_loss(self.member, call, self.settings())


class SampledHead(KernelHead):
    """A head that draws negatives."""

    keywords = SAMPLED_KEYWORDS
    about = "A step touches only the drawn class vectors. There are no second derivatives."
    honours = frozenset({"sparse_grad", "retain_graph", "backend", "compiled"})
    honours_why = "it computes the scores of drawn classes only, and no blocks of scores"
    pair_averages: Tensor | None  # (num_pairs,) log u of each training pair, if the head keeps them

    def __init__(
        self,
        in_features: int | None,
        num_classes: int,
        sampler: Sampler | None = None,
        num_negatives: int | None = 100,
        num_pairs: int | None = None,
        **given: Any,
    ) -> None:
        super().__init__(in_features, num_classes, **given)
        keeps = self.member.keeps_pairs(self.settings())
        self.register_buffer("pair_averages", read_num_pairs(num_pairs, keeps, given.get("device")))
        self.sampler = UniformSampler(num_classes) if sampler is None else sampler
        check_sampler(self.sampler, num_classes)
        if num_negatives is not None:  # which samplers do without a number is seen when they draw
            check_positive_integer("num_negatives", num_negatives)
        if self.member.check is not None:
            self.member.check(num_negatives=num_negatives, **self.settings())
        self.num_negatives = num_negatives

    def read(self, *arguments: Any, pair_averages: Tensor | None = None, **per_call: Any) -> HeadCall:
        """Read and check a call, with the head's own averages of pairs unless it is given others."""
        if self.member.keeps_pairs(self.settings()):
            pair_averages = averages_of(self, self.pair_averages if pair_averages is None else pair_averages)
        return super().read(*arguments, pair_averages=pair_averages, **per_call)

    @outside_of_graphs
    @checked
    def forward(
        self,
        input: Tensor,
        target: Tensor | Target | SoftTarget,
        linear_weight: Tensor | None = None,
        *,
        negatives: Tensor | None = None,
        pair_ids: Tensor | None = None,
        pair_averages: Tensor | None = None,
        exclude: Tensor | None = None,
        row_weight: Tensor | None = None,
        num_items: float | Tensor | None = None,
    ) -> Tensor:
        """The loss of queries (..., d); `linear_weight` (C, d) replaces the head's own class vectors.

        `pair_averages` replaces its own. The other keywords are those of the function of the same name that hold
        something about each row.
        """
        rows = {"negatives": negatives, "exclude": exclude, "row_weight": row_weight, "num_items": num_items}
        pairs = {"pair_ids": pair_ids, "pair_averages": pair_averages}
        return self._call(input, target, linear_weight, **rows, **pairs)

    def compute(self, call: HeadCall) -> Tensor:
        """The loss of a call with fresh negatives, the same on every rank."""
        return sampled_loss(self.member, call, self.settings(), DrawSettings(self.sampler, self.num_negatives))
