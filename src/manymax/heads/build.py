"""Heads from records: `linear_<name>_loss` and `Linear<Name>Loss` of any row of a table of members.

What a head takes follows from its member's kind and settings and from the shared keywords, and so do its signature and
its documentation: `help()` shows every keyword.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from manymax.engine.drawn import DrawSettings, check_sampler, sampled_loss
from manymax.engine.head import LinearHead
from manymax.engine.linear import check_linear, exact_loss, quadratic_loss, read_call
from manymax.engine.member import Member, Setting
from manymax.engine.options import Keywords, read_keywords
from manymax.errors import ManymaxError
from manymax.heads.modules import ExactHead, KernelHead, QuadraticHead, SampledHead, learned_property
from manymax.ops.checks import full_precision

MODULES: dict[str, type[KernelHead]] = {"exact": ExactHead, "quadratic": QuadraticHead, "sampled": SampledHead}
LOSSES: dict[str, Callable[..., Tensor]] = {
    "exact": exact_loss,
    "quadratic": quadratic_loss,
    "sampled": sampled_loss,
}
POSITIONAL, KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
DEPRECATED = {"sparse": "sparse_grad"}

_classes: dict[str, tuple[Member, type[LinearHead]]] = {}


def function_name(member: Member) -> str:
    """What the head of a member is called as a function."""
    return f"linear_{member.name}_loss"


def class_name(member: Member) -> str:
    """What the head of a member is called as a module."""
    return f"Linear{member.class_name}Loss"


def head_class(member: Member) -> type[LinearHead]:
    """The module of a member's head: one class for each member."""
    if member.head is not None:
        return member.head  # type: ignore[return-value]
    if member.name not in _classes or _classes[member.name][0] is not member:
        _classes[member.name] = member, _make_class(member)
    return _classes[member.name][1]


def head_function(member: Member) -> Callable[..., Tensor]:
    """The function of a member's head, with the arguments of `torch.nn.functional.linear_cross_entropy`."""
    if member.head_function is not None:
        return member.head_function
    base = _base(member)
    drawing = issubclass(base, SampledHead)
    parameters = _function_parameters(member, base)
    known = {parameter.name for parameter in parameters}
    places = [parameter.name for parameter in parameters if parameter.kind is POSITIONAL][3:]
    loss, name = LOSSES[member.kind], function_name(member)

    def function(input: Tensor, linear_weight: Tensor, target: Any, *drawn: Any, **given: Any) -> Tensor:
        given = _in_order(name, drawn, places, _renamed(name, given, known))
        bias = given.pop("linear_bias", None)
        check_linear(input, linear_weight, bias)
        classes = linear_weight.shape[0]
        draws = (_draws(name, given),) if drawing else ()
        settings = {each.name: each.value(given.pop(each.name, None), classes) for each in member.settings}
        keywords = read_keywords(given, classes, base.honours, base.honours_why)
        call = read_call(member, input, linear_weight, bias, target, keywords)
        for draw in draws:
            check_sampler(draw.sampler, classes)
        with full_precision(input):
            return loss(member, call, settings, *draws)

    function.__name__ = function.__qualname__ = name
    function.__module__ = "manymax.heads"
    function.__doc__ = _function_doc(member, base)
    function.__signature__ = inspect.Signature(parameters, return_annotation="Tensor")  # type: ignore[attr-defined]
    return function


def _base(member: Member) -> type[KernelHead]:
    if member.kind not in MODULES:
        raise ManymaxError(
            f"{member.name} is of kind {member.kind!r} and has no `head`: its entry must give this field."
        )
    member.needed("kernel")
    return MODULES[member.kind]


def _draws(name: str, given: dict[str, Any]) -> DrawSettings:
    """Sampler and number of negatives, taken from the arguments."""
    if "sampler" not in given:
        raise TypeError(f"{name}() missing 1 required positional argument: 'sampler'")
    return DrawSettings(given.pop("sampler"), given.pop("num_negatives", 100))


def _in_order(name: str, more: tuple[Any, ...], places: list[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Further positional arguments under their names, with the others; too many are refused as Python does."""
    if len(more) > len(places):
        raise TypeError(f"{name}() takes {len(places)} further positional arguments; got {len(more)}")
    placed = dict(zip(places, more, strict=False))
    for key in placed.keys() & given.keys():
        raise TypeError(f"{name}() got multiple values for argument {key!r}")
    return {**placed, **given}


def _renamed(name: str, given: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Keyword arguments under their names of today; unknown ones are refused as Python does."""
    read = {}
    for key, value in given.items():
        today = DEPRECATED[key] if DEPRECATED.get(key) in known else key
        if today != key:
            warnings.warn(f"`{key}` is called `{today}` now.", DeprecationWarning, stacklevel=3)
        if today not in known:
            raise TypeError(f"{name}() got an unexpected keyword argument {key!r}")
        read[today] = value
    return read


def _make_class(member: Member) -> type[LinearHead]:
    base, name = _base(member), class_name(member)
    parameters = _class_parameters(member, base)
    known = {parameter.name for parameter in parameters}
    places = [parameter.name for parameter in parameters if parameter.kind is POSITIONAL][2:]

    def __init__(self: Any, in_features: int | None, num_classes: int, *more: Any, **given: Any) -> None:
        base.__init__(self, in_features, num_classes, **_in_order(name, more, places, _renamed(name, given, known)))

    own = inspect.Parameter("self", POSITIONAL)
    __init__.__signature__ = inspect.Signature([own, *parameters], return_annotation="None")  # type: ignore[attr-defined]
    __init__.__doc__ = None
    namespace: dict[str, Any] = {
        "member": member,
        "__init__": __init__,
        "__module__": "manymax.heads",
        "__doc__": _class_doc(member, base),
        "__signature__": inspect.Signature(parameters),
    }
    for setting in member.settings:
        if setting.learned is not None and setting.learned.key != setting.name:
            namespace[setting.name] = learned_property(setting)
    return type(name, (base,), namespace)


# Signatures and documentation --------------------------------------------------------------------


def _settings(member: Member, kind: Any) -> list[inspect.Parameter]:
    return [inspect.Parameter(s.name, kind, default=s.default, annotation=_annotation(s)) for s in member.settings]


def _annotation(setting: Setting) -> str:
    words = [setting.kind.__name__, "Tensor" if setting.learned else "", "None" if setting.default is None else ""]
    return " | ".join(filter(None, words))


def _function_parameters(member: Member, base: type[KernelHead]) -> list[inspect.Parameter]:
    leading = [
        inspect.Parameter("input", POSITIONAL, annotation="Tensor"),
        inspect.Parameter("linear_weight", POSITIONAL, annotation="Tensor"),
        inspect.Parameter("target", POSITIONAL, annotation="Tensor | Target"),
    ]
    if issubclass(base, SampledHead):
        leading.append(inspect.Parameter("sampler", POSITIONAL, annotation="Sampler"))
        leading.append(inspect.Parameter("num_negatives", POSITIONAL, default=100, annotation="int | None"))
    shared = Keywords.parameters(base.keywords)
    place = [parameter.name for parameter in shared].index("weight")  # where torch has the bias
    bias = inspect.Parameter("linear_bias", KEYWORD, default=None, annotation="Tensor | None")
    return [*leading, *_settings(member, KEYWORD), *shared[:place], bias, *shared[place:]]


def _class_parameters(member: Member, base: type[KernelHead]) -> list[inspect.Parameter]:
    parameters = [
        inspect.Parameter("in_features", POSITIONAL, annotation="int | None"),
        inspect.Parameter("num_classes", POSITIONAL, annotation="int"),
    ]
    if issubclass(base, SampledHead):
        parameters.append(inspect.Parameter("sampler", POSITIONAL, default=None, annotation="Sampler | None"))
        parameters.append(inspect.Parameter("num_negatives", POSITIONAL, default=100, annotation="int | None"))
        parameters += _settings(member, KEYWORD)
    else:
        parameters += _settings(member, POSITIONAL)
    if any(setting.learned for setting in member.settings):
        parameters.append(inspect.Parameter("learnable", KEYWORD, default=False, annotation="bool"))
    parameters += [
        inspect.Parameter("bias", KEYWORD, default=False, annotation="bool"),
        inspect.Parameter("device", KEYWORD, default=None, annotation="torch.device | str | None"),
        inspect.Parameter("dtype", KEYWORD, default=None, annotation="torch.dtype | None"),
    ]
    return parameters + Keywords.parameters(base.keywords)


def _function_doc(member: Member, base: type[KernelHead]) -> str:
    plain = member.loss.__name__
    lines = [
        f"`{plain}` of `input @ linear_weight.T + linear_bias` without the table of scores.",
        "",
        base.about,
        "",
        "Args:",
        "    input: (..., d) queries.",
        "    linear_weight: (C, d) class vectors.",
        "    target: ids (...), padded ids (..., P), bool or float rows (..., C), or what `group_pairs` returns.",
    ]
    if issubclass(base, SampledHead):
        lines += [
            "    sampler: one of `manymax.samplers`. Where it knows no log q a uniform one stands in.",
            "    num_negatives: k, drawn for each positive.",
        ]
    lines += [f"    {s.name}: {s.help}" for s in member.settings]
    lines += [f"    {line}" for line in _shared_docs(base)]
    lines += [
        "    linear_bias: (C,), added to the scores; -inf masks a class.",
        "",
        "Returns:",
        '    A scalar, or (...) for `reduction="none"`, in the dtype of `input` (float32 under autocast).',
    ]
    return "\n".join([*lines, "", *_of_kernel(member)]).rstrip() + "\n"


def _class_doc(member: Member, base: type[KernelHead]) -> str:
    lines = [
        f"{member.title} of a linear layer; see `{function_name(member)}`.",
        "",
        "Args:",
        "    in_features: d, or None for a head that gets its class vectors in every call.",
        "    num_classes: C.",
    ]
    if issubclass(base, SampledHead):
        lines += ["    sampler: one of `manymax.samplers`; uniform if None.", "    num_negatives: k."]
    lines += [f"    {s.name}: {s.help}" for s in member.settings]
    if any(setting.learned for setting in member.settings):
        lines.append("    learnable: learn it along with the model; it is then where training begins.")
    lines += ["    bias, device, dtype: of the head's own class vectors."]
    lines += [f"    {line}" for line in _shared_docs(base)]
    return "\n".join(lines) + "\n"


def _shared_docs(base: type[KernelHead]) -> list[str]:
    """A line for each shared keyword."""
    lines = {
        "shared": "shared: one draw of k negatives for all rows: a matmul instead of a gather.",
        "sparse_grad": "sparse_grad: give `linear_weight` a gradient of the touched rows only.",
        "generator": "generator: of the draws.",
        "weight": "weight: (C,) class weights.",
        "reduction": 'reduction: "none", "mean" or "sum".',
        "ignore_index": "ignore_index: an id that is no positive; a row without a positive has loss 0.",
        "label_smoothing": "label_smoothing: share of each positive that is spread evenly over the live classes.",
        "multilabel": 'multilabel: "sum" over the positives of a row, or "normalized", the loss at t / |t|.',
        "options": "options: `HeadOptions` or a mapping of its fields.",
    }
    known = [f.name for f in fields(Keywords)]
    assert list(lines) == known, "every shared keyword has a line of documentation"
    return [line for name, line in lines.items() if name in base.keywords]


def _of_kernel(member: Member) -> list[str]:
    """What the member's kernel says beyond its first line: formulas, examples."""
    text = inspect.getdoc(member.kernel) or ""
    return text.split("\n")[2:]
