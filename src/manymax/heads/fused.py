"""A head that updates its own class vectors in the backward, so that their gradient never exists as a whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from manymax.engine.fused import fused_loss
from manymax.engine.head import LinearHead
from manymax.engine.linear import HeadCall
from manymax.engine.ranks import Shards
from manymax.engine.table_updates import EPS, NEAREST, OPTIMIZERS, STOCHASTIC, TableUpdates, UpdateRates, check_rate
from manymax.engine.target import SoftTarget, Target, negative_weights
from manymax.errors import ArgumentError, check_choice
from manymax.ops.arguments import checked
from manymax.ops.checks import full_precision
from manymax.ops.eager import outside_of_graphs


class FusedHead(nn.Module):
    """A head whose `loss.backward()` is also the optimiser's step for its class vectors; made by `head.fused(...)`.

    With millions of classes it is the gradient of the class vectors, and what an optimiser makes of it, that does not
    fit into memory. Here the gradient of some thousand classes exists at a time, and is used up by their update before
    that of the next ones is computed. The queries get their gradient as ever, that at the class vectors before the
    update, and the rest of the model has an optimiser of its own.

    The steps are those of `torch.optim.SGD`, `Adagrad` or `Adam` for softmax, whose gradient has all classes; for
    sparse members those of `torch.optim.SGD`, `Adagrad` or `SparseAdam` on row-sparse gradients: classes that a step
    does not touch stay as they are, and so does their state.

    There is one backward per forward, and it comes before the next forward. Without gradients (`torch.no_grad()`) and
    in evaluation mode nothing is updated. Everything that a resumed run needs is in the state dict; `fused.head` is the
    head, whose state dict has the class vectors alone.

    Args:
        head: with class vectors of its own.
        optimizer: "sgd", "adagrad" or "adam".
        lr: the learning rate; the attribute `lr` may be changed between steps.
        weight_decay: this times the weights is added to their gradient; for softmax alone, whose steps move all rows.
        betas, eps: as in torch.optim; `eps=None` is the default of the optimiser there.
        rounding: how updates are rounded to class vectors in bfloat16: "stochastic", up or down at random, which is the
            default; "kahan", which keeps what rounding takes away in a second bfloat16 table; or "nearest", which loses
            small updates.
        seed: of the random numbers of "stochastic", which follow from it and the number of the step.

    Example:
        >>> import torch, manymax
        >>> head = manymax.LinearSoftmaxLoss(4, 1000).fused("adagrad", lr=0.1)
        >>> queries, target = torch.ones(2, 4, requires_grad=True), torch.tensor([3, 7])
        >>> before = head(queries, target)
        >>> before.backward()  # updates the class vectors
        >>> bool(head(queries, target) < before), queries.grad.shape, head.head.linear.weight.grad
        (True, torch.Size([2, 4]), None)

    References:
        Lv et al., Full parameter fine-tuning for large language models with limited resources, 2023 (updates within the
        backward); Gupta et al., Deep learning with limited numerical precision, 2015 (stochastic rounding).
    """

    @checked
    def __init__(
        self,
        head: LinearHead,
        optimizer: str = "adam",
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float | None = None,
        rounding: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if head.linear is None:
            raise ArgumentError("`fused` needs a head with class vectors of its own: give `in_features`.")
        check_choice("optimizer", optimizer, OPTIMIZERS)
        self.rates = UpdateRates(lr, weight_decay, betas, EPS[optimizer] if eps is None else eps)
        self.head, self.kernel = head, head.member.needed("kernel")(**head.settings())
        self._check_head(head)
        if rounding is None:
            rounding = STOCHASTIC if head.linear.weight.dtype == torch.bfloat16 else NEAREST
        self.updates = nn.ModuleDict()
        for name, table in head.linear.named_parameters():
            # No optimiser of the model is to move them, and no head is to compute their gradient.
            table.requires_grad_(False)
            own = rounding if table.dtype == torch.bfloat16 else NEAREST
            self.updates[name] = TableUpdates(table, optimizer, self.all_rows, own, seed)
        if rounding != NEAREST and head.linear.weight.dtype != torch.bfloat16:
            raise ArgumentError(
                f"`rounding` {rounding!r} is for class vectors in bfloat16; these are {head.linear.weight.dtype}."
            )

    @property
    def all_rows(self) -> bool:
        """Whether a step moves all classes, and not those alone that the gradient touches."""
        return self.kernel.moved is not None

    @property
    def _tables(self) -> dict[str, TableUpdates]:
        """The state of each table of the head, "weight" and "bias"."""
        return {name: updates for name, updates in self.updates.items() if isinstance(updates, TableUpdates)}

    @property
    def lr(self) -> float:
        """The learning rate of the next backward."""
        return self.rates.lr

    @lr.setter
    def lr(self, value: float) -> None:
        check_rate("lr", value)
        self.rates = replace(self.rates, lr=value)

    def _check_head(self, head: LinearHead) -> None:
        """Refuse heads whose gradient cannot be taken some classes at a time, and keywords that prevent it."""
        name = head.member.name
        if not (self.all_rows or head.member.sparse):
            raise ArgumentError(
                f"`fused` has no way for {name}: its gradient has all classes, and needs more of a row than sums that"
                " blocks of classes add to. Take an optimiser of torch."
            )
        if self.kernel.setting is not None and self.kernel.setting.requires_grad:
            raise ArgumentError(f"`fused` has no gradient in a setting of {name} that is learned: give it a number.")
        if not self.all_rows and self.rates.weight_decay:
            raise ArgumentError(f"`weight_decay` must be 0 for {name}, whose steps move the touched classes alone.")
        given = {name: getattr(head, name, None) for name in ("stats", "decoupled", "label_smoothing")}
        refused = ("stats", "decoupled") if self.all_rows else ("stats", "decoupled", "label_smoothing")
        for keyword in refused:
            if given[keyword]:
                raise ArgumentError(f"`{keyword}` cannot be computed by a fused head of {name}: leave it out.")
        if negative_weights(getattr(head, "weight", None)):
            raise ArgumentError("`weight` must not be negative for a fused head.")

    @outside_of_graphs
    def forward(self, input: Tensor, target: Tensor | Target | SoftTarget, **per_call: Any) -> Any:
        """The loss of queries (..., d), whose backward updates the class vectors; keywords as in the head's call."""
        if not (torch.is_grad_enabled() and self.training):
            return self.head(input, target, **per_call)
        vectors, bias = self.head.vectors(None)
        call = self.head.read(input, vectors, bias, target, Shards((self.head.num_classes,)), **per_call)
        self._check_call(call)
        with full_precision(input):
            return fused_loss(call, self.kernel, self._begin, self._update)

    def _check_call(self, call: HeadCall) -> None:
        if call.hit is not None:
            raise ArgumentError(
                "`exclude` lists a positive of a row with several, whose sums a fused head has not: pass one row for"
                " each positive."
            )

    def _begin(self) -> None:
        """A new step of all tables."""
        for updates in self._tables.values():
            updates.step += 1

    def _update(self, rows: slice | Tensor, vectors: Tensor, bias: Tensor | None, part: int) -> None:
        """Update some classes by their gradients; `part` numbers the parts of a step."""
        assert self.head.linear is not None
        grads = {"weight": vectors, "bias": bias}
        for name, table in self.head.linear.named_parameters():
            grad = grads[name]
            if grad is not None:
                self._tables[name].update(table, rows, grad, self.rates, part)

    def scores(self, input: Tensor) -> Tensor:
        """The scores of all classes, (..., C), without gradients."""
        return self.head.scores(input)

    def topk(self, input: Tensor, k: int, exclude: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Scores and ids of the k best classes of each query, (..., k) each; see `linear_topk`."""
        return self.head.topk(input, k, exclude=exclude)

    def extra_repr(self) -> str:
        """What the printed module shows."""
        return f"lr={self.lr:g}"
