"""Builds the heads of a member, the function `linear_<name>_loss` and the class `Linear<Name>Loss`.

What a head takes follows from its member's kind and settings and from the keywords that heads share. Its signature and
its documentation are built from the same, so that `help()` shows every keyword.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch  # noqa: F401  (signatures are text that names it)
from torch import Tensor

from manymax.engine.drawn import DrawSettings, check_sampler, sampled_loss
from manymax.engine.head import LinearHead
from manymax.engine.keywords import PER_CALL, Keywords, read_keywords
from manymax.engine.linear import HeadCall, check_linear, exact_loss, quadratic_loss, read_call
from manymax.engine.member import Member, Setting
from manymax.engine.options import Options  # noqa: F401  (the same)
from manymax.engine.target import SoftTarget, Target  # noqa: F401
from manymax.errors import ManymaxError
from manymax.heads.call_arguments import bind_positional, read_names
from manymax.heads.modules import ExactHead, KernelHead, QuadraticHead, SampledHead, learned_property
from manymax.heads.operator import GraphHead, call_in_graph, register
from manymax.ops.arguments import Arguments
from manymax.ops.checks import full_precision
from manymax.ops.eager import in_graphs, outside_of_graphs
from manymax.samplers.base import Sampler  # noqa: F401

# By the kind of a member: the base class of its module, and the loss of a call. A tree brings heads of its own.
MODULES: dict[str, type[KernelHead]] = {"exact": ExactHead, "quadratic": QuadraticHead, "sampled": SampledHead}
LOSSES: dict[str, Callable[..., Tensor]] = {
    "exact": exact_loss,
    "quadratic": quadratic_loss,
    "sampled": sampled_loss,
}
POSITIONAL, KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY

# One class for each member, by name. The member is kept too: another one of the same name gets a class of its own.
_classes: dict[str, tuple[Member, type[LinearHead]]] = {}


def function_name(member: Member) -> str:
    """The name of a member's head as a function."""
    return f"linear_{member.loss_name}"


def class_name(member: Member) -> str:
    """The name of a member's head as a class."""
    return f"Linear{member.class_name}Loss"


def head_class(member: Member) -> type[LinearHead]:
    """The class of a member's head, a `LinearHead`; the same one at every call.

    Example:
        >>> import manymax
        >>> manymax.heads.head_class(manymax.FAMILY["softmax"])
        <class 'manymax.heads.LinearSoftmaxLoss'>
    """
    if member.head is not None:
        return member.head  # type: ignore[return-value]
    if member.name not in _classes or _classes[member.name][0] is not member:
        _classes[member.name] = member, _make_class(member)
    return _classes[member.name][1]


def head_function(member: Member) -> Callable[..., Tensor]:
    """The head of a member as a function, with the arguments of `torch.nn.functional.linear_cross_entropy`.

    Example:
        >>> import torch, manymax
        >>> head = manymax.heads.head_function(manymax.FAMILY["softmax"])
        >>> head(torch.tensor([[1.0]]), torch.tensor([[0.0], [0.0]]), torch.tensor([1]))
        tensor(0.6931)
    """
    if member.head_function is not None:
        return member.head_function
    base, name, form = _base(member), function_name(member), _form(member)
    known, positional = set(form.names), form.positional

    def node(input: Tensor, linear_weight: Tensor, target: Any, *more: Any, **given: Any) -> Any:
        given = bind_positional(name, more, positional, read_names(name, given, known))
        given = {"input": input, "linear_weight": linear_weight, "target": target, **given}
        return call_in_graph(form.key, form.learned, given)

    # Python's own check of the arguments is replaced by that of `parameters`, which differ from member to member.
    @(outside_of_graphs if form.key is None else in_graphs(node))
    def function(input: Tensor, linear_weight: Tensor, target: Any, *more: Any, **given: Any) -> Tensor:
        given = bind_positional(name, more, positional, read_names(name, given, known))
        call, further = form.read(input, linear_weight, target, given)
        # Autocast would run the matmuls of the scores in half precision, and with them everything that follows.
        with full_precision(input):
            return form.loss(call, further)

    function.__name__ = function.__qualname__ = name
    function.__module__ = "manymax.heads"
    function.__doc__ = _function_doc(member, base)
    function.__signature__ = inspect.Signature(form.parameters, return_annotation="Tensor")  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class FunctionForm:
    """The head of a member as a function: how its arguments are read.

    parameters: of its signature.
    read: from queries, class vectors, target and the other arguments by name to the call and what the loss needs beside
        it: the settings, and what to draw.
    loss: from these to the loss.
    key: its name in graphs; None for a head that cannot be in one.
    learned: the names of settings that may be tensors with a gradient.
    """

    parameters: list[inspect.Parameter]
    read: Callable[[Tensor, Tensor, Any, dict[str, Any]], tuple[HeadCall, list[Any]]]
    loss: Callable[[HeadCall, list[Any]], Any]
    key: str | None
    learned: frozenset[str]

    @property
    def names(self) -> list[str]:
        """The names of the parameters."""
        return [parameter.name for parameter in self.parameters]

    @property
    def positional(self) -> list[str]:
        """The names of further positional parameters, after the three tensors."""
        return [parameter.name for parameter in self.parameters if parameter.kind is POSITIONAL][3:]


_forms: dict[str, tuple[Member, FunctionForm]] = {}  # kept like the classes


def _form(member: Member) -> FunctionForm:
    """How the arguments of a member's head are read; the same object at every call."""
    if member.name in _forms and _forms[member.name][0] is member:
        return _forms[member.name][1]
    base = _base(member)
    honoured, drawing = _honours(member, base), issubclass(base, SampledHead)
    parameters = _function_parameters(member, base)
    arguments, name, loss_of = _arguments(parameters), function_name(member), LOSSES[member.kind]

    def read(input: Tensor, linear_weight: Tensor, target: Any, given: dict[str, Any]) -> tuple[HeadCall, list[Any]]:
        (input, linear_weight, target), given = arguments.read((input, linear_weight, target), given)
        bias = given.pop("linear_bias", None)
        check_linear(input, linear_weight, bias)  # first, because the number of classes is read off the class vectors
        classes = linear_weight.shape[0]
        draws = [_read_draws(name, given)] if drawing else []
        settings = {each.name: each.value(given.pop(each.name, None), classes) for each in member.settings}
        keywords = read_keywords(given, classes, *honoured)
        call = read_call(member, input, linear_weight, bias, target, keywords)
        for draw in draws:
            check_sampler(draw.sampler, classes)
        return call, [settings, *draws]

    def loss(call: HeadCall, further: list[Any]) -> Any:
        return loss_of(member, call, *further)

    key = None if drawing else register(member.name, GraphHead(read, loss, blocks=member.kind == "exact"))
    learned = frozenset(each.name for each in member.settings if each.learned is not None)
    _forms[member.name] = member, FunctionForm(parameters, read, loss, key, learned)
    return _forms[member.name][1]


def _base(member: Member) -> type[KernelHead]:
    """The base class of the head of a member with a kernel; an error if it has none."""
    if member.kind not in MODULES:
        raise ManymaxError(
            f"{member.name} is of kind {member.kind!r} and has no `head`: its entry must give this field."
        )
    member.needed("kernel")
    return MODULES[member.kind]


def _honours(member: Member, base: type[KernelHead]) -> tuple[frozenset[str], str]:
    """The options that have an effect on the head of a member, and why the others have none."""
    if member.kind != "exact" or member.sparse:
        return base.honours, base.honours_why
    why = "its gradient touches all class vectors; those of sparse members and of heads that draw negatives do not"
    return base.honours - {"sparse_grad"}, why


def _read_draws(name: str, given: dict[str, Any]) -> DrawSettings:
    """Take the sampler and the number of negatives out of the arguments."""
    if "sampler" not in given:
        raise TypeError(f"{name}() missing 1 required positional argument: 'sampler'")
    return DrawSettings(given.pop("sampler"), given.pop("num_negatives", 100))


def _make_class(member: Member) -> type[LinearHead]:
    """A subclass of the base class of the member's kind, with a constructor whose signature shows its settings."""
    base, name = _base(member), class_name(member)
    parameters = _class_parameters(member, base)
    known, arguments = {parameter.name for parameter in parameters}, _arguments(parameters)
    positional = [parameter.name for parameter in parameters if parameter.kind is POSITIONAL][2:]

    def __init__(self: Any, in_features: int | None, num_classes: int, *more: Any, **given: Any) -> None:
        given = bind_positional(name, more, positional, read_names(name, given, known))
        sizes, given = arguments.read((in_features, num_classes), given)
        base.__init__(self, *sizes, **given)

    own = inspect.Parameter("self", POSITIONAL)
    __init__.__signature__ = inspect.Signature([own, *parameters], return_annotation="None")  # type: ignore[attr-defined]
    __init__.__doc__ = None  # the docstring of the class has the arguments
    namespace: dict[str, Any] = {
        "member": member,
        "__init__": __init__,
        "__module__": "manymax.heads",
        "__doc__": _class_doc(member, base),
        "__signature__": inspect.Signature(parameters),
    }
    namespace["honours"], namespace["honours_why"] = _honours(member, base)
    form = _form(member)
    namespace["graph_key"], namespace["graph_learned"] = form.key, form.learned
    for setting in member.settings:
        # The parameter is kept under a name of its own, so that the setting is a property that computes its value.
        if setting.learned is not None and setting.learned.key != setting.name:
            namespace[setting.name] = learned_property(setting)
    return type(name, (base,), namespace)


# Signatures and documentation --------------------------------------------------------------------


def _arguments(parameters: Sequence[inspect.Parameter]) -> Arguments:
    """The checks of arguments against the annotations of these parameters, which are text."""
    return Arguments(inspect.Signature(parameters), globals(), {"in_features": 1, "num_classes": 1})


def _settings(member: Member, kind: Any) -> list[inspect.Parameter]:
    """The settings of a member as parameters of a signature."""
    return [inspect.Parameter(s.name, kind, default=s.default, annotation=_annotation(s)) for s in member.settings]


def _annotation(setting: Setting) -> str:
    """The type of a setting as a signature shows it: `float | Tensor` where it can be learned."""
    words = [setting.kind.__name__, "Tensor" if setting.learned else "", "None" if setting.default is None else ""]
    return " | ".join(filter(None, words))


def _function_parameters(member: Member, base: type[KernelHead]) -> list[inspect.Parameter]:
    """The signature of the function: tensors, sampler, settings, shared keywords."""
    leading = [
        inspect.Parameter("input", POSITIONAL, annotation="Tensor"),
        inspect.Parameter("linear_weight", POSITIONAL, annotation="Tensor"),
        inspect.Parameter("target", POSITIONAL, annotation="Tensor | Target | SoftTarget"),
    ]
    if issubclass(base, SampledHead):
        leading.append(inspect.Parameter("sampler", POSITIONAL, annotation="Sampler"))
        leading.append(inspect.Parameter("num_negatives", POSITIONAL, default=100, annotation="int | None"))
    shared = Keywords.parameters(base.keywords)
    place = [parameter.name for parameter in shared].index("normalize")  # the keywords of scores begin with the bias
    bias = inspect.Parameter("linear_bias", KEYWORD, default=None, annotation="Tensor | None")
    return [*leading, *_settings(member, KEYWORD), *shared[:place], bias, *shared[place:]]


def _class_parameters(member: Member, base: type[KernelHead]) -> list[inspect.Parameter]:
    """The signature of the constructor: sizes, sampler, settings, class vectors, shared keywords."""
    parameters = [
        inspect.Parameter("in_features", POSITIONAL, annotation="int | None"),
        inspect.Parameter("num_classes", POSITIONAL, annotation="int"),
    ]
    if issubclass(base, SampledHead):
        parameters.append(inspect.Parameter("sampler", POSITIONAL, default=None, annotation="Sampler | None"))
        parameters.append(inspect.Parameter("num_negatives", POSITIONAL, default=100, annotation="int | None"))
        parameters += _settings(member, KEYWORD)
        if member.per_pair is not None:
            parameters.append(inspect.Parameter("num_pairs", KEYWORD, default=None, annotation="int | None"))
    else:
        parameters += _settings(member, POSITIONAL)
    if any(setting.learned for setting in member.settings):
        parameters.append(inspect.Parameter("learnable", KEYWORD, default=False, annotation="bool"))
    parameters += [
        inspect.Parameter("bias", KEYWORD, default=False, annotation="bool"),
        inspect.Parameter("device", KEYWORD, default=None, annotation="torch.device | str | None"),
        inspect.Parameter("dtype", KEYWORD, default=None, annotation="torch.dtype | None"),
    ]
    return parameters + Keywords.parameters(name for name in base.keywords if name not in PER_CALL)


def _function_doc(member: Member, base: type[KernelHead]) -> str:
    """The docstring of the function: one line, how gradients are computed, arguments, result, formulas and examples."""
    plain = member.loss.__name__
    lines = [
        f"`{plain}` of the scores `input @ linear_weight.T + linear_bias`, without the table of all scores.",
        "",
        base.about,
        "",
        "Args:",
        "    input: (..., d) queries.",
        "    linear_weight: (C, d) class vectors.",
        "    target: ids (...), padded ids (..., P), bool or float rows (..., C), a `SoftTarget`, or what",
        "        `group_pairs` returns.",
    ]
    if issubclass(base, SampledHead):
        lines += [
            "    sampler: one of `manymax.samplers`. If it does not know its log q, that of a uniform one is used.",
            "    num_negatives: k, the number of negatives drawn for each positive.",
        ]
    lines += [f"    {s.name}: {s.help}" for s in member.settings]
    lines += ["    linear_bias: (C,), added to the scores; -inf masks a class."]
    lines += [f"    {line}" for line in _shared_docs(base.keywords)]
    lines += [
        "",
        "Returns:",
        '    A scalar, or (...) for `reduction="none"`: float32 for queries in half precision, else in their dtype.',
        "    With `stats` a `LossResult`.",
    ]
    return "\n".join([*lines, "", *_kernel_doc(member)]).rstrip() + "\n"


def _class_doc(member: Member, base: type[KernelHead]) -> str:
    """The docstring of the class: one line and the arguments of the constructor."""
    lines = [
        f"{member.title} of a linear layer; see `{function_name(member)}`.",
        "",
        "Args:",
        "    in_features: d, or None for a head that gets its class vectors in every call.",
        "    num_classes: C, the number of classes.",
    ]
    if issubclass(base, SampledHead):
        lines += [
            "    sampler: one of `manymax.samplers`; uniform if None.",
            "    num_negatives: k, the number of negatives drawn for each positive.",
        ]
    lines += [f"    {s.name}: {s.help}" for s in member.settings]
    if member.per_pair is not None:
        lines.append(f"    num_pairs: how many training pairs there are, for `{member.per_pair}`; see `pair_averages`.")
    if any(setting.learned for setting in member.settings):
        lines.append("    learnable: learn the setting along with the model; its value is then where training begins.")
    lines += ["    bias, device, dtype: of the head's own class vectors."]
    lines += [f"    {line}" for line in _shared_docs([name for name in base.keywords if name not in PER_CALL])]
    return "\n".join(lines) + "\n"


def _shared_docs(names: Sequence[str]) -> list[str]:
    """One line of documentation for each of these shared keywords."""
    lines = {
        "shared": "shared: draw k negatives once for all rows, which makes their scores one matmul.",
        "sparse_grad": "sparse_grad: give class vectors and bias gradients of the touched rows only, sparse tensors.",
        "generator": "generator: the source of randomness of the draws; torch's default one if None.",
        "negatives": "negatives: (..., H) ids that are negatives of their row beside the drawn ones, padded with -100.",
        "pair_ids": "pair_ids: for losses that keep averages: the number of each positive's pair, shaped like the ids.",
        "pair_averages": "pair_averages: (num_pairs,) log of each pair's average, -inf at first; changed in place.",
        "normalize": "normalize: divide queries and class vectors by their norms; a zero vector stays zero.",
        "temperature": "temperature: divides the products of queries and class vectors; a tensor gets its gradient.",
        "softcap": "softcap: c, for scores c tanh(s / c); a masked class stays masked.",
        "exclude": "exclude: (..., E) ids left out of the sums of their row, padded with -100; its positive stays in.",
        "decoupled": "decoupled: leave the positive out of the sum of its own loss, which may then be negative.",
        "bound": "bound: (...) compared with the scores of its row, instead of the K-th largest; held constant.",
        "weight": "weight: (C,) class weights.",
        "row_weight": "row_weight: (...) a factor of the loss of each row; a mean divides by their sum.",
        "reduction": 'reduction: "none", "mean" or "sum".',
        "ignore_index": "ignore_index: an id that is no positive; a row without one has loss 0 and is not computed.",
        "label_smoothing": "label_smoothing: share of each positive that is spread evenly over the classes not masked.",
        "multilabel": 'multilabel: "sum" of the losses of a row\'s positives, or "normalized", the loss at t / |t|.',
        "num_items": "num_items: what a mean divides by instead of its own count, for batches that are accumulated.",
        "shift": "shift: `input` (B, T, d) and `target` (B, T) are sequences: position t predicts target t + 1.",
        "z_loss": "z_loss: c, adds c (log Z)^2 for each positive, Z the sum of exponentials.",
        "stats": "stats: what the result holds of each row beside the loss; see `LossResult`.",
        "options": "options: `HeadOptions` or a mapping of its fields.",
    }
    # A keyword that is added to `Keywords` fails here, at import, until it has its line.
    known = [f.name for f in fields(Keywords)]
    assert list(lines) == known, "every shared keyword has a line of documentation"
    return [line for name, line in lines.items() if name in names]


def _kernel_doc(member: Member) -> list[str]:
    """The docstring of the member's kernel without its first line, which names the kernel: formulas, examples."""
    text = inspect.getdoc(member.kernel) or ""
    return text.split("\n")[2:]
