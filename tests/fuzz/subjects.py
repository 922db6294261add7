"""Everything public that can be called, found by its signatures, with good arguments for each.

A function is called as it is. A module is two subjects or more: its constructor, followed by a call with good
arguments, its call, and its public methods. Good values follow from the names of parameters, so that a new function
with known names is swept as soon as it is there; one with a new name fails until the name is in `GOOD`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

import manymax
import manymax.distributed
import manymax.heads
import manymax.theory
from manymax.engine.cost import Machine, Shape
from manymax.members import FAMILY, REFERENCE_LOSSES
from tests.fuzz.good import CLASSES, DIM, GOOD, SPECIAL, fenchel_young, small_tree

# What a call gives back, or holds for one: there is nothing in their constructors to check. And errors.
NOT_CALLED = {
    *("ArgumentError", "ArgumentTypeError", "ManymaxError", "UnknownNameError"),
    *("LossResult", "Target", "SoftTarget", "Draw", "SamplerEntry", "ProbabilityStats", "PropensityGains"),
    *("Estimate", "Drawn", "GradientDeviation", "OrderTheorem", "Consistency", "Alignment", "Witness"),
    *("OrderPreservation", "Rates", "Minimisers", "Plan", "LinearHead", "Sampler", "FixedSampler"),
}
# Their subject is a time, or they hold the steps that the functions around them have checked.
NOT_SWEPT = {"measure_machine", "measure_network", "read_inputs", "check_count", "check_proposal", "ProcessRanks"}


@dataclass(frozen=True)
class Subject:
    """One thing to call.

    name: as findings show it. call: with keyword arguments. good: the arguments that it must have. varied: those that
    are replaced by bad values. optional: the good values of optional ones, as far as they are known. kinds: the
    annotations of the varied ones.
    """

    name: str
    call: Callable[..., Any]
    good: Mapping[str, Callable[[], Any]]
    varied: tuple[str, ...]
    optional: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)

    def good_value(self, argument: str) -> Any:
        """The good value of an argument, made anew; None where none is known."""
        make = self.good.get(argument, self.optional.get(argument))
        return None if make is None else make()


def of(
    name: str,
    call: Callable[..., Any],
    signature: inspect.Signature | None = None,
    *,
    also: Mapping[str, Any] = {},
    **overrides: Any,
) -> Subject:
    """The subject of a function: every parameter that can be named is varied.

    Args:
        name, call: of the function.
        signature: where it is not that of `call`.
        also: keywords that it takes without naming them, with their good values.
        overrides: good values, where those in `GOOD` do not fit.
    """
    overrides = {**SPECIAL.get(name, {}), **overrides}
    good, optional, kinds = {}, {}, {}
    for parameter in (signature or inspect.signature(call)).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or parameter.name == "self":
            continue
        given = overrides.get(parameter.name, GOOD.get(parameter.name))
        if parameter.name not in overrides and given is None and parameter.default is parameter.empty:
            raise LookupError(f"{name} needs a good value for {parameter.name!r}: add it to GOOD.")
        kinds[parameter.name] = str(parameter.annotation)
        if parameter.default is parameter.empty or parameter.name in overrides:
            good[parameter.name] = _maker(given)
        elif given is not None:
            optional[parameter.name] = _maker(given)
    good |= {key: _maker(value) for key, value in also.items() if key in NEEDED_IN_CALLS}
    optional |= {key: _maker(value) for key, value in also.items() if key not in NEEDED_IN_CALLS}
    return Subject(name, call, good, tuple(dict.fromkeys([*kinds, *also])), optional, kinds)


def _maker(value: Any) -> Callable[[], Any]:
    """A function that makes a value; members and samplers, which can be called, are no such functions."""
    return value if inspect.isfunction(value) else lambda: value


def _call_with(make: Callable[[], Any], *names: str) -> Callable[..., Any]:
    """A call of an object that is made anew, or of its method."""

    def call(**given: Any) -> Any:
        found = make()
        for name in names:
            found = getattr(found, name)
        return found(**given)

    return call


def of_method(name: str, make: Callable[[], Any], method: str = "forward", **overrides: Any) -> Subject:
    """The subject of a method of an object, which is made anew for each call."""
    signature = inspect.signature(getattr(make(), method))
    return of(name, _call_with(make, *([] if method == "forward" else [method])), signature, **overrides)


def of_module(name: str, kind: type[nn.Module], also: Mapping[str, Any] = {}, **overrides: Any) -> Iterator[Subject]:
    """The subjects of a module: its constructor, followed by a good call, and its call."""
    made = of(name, kind, **overrides)

    def make() -> nn.Module:
        return kind(**{argument: value() for argument, value in made.good.items()})

    forward = of(f"{name}()", _call_with(make), inspect.signature(make().forward), also=also)

    def construct(**given: Any) -> Any:
        return kind(**given)(**{argument: value() for argument, value in forward.good.items()})

    yield replace(made, call=construct)
    yield forward


# Arguments of `**sample` without which a loss of drawn negatives cannot be called.
NEEDED_IN_CALLS = ("log_q_positive", "log_q_negative", "sampler")
SAMPLE = {name: GOOD[name] for name in ("log_q_positive", "log_q_negative", "hits")}
ABOUT_PAIRS = {name: GOOD[name] for name in ("hard", "ids", "groups", "row_weight", "num_items")}
DRAWING = {name: GOOD[name] for name in ("sampler", "num_negatives", "negatives", "weight")}
# Keywords of calls that a signature does not name.
MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("InBatchLoss", "SiglipLoss"), ABOUT_PAIRS),
    **dict.fromkeys(("NCELoss", "SampledSoftmaxLoss"), SAMPLE),
    **dict.fromkeys(
        (f"linear_loss {m.name}" for m in (*FAMILY.values(), *REFERENCE_LOSSES.values()) if m.kind == "sampled"),
        DRAWING,
    ),
    "linear_loss hierarchical_softmax": {},
}


def _library() -> Iterator[Subject]:
    """Functions and modules of `manymax.__all__`, and heads of reference losses."""
    for name in sorted({*manymax.__all__, *manymax.heads.__all__} - NOT_CALLED):
        found = getattr(manymax, name, None) or getattr(manymax.heads, name)
        if not callable(found) or name in ("head_class", "head_function"):
            continue
        if inspect.isclass(found) and issubclass(found, nn.Module) and "forward" in _own(found):
            yield from of_module(name, found, MORE.get(name, {}))
            if name.startswith("Linear"):
                for method in ("scores", "topk"):
                    yield of_method(f"{name}.{method}", partial(found, DIM, CLASSES), method)
        elif name == "FenchelYoung":
            yield of(
                name,
                lambda **given: manymax.FenchelYoung(**given).loss(GOOD["scores"](), GOOD["target"]()),
                inspect.signature(found),
            )
            for method in ("loss", "conjugate", "gradient", "slope", "bregman"):
                yield of_method(f"{name}.{method}", fenchel_young, method)
        elif name == "HeadOptions":
            good = {key: GOOD[key]() for key in ("input", "linear_weight", "target")}
            yield of(
                name,
                lambda good=good, **given: manymax.linear_softmax_loss(**good, options=manymax.HeadOptions(**given)),
                inspect.signature(found),
            )
        elif name == "linear_loss":
            for member in (*FAMILY, *REFERENCE_LOSSES):
                yield of(f"{name} {member}", found, also=MORE.get(f"{name} {member}", {}), member=member)
        else:
            yield of(name, found)


def _own(kind: type) -> set[str]:
    """The names that a class or its bases inside of the package define."""
    return {name for base in kind.__mro__ if base.__module__.startswith("manymax") for name in vars(base)}


def _samplers() -> Iterator[Subject]:
    rows = {key: GOOD[key] for key in ("input", "linear_weight", "target")}
    for name, entry in manymax.SAMPLERS.items():
        kind, label = entry.module, f"samplers.{entry.module.__name__}"
        parameters = inspect.signature(kind).parameters.values()
        small = [p.name for p in parameters if p.default is p.empty or p.name in ("num_candidates", "num_codewords")]

        def made(kind: Any = kind, small: Any = small) -> Any:
            return _refreshed(kind(**{key: GOOD[key]() for key in small}))

        def construct(kind: Any = kind, **given: Any) -> Any:
            return _refreshed(kind(**given))(2, **{key: value() for key, value in rows.items()})

        yield of(label, construct, inspect.signature(kind), **{key: GOOD[key] for key in small})
        yield of(f"SAMPLERS {name}", entry.make)
        yield of_method(f"{label}()", made, num_negatives=2, **rows)
        for method in ("log_q", "log_probs", "refresh", "update", "marginal_log_q"):
            unknown = method.startswith("log_") and entry.name in ("dns", "two_pass")  # which say so, whatever is asked
            if unknown or method not in _own(kind):
                continue
            given = {"input": GOOD["input"]} if entry.needs_scores and method in ("log_q", "log_probs") else {}
            yield of_method(f"{label}.{method}", made, method, **given)
    yield of("samplers.StreamingFrequency", manymax.samplers.StreamingFrequency)
    for method in ("update", "log_prob_of"):
        yield of_method(
            f"samplers.StreamingFrequency.{method}", partial(manymax.samplers.StreamingFrequency, 5), method
        )


def _refreshed(sampler: Any) -> Any:
    sampler.refresh(GOOD["linear_weight"]())
    return sampler


def _functions(module: ModuleType, prefix: str) -> Iterator[Subject]:
    for name, found in vars(module).items():
        hidden = name.startswith("_") or name in NOT_CALLED or name in NOT_SWEPT
        if not hidden and callable(found) and getattr(found, "__module__", "") == module.__name__:
            yield of(f"{prefix}.{name}", found)


def _measurements() -> Iterator[Subject]:
    for name in manymax.metrics.__all__:
        if name not in NOT_CALLED:
            yield of(f"metrics.{name}", getattr(manymax.metrics, name))
    for info in pkgutil.iter_modules(manymax.theory.__path__):
        yield from _functions(importlib.import_module(f"manymax.theory.{info.name}"), info.name)


def _objects() -> Iterator[Subject]:
    """Methods of trees and factorisations, optimisers, and what `manymax.distributed` does on one process."""
    yield of_method("ClassTree.from_paths", small_tree, "from_paths")
    yield of_method("ClassTree.mean_length", small_tree, "mean_length")
    yield of_method("ClassTree.paths", small_tree, "paths")
    yield of_method("ClassTree.accumulate", small_tree, "accumulate")
    model = lambda: manymax.RGFactorization(3, 5, 2, generator=torch.Generator().manual_seed(0))  # noqa: E731
    users, items = lambda: torch.tensor([0, 1, 2, 2]), lambda: torch.tensor([0, 4, 2, 1])

    def fitted() -> Any:
        found = model()
        found.observe(users(), items())
        return found

    for method in ("fit", "observe", "scores", "query_scores", "fold_in_users", "fold_in_items"):
        yield of_method(f"RGFactorization.{method}", fitted, method)
    yield of("optim.SparseAdam", _adam, inspect.signature(manymax.optim.SparseAdam))
    yield of("distributed.even_sizes", manymax.distributed.even_sizes)
    yield of("distributed.Network", manymax.distributed.Network)
    yield of("distributed.plan", manymax.distributed.plan)
    yield of("distributed.traffic", manymax.distributed.traffic)
    yield of("Shape", Shape)
    yield of("Machine", Machine)


def _adam(**given: Any) -> Any:
    optimizer = manymax.optim.SparseAdam(**given)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.eye(len(param))[:, : param.shape[1]].to_sparse(1)
    optimizer.step()
    return optimizer.param_groups[0]["params"][0].detach()


def subjects() -> list[Subject]:
    """All subjects."""
    return [*_library(), *_samplers(), *_measurements(), *_objects()]
