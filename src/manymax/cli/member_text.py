"""What the commands tell of a member, before it gets a look: records for machines, words for tables."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from manymax.engine.member import Fact, Facts, Member

CONTRADICTED = "*"  # marks a fact that differs from what the paper prints


def member_json(member: Member) -> dict[str, Any]:
    """All that `FAMILY` says of a member, in types that JSON knows."""
    return {
        "name": member.name,
        "title": member.title,
        "kind": member.kind,
        "aliases": list(member.aliases),
        "calls": calls(member),
        "formulas": asdict(member.formulas),
        "facts": {name: _fact(fact) for name, fact in member.facts.items()},
        "settings": [_plain(settings) for settings in member.examples],
        "label_smoothing": member.takes.smoothing,
        "distributions": member.takes.float_rows,
        "citation": member.citation,
    }


def _fact(fact: Fact) -> dict[str, Any]:
    plain = {name: _plain(getattr(fact, name)) for name in ("value", "text", "source", "status", "printed")}
    return plain | {"computable": fact.fn is not None}


def _plain(value: Any) -> Any:
    """`value` in JSON's types; JSON has no infinity and no nan, so these become words."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, str | int) else str(value)


def calls(member: Member) -> dict[str, str]:
    """How the member's map, loss and module are called, by role."""
    roles = {"map": member.map, "loss": member.loss, "module": member.module}
    return {
        role: f"{_home(call)}.{call.__name__}{_signature(call)}" for role, call in roles.items() if call is not None
    }


def _home(call: Callable[..., Any]) -> str:
    """Where a function is imported from: the package, for what ships with it."""
    return "manymax" if call.__module__.startswith("manymax.") else call.__module__


def _signature(call: Callable[..., Any]) -> str:
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


def heading(name: str) -> str:
    """The name of a fact for people.

    >>> heading("shift_invariant"), heading("fenchel_young")
    ('shift invariant', 'Fenchel-Young')
    """
    return "Fenchel-Young" if name == "fenchel_young" else name.replace("_", " ")


def columns(members: Iterable[Member]) -> list[str]:
    """The facts that at least one of the members states, in the order of `Facts`."""
    stated = {name for member in members for name, _ in member.facts.items()}
    return [f.name for f in fields(Facts) if f.name in stated]


def cell(fact: Fact | None) -> str:
    """A fact in a word or two, marked where the paper prints something else.

    >>> cell(Fact(False, "not convex", "Table 1", "contradicted", printed="convex"))
    'no*'
    >>> cell(Fact(1.0, "1 wherever the support has two classes", "lemma B.6", "confirmed"))
    '1'
    >>> cell(None)
    '-'
    """
    if fact is None:
        return "-"
    return word(fact) + CONTRADICTED * (fact.status == "contradicted")


def word(fact: Fact) -> str:
    """The value of a fact as a word.

    >>> word(Fact(True, "convex in the scores", "appendix A.2", "confirmed"))
    'yes'
    """
    if fact.value is None:  # no single value: `fn` computes it from sizes and settings, where anything does
        return "depends" if fact.fn else "unknown"
    if isinstance(fact.value, bool):
        return "yes" if fact.value else "no"
    return f"{fact.value:g}" if isinstance(fact.value, float) else str(fact.value)
