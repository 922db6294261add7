"""What a language model makes of its output layer, found by experiment: scale and cap of its logits, and its loss.

A model may do anything between its output layer and its loss. Its configuration says what, under names that each
architecture chooses, so that a list of names can never be complete. Instead, the output layer is made to answer with
scores that are known, and what the model makes of them is compared with what a head would make of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from manymax.engine.ranking import linear_scores
from manymax.errors import ArgumentError

# Names in configurations of transformers of what is done to logits. A factor is multiplied in some architectures and
# divided by in others, under one name: both are tried.
SOFT_CAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")
FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")

# Known scores are spread over -RANGE to RANGE, most of them near 0: a cap shows at the ends, a factor everywhere.
RANGE = 60.0
# Rounding steps between a model's logits and ours. Half precision leaves a few percent, float32 a millionth.
STEPS = 8
LOSS_TOLERANCE = 2e-6


@dataclass(frozen=True)
class LogitScoring:
    """How the logits of a model follow from the products s of its output layer: c tanh(s / (T c)).

    temperature: T. softcap: c; None for s / T.
    """

    temperature: float = 1.0
    softcap: float | None = None

    def __call__(self, scores: Tensor) -> Tensor:
        """The logits of scores of any shape."""
        scores = scores / self.temperature
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def bias(self, layer: nn.Linear) -> Tensor | None:
        """The bias (C,) of a head for this layer. A head adds it after the division by T, and a layer before."""
        return layer.bias if layer.bias is None or self.temperature == 1 else layer.bias / self.temperature


@contextmanager
def intercepted(layer: nn.Linear, answer: Callable[[Tensor], Tensor]) -> Iterator[list[Tensor]]:
    """A context in which a layer answers otherwise; gives the list to which its inputs are added."""
    inputs: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:
        inputs.append(hidden)
        return answer(hidden)

    before = vars(layer).get("forward")
    vars(layer)["forward"] = forward
    try:
        yield inputs
    finally:
        del vars(layer)["forward"]
        if before is not None:
            vars(layer)["forward"] = before


def nothing(hidden: Tensor) -> Tensor:
    """The answer of an output layer without classes: (..., 0), on which a model can do what it does to logits."""
    return hidden.new_empty(*hidden.shape[:-1], 0)


def one_input(inputs: list[Tensor], name: str) -> Tensor:
    """The only input that a layer got; an error if it was called more or less than once."""
    if len(inputs) != 1:
        raise ArgumentError(
            f"`model` must call its output layer once to compute a loss; {name} called it {len(inputs)} times, so that"
            " its loss is not that of one head."
        )
    return inputs[0]


@contextmanager
def _undisturbed(model: nn.Module, training: bool) -> Iterator[None]:
    """A context without gradients, in which a model is training or not; random numbers and modes are as before."""
    before = {module: module.training for module in model.modules()}
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices=sorted(devices, key=str)):
        model.train(training)
        try:
            yield
        finally:
            for module, was_training in before.items():
                module.training = was_training


class LogitCheck:
    """Experiments with a model on a tiny batch.

    Args:
        model: the language model.
        forward: its own forward.
        layer: its output layer.
        example: keyword arguments of a call; None for two rows of eight tokens. Labels are drawn if there are none.
    """

    def __init__(
        self, model: Any, forward: Callable[..., Any], layer: nn.Linear, example: Mapping[str, Any] | None
    ) -> None:
        self.model, self.forward, self.layer = model, forward, layer
        self.classes = layer.out_features
        random = torch.Generator().manual_seed(0)
        if example is None:
            example = {"input_ids": torch.randint(self.classes, (2, 8), generator=random)}
        self.inputs = {name: _to(value, layer.weight.device) for name, value in example.items()}
        self.labels = self.inputs.pop("labels", None)
        if self.labels is None:
            shape = self.inputs["input_ids"].shape
            labels = torch.randint(self.classes, shape, generator=random)
            labels[0, :3] = -100  # so that a model that counts them is found out
            self.labels = labels.to(layer.weight.device)

    def scoring(self) -> LogitScoring:
        """How the logits follow from the products of the output layer; an error if no head computes them so."""
        with _undisturbed(self.model, training=False), intercepted(self.layer, self._known) as inputs:
            logits = self._run().logits
        known = self._known(one_input(inputs, self._name))
        if logits.shape != known.shape:
            raise ArgumentError(
                f"`model` must have a logit for each row of its output layer, {tuple(known.shape)}; {self._name} has"
                f" {tuple(logits.shape)}."
            )
        found = list(_configured(self.model.config))
        errors = [_relative(logits, scoring(known)) for scoring in found]
        best = min(range(len(found)), key=errors.__getitem__)
        if not errors[best] <= STEPS * torch.finfo(logits.dtype).eps:
            raise ArgumentError(
                f"`model` does something to its logits that no head does: with what the configuration of {self._name}"
                f" says ({_tried(self.model.config) or 'neither a soft cap nor a factor'}), they differ from the scores"
                f" of a head by a factor of up to {1 + errors[best]:.4g}. Train it with its own loss."
            )
        return found[best]

    def shift(self, scoring: LogitScoring) -> bool:
        """Whether position t predicts the label of t + 1; an error if the model's loss is not their cross entropy."""
        with _undisturbed(self.model, training=True), intercepted(self.layer, self._known) as inputs:
            outputs = self._run(labels=self.labels)
        logits = scoring(self._known(one_input(inputs, self._name)))
        if logits.shape[:-1] != self.labels.shape:
            raise ArgumentError(
                f"`model` must compute logits of all positions, {tuple(self.labels.shape)}, while it trains;"
                f" {self._name} has {tuple(logits.shape[:-1])}. Switch off what picks some of them: a head computes"
                " nothing for labels of -100 anyhow."
            )
        wanted = {
            True: cross_entropy(logits[..., :-1, :].flatten(0, -2), self.labels[..., 1:].flatten()),
            False: cross_entropy(logits.flatten(0, -2), self.labels.flatten()),
        }
        own = outputs.loss
        for shift, loss in wanted.items():
            if own is not None and (own - loss).abs() <= LOSS_TOLERANCE * loss and not _has_more(outputs):
                return shift
        raise ArgumentError(
            f"`model` must have the cross entropy of its labels as its loss, so that a head can replace it. That of"
            f" {self._name} on known logits is {own}; cross entropy is {wanted[True]:.6g} if a position predicts the"
            f" next label, and {wanted[False]:.6g} if it predicts its own. If it adds another loss, of the routing of"
            " experts for example, switch that off."
        )

    def compare(self, scoring: LogitScoring) -> None:
        """Raise unless the model's own logits are the scores that a head computes from the hidden states."""
        layer = self.layer
        with _undisturbed(self.model, training=False):
            with intercepted(layer, lambda hidden: linear(hidden, layer.weight, layer.bias)) as inputs:
                self._run()
            logits = self._run().logits
            with intercepted(layer, nothing) as again:
                self._run()
        hidden = one_input(inputs, self._name)
        torch.testing.assert_close(one_input(again, self._name), hidden)
        scores = linear_scores(
            hidden, layer.weight, scoring.bias(layer), temperature=scoring.temperature, softcap=scoring.softcap
        )
        error = (logits - scores).abs().max() / scores.abs().max()
        if not error <= 100 * STEPS * torch.finfo(torch.float32).eps + STEPS * _half_eps(logits, layer.weight):
            raise ArgumentError(
                f"`model` must compute its logits from the weight and the bias of its output layer alone; those of"
                f" {self._name} differ from that by {error:.2g} of the largest. Hooks, adapters and quantisation of"
                " the output layer have to go."
            )

    @property
    def _name(self) -> str:
        return type(self.model).__name__

    def _known(self, hidden: Tensor) -> Tensor:
        """Known scores of as many rows as there are hidden states, the same for the same shape."""
        random = torch.Generator().manual_seed(1)
        uniform = torch.rand(*hidden.shape[:-1], self.classes, generator=random)
        return (RANGE * (2 * uniform - 1) ** 3).to(hidden.device)

    def _run(self, **more: Any) -> Any:
        """The outputs of the model's own forward on the example."""
        try:
            return self.forward(**self.inputs, **more, return_dict=True)
        except Exception as error:
            raise ArgumentError(
                f"`model` could not be compared with a head: {self._name} fails on the arguments"
                f" {', '.join((*self.inputs, *more))}, {type(error).__name__}: {error}. If it needs others, pass a tiny"
                " batch as `example`."
            ) from error


def _to(value: Any, device: torch.device) -> Any:
    """A copy of an argument on a device, if it is a tensor."""
    return value.to(device) if isinstance(value, Tensor) else value


def _numbers(config: Any, names: tuple[str, ...]) -> dict[str, float]:
    """The fields of a configuration that are positive numbers, of those of these names."""
    values = {name: getattr(config, name, None) for name in names}
    return {name: float(value) for name, value in values.items() if isinstance(value, (int, float)) and value > 0}


def _configured(config: Any) -> Iterator[LogitScoring]:
    """All ways in which logits may follow from scores by what a configuration says, the plainest first."""
    config = config.get_text_config()
    factors = _numbers(config, FACTORS).values()
    temperatures = dict.fromkeys([1.0, *(1 / factor for factor in factors), *factors])
    for softcap, temperature in product((None, *_numbers(config, SOFT_CAPS).values()), temperatures):
        yield LogitScoring(temperature, softcap)


def _tried(config: Any) -> str:
    """What a configuration says about logits, in words."""
    found = _numbers(config.get_text_config(), (*SOFT_CAPS, *FACTORS))
    return ", ".join(f"{name}={value:g}" for name, value in found.items())


def _has_more(outputs: Any) -> bool:
    """Whether a model has a loss of the routing of experts beside that of its labels, which may be tiny here."""
    return getattr(outputs, "aux_loss", None) is not None


def _relative(found: Tensor, wanted: Tensor) -> float:
    """The largest relative difference of two tensors; infinite if one of them is not finite."""
    error = ((found - wanted).abs() / (wanted.abs() + 1e-3)).max()
    return float(error) if error.isfinite() else float("inf")


def _half_eps(*tensors: Tensor) -> float:
    """The rounding of the least precise of the tensors in half precision; 0 if none of them is."""
    eps = [torch.finfo(tensor.dtype).eps for tensor in tensors]
    return max(eps) if max(eps) > torch.finfo(torch.float32).eps else 0.0
