"""Language models of transformers that train through a head, without logits: `attach(model, head)`."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from manymax.engine.linear import HeadCall
from manymax.engine.ranks import Shards
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.heads.modules import KernelHead
from manymax.integrations.logit_checks import LogitCheck, LogitScoring, intercepted, nothing, one_input
from manymax.ops.checks import full_precision
from manymax.ops.eager import outside_of_graphs

__all__ = ["LogProbabilities", "attach", "detach"]

IGNORED = -100  # the label of positions that do not count, in all of transformers
HEAD = "manymax_head"  # the submodule of the model that is its head: its parameters are trained and saved with it
ATTACHMENT = "_manymax_attachment"
# Arguments that a call may have although the signature of the model's forward does not name them.
APART = ("num_items_in_batch", "shift_labels", "return_dict")

# Keywords of heads that would make the loss another one than that of the model's logits, and what to do instead.
FIXED: Mapping[str, tuple[Any, str]] = {
    "normalize": (False, "the logits of the model are no cosines, and text would be generated from other scores"),
    "reduction": ("mean", "transformers trains on means"),
    "ignore_index": (IGNORED, "transformers marks labels that do not count by -100"),
    "shift": (False, "it is found out from the model's own loss"),
    "stats": ((), "outputs of a model have no place for them"),
}


def attach(model: Any, head: KernelHead, *, example: Mapping[str, Any] | None = None, eval_logits: bool = False) -> Any:
    """Train a causal or masked language model of transformers through a head, which never makes its logits.

    From then on `model(..., labels=labels)` returns the head's loss of the hidden states, with `logits` None, and
    everything else is as before: without labels the model returns its logits, and so it generates. Its output layer,
    tied to the embedding or not, stays where it is and holds the class vectors.

    What the model does to its logits, such as the soft cap of Gemma 2 or the logit scale of Cohere, is read from its
    configuration and becomes the `softcap` and the `temperature` of the head. Then it is verified, on two rows of eight
    tokens: the model's logits must be the head's scores, and its own loss their cross entropy. A model of which that
    does not hold is refused, and left as it was.

    Args:
        model: a `PreTrainedModel` with an output layer, such as an `AutoModelForCausalLM` or an
            `AutoModelForMaskedLM`. Attach before it is handed to a `Trainer`, and to each model anew after
            `from_pretrained`.
        head: a head without class vectors of its own, `LinearSoftmaxLoss(None, num_classes)`, with as many classes as
            the output layer has rows. Its parameters and buffers, if it has any, become part of the model.
        example: a tiny batch of keyword arguments, for a model that needs more than `input_ids`.
        eval_logits: whether a model that is not training returns logits beside the loss, for metrics of a `Trainer`
            that need them.

    Returns:
        The model.

    Example:
        >>> import manymax
        >>> from manymax.integrations.huggingface import attach
        >>> from transformers import LlamaConfig, LlamaForCausalLM  # doctest: +SKIP
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32_000))  # doctest: +SKIP
        >>> model = attach(model, manymax.LinearSoftmaxLoss(None, 32_000))  # doctest: +SKIP
        >>> model(input_ids=ids, labels=ids).loss.backward()  # doctest: +SKIP
    """
    if ATTACHMENT in vars(model):
        raise ArgumentError("`model` has a head already: call `detach(model)` first.")
    layer = _output_layer(model)
    _check_head(head, layer)
    forward = model.forward
    check = LogitCheck(model, forward, layer, example)
    scoring = check.scoring()
    shift = check.shift(scoring)
    check.compare(scoring)
    _set_scoring(head, scoring)
    vars(model)[ATTACHMENT] = Attachment(model, shift, eval_logits)
    model.add_module(HEAD, head)
    # With a signature and without `__wrapped__`: Trainer reads the names of a model's arguments, and accelerate, when
    # it takes its own wrappers off, would take off all that has the latter.
    call = _forward_for(inspect.signature(forward))
    vars(model)["forward"] = MethodType(call, model)
    # Trainer then says how many labels all accumulated batches have, whatever the architecture does with it.
    model.accepts_loss_kwargs = True
    return model


def detach(model: Any) -> Any:
    """Give a model its own loss back; the head is no longer part of it. Returns the model."""
    attachment = vars(model).pop(ATTACHMENT, None)
    if attachment is None:
        raise ArgumentError("`model` has no head: `attach` comes before `detach`.")
    delattr(model, HEAD)
    for name, before in attachment.before.items():
        vars(model).pop(name, None)
        if before is not None:
            vars(model)[name] = before
    return model


class LogProbabilities:
    """A logits processor with which `generate` draws from the probabilities of a head, such as those of a sparse map.

    Scores s become log p(s), -inf where the map gives a zero: what is drawn is never from the tail that it cuts off.

    Args:
        head: a head whose map needs no label.

    Example:
        >>> import torch, manymax
        >>> processor = LogProbabilities(manymax.LinearSparsemaxLoss(None, 3))
        >>> processor(None, torch.tensor([[0.5, 0.5, -2.0]])).exp()
        tensor([[0.5000, 0.5000, 0.0000]])
        >>> text = model.generate(ids, do_sample=True, logits_processor=[processor])  # doctest: +SKIP
    """

    def __init__(self, head: KernelHead) -> None:
        if head.member.map is None or head.member.needs_label:
            reason = "has no map" if head.member.map is None else "has a map that depends on the label"
            raise ArgumentError(f"`head` gives no probabilities to draw from: {head.member.name} {reason}.")
        self.head = head

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        """log p (..., C) of scores (..., C); what stands before is not looked at."""
        return self.head.member.needed("map")(scores.float(), **self.head.settings()).log()


class Attachment:
    """What stands between a model and its loss: the call of the model's own forward, and that of the head.

    model: the model. shift: whether position t predicts the label of t + 1. eval_logits: as in `attach`.
    before: what the attributes of the model were that `attach` replaces; None for those of its class.
    """

    def __init__(self, model: Any, shift: bool, eval_logits: bool) -> None:
        self.model, self.shift, self.eval_logits = model, shift, eval_logits
        self.before = {name: vars(model).get(name) for name in ("forward", "accepts_loss_kwargs")}

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        made = memo[id(self)] = Attachment.__new__(Attachment)
        vars(made).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return made

    def __getstate__(self) -> Any:
        raise ArgumentError(
            "a model with a head cannot be pickled: its weights are saved by `save_pretrained` or `state_dict`, and the"
            " head is attached again after loading. Or call `detach(model)` first."
        )

    def __call__(self, arguments: dict[str, Any]) -> Any:
        """The outputs of a call of the model, by the names of its arguments."""
        model, own = self.model, self.before["forward"] or partial(type(self.model).forward, self.model)
        labels = arguments.pop("labels", None)
        if labels is None:
            if arguments.get("num_items_in_batch") is not None:
                raise ArgumentError(
                    "`labels` were taken away before the model was called, to compute another loss than the head's."
                    " Without `label_smoothing_factor` and `compute_loss_func` a Trainer leaves them; a head has"
                    " `label_smoothing`."
                )
            return own(**arguments)
        num_items, shifted = arguments.pop("num_items_in_batch", None), arguments.pop("shift_labels", None)
        as_dict = arguments.pop("return_dict", None)
        layer = _output_layer(model)
        answer = nothing
        if self.eval_logits and not model.training:
            answer = partial(linear, weight=layer.weight, bias=layer.bias)
        with intercepted(layer, answer) as inputs:
            outputs = own(**arguments, return_dict=True)
        hidden = one_input(inputs, type(model).__name__)
        if self.shift:
            # The last position predicts nothing, which costs nothing: rows without a positive are not computed.
            labels = pad(labels, (0, 1), value=IGNORED)[..., 1:] if shifted is None else shifted
        loss = _loss(getattr(model, HEAD), hidden, layer, labels, num_items)
        rest = {name: value for name, value in outputs.items() if name != "logits" or value.shape[-1] > 0}
        outputs = type(outputs)(loss=loss, **rest)
        as_dict = model.config.return_dict if as_dict is None else as_dict
        return outputs if as_dict else outputs.to_tuple()


@outside_of_graphs
def _loss(head: KernelHead, hidden: Tensor, layer: nn.Linear, labels: Tensor, num_items: Any) -> Tensor:
    """The head's loss of hidden states (B, T, d) and labels (B, T), by the class vectors of the output layer."""
    if layer.out_features != head.num_classes:
        raise ArgumentError(
            f"`model` had {head.num_classes} tokens when its head was attached, and now has {layer.out_features}:"
            " resize it first, then attach."
        )
    hidden, labels = hidden.to(layer.weight.device), labels.to(layer.weight.device)
    bias = LogitScoring(head.scoring()["temperature"]).bias(layer)
    call: HeadCall = head.read(hidden, layer.weight, bias, labels, Shards((head.num_classes,)), num_items=num_items)
    with full_precision(hidden):
        loss: Tensor = head.compute(call)
    return loss


def _forward_for(signature: inspect.Signature) -> Callable[..., Any]:
    """A method with the signature of a model's forward that goes through the model's attachment."""
    variable = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]

    def forward(self: Any, *positional: Any, **named: Any) -> Any:
        bound = signature.bind(*positional, **{name: value for name, value in named.items() if name not in APART})
        arguments: dict[str, Any] = dict(bound.arguments)
        for name in variable:
            arguments.update(arguments.pop(name, None) or {})
        arguments.update((name, named[name]) for name in APART if name in named)
        return vars(self)[ATTACHMENT](arguments)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    vars(forward)["__signature__"] = signature.replace(parameters=[own, *signature.parameters.values()])
    return forward


def _output_layer(model: Any) -> nn.Linear:
    """The output layer of a model; an error if it has none that a head can stand for."""
    if not hasattr(model, "get_output_embeddings") or not hasattr(model, "config"):
        raise ArgumentTypeError(f"`model` must be a language model of transformers; got {type(model).__name__}.")
    if model.config.is_encoder_decoder:
        raise ArgumentError(
            f"`model` must be a causal or a masked language model; {type(model).__name__} is an encoder with a decoder,"
            " which makes its inputs from the labels."
        )
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise ArgumentTypeError(
            f"`model` must have an nn.Linear as its output layer; that of {type(model).__name__} is"
            f" {type(layer).__name__}."
        )
    if layer.weight.is_meta or not layer.weight.is_floating_point():
        raise ArgumentError("the output layer of `model` must be in memory, and neither quantised nor offloaded.")
    return layer


def _check_head(head: Any, layer: nn.Linear) -> None:
    """Raise unless a head can take the place of an output layer and its loss."""
    if not isinstance(head, KernelHead):
        raise ArgumentTypeError(
            f"`head` must be a linear head of manymax that computes from given class vectors; got"
            f" {type(head).__name__}."
        )
    if head.linear is not None:
        raise ArgumentError("`head` must use the class vectors of the model: build it with `in_features=None`.")
    if head.num_classes != layer.out_features:
        raise ArgumentError(
            f"`head` must have as many classes as the output layer of the model, {layer.out_features}; got"
            f" {head.num_classes}."
        )
    for name, (value, why) in FIXED.items():
        if name in head.keywords and getattr(head, name) != value:
            raise ArgumentError(f"`head` must have {name}={value!r}; got {getattr(head, name)!r}: {why}.")


def _set_scoring(head: KernelHead, scoring: LogitScoring) -> None:
    """Give a head the temperature and the cap of a model; an error if it has others already."""
    wanted = {"temperature": scoring.temperature, "softcap": scoring.softcap}
    for name, plain in (("temperature", 1.0), ("softcap", None)):
        given = getattr(head, name, plain)
        number = given.item() if isinstance(given, torch.Tensor) else given
        if isinstance(given, nn.Parameter) or not (number == plain or _equal(number, wanted[name])):
            raise ArgumentError(
                f"`head` must have the {name} of the model, {wanted[name]}; got {given!r}. Leave it out: it is read"
                " from the model."
            )
    for name, value in wanted.items():
        if getattr(head, name, value) != value:
            setattr(head, name, value)


def _equal(first: float | None, second: float | None) -> bool:
    """Whether two numbers are equal but for rounding; None equals None alone."""
    if first is None or second is None:
        return first is second
    return math.isclose(first, second, rel_tol=1e-6)
