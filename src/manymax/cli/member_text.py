"""A member of the family as JSON, and its facts as words for tables; several commands print these."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from manymax.engine.member import Fact, Facts, Member

CONTRADICTED_MARK = "*"  # marks a fact that differs from what the paper prints


def member_as_json(member: Member) -> dict[str, Any]:
    """Everything that `FAMILY` states about a member, in types that JSON knows."""
    return {
        "name": member.name,
        "title": member.title,
        "kind": member.kind,
        "aliases": list(member.aliases),
        "calls": calls(member),
        "formulas": asdict(member.formulas),
        "facts": {name: _fact_as_json(fact) for name, fact in member.facts.items()},
        "settings": [_as_json(settings) for settings in member.examples],
        "label_smoothing": member.takes.smoothing,
        "distributions": member.takes.float_rows,
        "citation": member.citation,
    }


def _fact_as_json(fact: Fact) -> dict[str, Any]:
    stated = {name: _as_json(getattr(fact, name)) for name in ("value", "text", "source", "status", "printed")}
    return stated | {"computable": fact.fn is not None}


def _as_json(value: Any) -> Any:
    """`value` in JSON's types; JSON has no infinity and no nan, so these become the words "inf" and "nan"."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, str | int) else str(value)


def calls(member: Member) -> dict[str, str]:
    """How to call the member's map, loss and module in Python: {"loss": "manymax.softmax_loss(scores, ...)", ...}."""
    roles = {"map": member.map, "loss": member.loss, "module": member.module}
    return {
        role: f"{_import_path(call)}.{call.__name__}{_signature(call)}"
        for role, call in roles.items()
        if call is not None
    }


def _import_path(call: Callable[..., Any]) -> str:
    """The module that users import `call` from: the package itself for what ships with it."""
    return "manymax" if call.__module__.startswith("manymax.") else call.__module__


def _signature(call: Callable[..., Any]) -> str:
    """The signature without type annotations, which would not fit into a line."""
    signature = inspect.signature(call)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(inspect.Signature(bare))


def settings_text(settings: Mapping[str, Any]) -> str:
    """Keyword arguments as one would type them.

    >>> settings_text({"alpha": 1.5, "multilabel": "sum"})
    "alpha=1.5, multilabel='sum'"
    >>> settings_text({})
    'defaults'
    """
    return ", ".join(f"{name}={value!r}" for name, value in settings.items()) or "defaults"


def fact_title(name: str) -> str:
    """The name of a fact as it is printed in tables.

    >>> fact_title("shift_invariant"), fact_title("fenchel_young")
    ('shift invariant', 'Fenchel-Young')
    """
    return "Fenchel-Young" if name == "fenchel_young" else name.replace("_", " ")


def stated_facts(members: Iterable[Member]) -> list[str]:
    """The names of the facts that at least one of the members states, in the order of the fields of `Facts`."""
    stated = {name for member in members for name, _ in member.facts.items()}
    return [f.name for f in fields(Facts) if f.name in stated]


def fact_cell(fact: Fact | None) -> str:
    """A fact in a word or two, with a mark where the paper prints something else.

    >>> fact_cell(Fact(False, "not convex", "Table 1", "contradicted", printed="convex"))
    'no*'
    >>> fact_cell(Fact(1.0, "1 wherever the support has two classes", "lemma B.6", "confirmed"))
    '1'
    >>> fact_cell(None)
    '-'
    """
    if fact is None:
        return "-"
    return fact_word(fact) + CONTRADICTED_MARK * (fact.status == "contradicted")


def fact_word(fact: Fact) -> str:
    """The value of a fact as a word.

    >>> fact_word(Fact(True, "convex in the scores", "appendix A.2", "confirmed"))
    'yes'
    """
    if fact.value is None:  # no single value: where it has `fn`, that computes it from sizes and settings
        return "depends" if fact.fn else "unknown"
    if isinstance(fact.value, bool):
        return "yes" if fact.value else "no"
    return f"{fact.value:g}" if isinstance(fact.value, float) else str(fact.value)
