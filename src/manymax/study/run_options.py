"""What a run can be set to now, as the tables say: options under flat names, and which of them have an effect together.

Settings are nested by group or flat; here one form is made from the other.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from manymax.engine.member import Member, Setting
from manymax.errors import ArgumentError, ManymaxError, unknown_name
from manymax.members import FAMILY, REFERENCE_LOSSES
from manymax.samplers import SAMPLERS
from manymax.study.backbones import BACKBONES
from manymax.study.computations import USUAL, computations
from manymax.study.groups import ALL_GROUPS, GRADIENT, GROUPS, losses, solver_names

# The flat form of version 0.1.0: its options in their order. Records of that version hold it, reports read it, and the
# hash of a run is one of its entries. An option that came later follows these.
FLAT_FORM = (
    *("data", "columns", "preset", "min_rating", "k_core", "size", "name", "split"),
    *("backbone", "dim", "layers", "attention_heads", "hidden", "dropout", "max_length", "positions"),
    *("init", "init_scale", "scale", "temperature"),
    *("loss", "alpha", "learnable_alpha", "order", "num_negatives", "sampler", "power", "smoothing", "pool"),
    *("codewords", "shared", "correction", "hit_policy", "debias", "log_z", "learnable_log_z"),
    *("multilabel", "label_smoothing", "computation", "solver", "ridge", "ridge_power", "positive_weight"),
    *("lr", "weight_decay", "batch_size", "batches", "chunk", "accumulate", "clip", "bf16", "threads"),
    *("epochs", "patience", "eval_every", "cutoffs", "monitor", "seed"),
)

# Options whose unset value is None, whatever default a row declares: several rows have them, each with its own default.
LEFT_TO_THE_ROW = ("hit_policy",)

FoundT = TypeVar("FoundT")


def _until_a_table_changes(function: Callable[[], FoundT]) -> Callable[[], FoundT]:
    """Remember what is read from the tables for as long as they have the same rows: a study makes many configs."""
    last: list[tuple[tuple[int, ...], FoundT]] = []

    @wraps(function)
    def remembered() -> FoundT:
        now = tuple(table.version for table in (FAMILY, REFERENCE_LOSSES, SAMPLERS, BACKBONES, computations()))
        if not last or last[-1][0] != now:
            last[:] = [(now, function())]
        return last[-1][1]

    return remembered


Declared = dict[str, list[tuple[str, Setting]]]  # {option: [(row, its setting), ...]}


@_until_a_table_changes
def declared_settings() -> dict[str, Declared]:
    """What the rows of the tables can be set to, by group; an error where one option would mean two things."""
    rows: dict[str, list[tuple[str, tuple[Setting, ...]]]] = {
        "backbone": [(row.name, row.settings) for row in BACKBONES.values()],
        "loss": [(member.name, member.settings) for member in losses().values()],
        "sampler": [(row.name, row.settings) for row in SAMPLERS.values()],
        "training": [(name, each.settings) for member in losses().values() for name, each in member.solvers.items()],
    }
    taken = {flat_name(group, name): "every run" for group, kind in ALL_GROUPS.items() for name in kind.model_fields}
    found: dict[str, Declared] = {}
    for group, settings_of in rows.items():
        found[group] = {}
        for row, settings in settings_of:
            for setting in with_switches(settings):
                name = setting.public_name
                if (owner := taken.setdefault(name, group)) != group:
                    raise ManymaxError(
                        f"setting `{name}` of {row!r}: this name is taken by {owner}. Declare it with another `option`."
                    )
                found[group].setdefault(name, []).append((row, setting))
    return found


def with_switches(settings: Iterable[Setting]) -> Iterator[Setting]:
    """Settings, each followed by the switch that makes it a parameter, where it can be learned."""
    for setting in settings:
        yield from (setting, *setting.switches())


def unset_value(setting: Setting) -> Any:
    """The value of a setting that nobody gives."""
    return None if setting.public_name in LEFT_TO_THE_ROW else setting.default


@dataclass(frozen=True)
class Option:
    """A setting of a run under its flat name, as the command line and the documentation see it.

    kind: bool, int, float, or str, which also stands for what is written as text. choices: of a word.
    """

    name: str
    group: str
    kind: type
    default: Any
    help: str
    choices: tuple[str, ...] = ()


@_until_a_table_changes
def options() -> tuple[Option, ...]:
    """Every option that there is now, in the order of the flat form; those that came later at the end."""
    found = {option.name: option for option in (*_fixed_options(), *_declared_options())}
    return tuple(found[name] for name in dict.fromkeys((*FLAT_FORM, *found)) if name in found)


def _fixed_options() -> Iterator[Option]:
    names: dict[str, Iterable[str]] = {"backbone": BACKBONES, "loss": REFERENCE_LOSSES, "sampler": SAMPLERS}
    choices = {"solver": tuple(solver_names()), "computation": tuple(computations())}
    for group, kind in ALL_GROUPS.items():
        for key, field in kind.model_fields.items():
            name = flat_name(group, key)
            kinds = [each for each in _kinds(field.annotation) if each is not types.NoneType]
            words = tuple(str(word) for each in kinds if get_origin(each) is Literal for word in get_args(each))
            yield Option(
                name,
                group,
                kinds[0] if kinds[0] in (bool, int, float) else str,
                field.default,
                str(field.description).format(", ".join(names.get(name, ()))),
                choices.get(name, words),
            )


def _declared_options() -> Iterator[Option]:
    for group, declared in declared_settings().items():
        for name, rows in declared.items():
            settings = [setting for _, setting in rows]
            kinds = {setting.kind for setting in settings}
            yield Option(
                name,
                group,
                settings[0].kind if len(kinds) == 1 else str,
                unset_value(settings[0]),
                " ".join(dict.fromkeys(setting.help for setting in settings)),
                tuple(dict.fromkeys(word for setting in settings for word in setting.choices)),
            )


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


Rule = tuple[tuple[str, ...], str, tuple[str, ...]]


@_until_a_table_changes
def rules() -> tuple[Rule, ...]:
    """(options, deciding option, values): elsewhere these options have no effect and must keep their default.

    The deciding option of a rule stands in rules before it, if at all.
    """
    return tuple(_every_rule())


def _every_rule() -> Iterator[Rule]:
    members = losses().values()
    declared = declared_settings()
    yield from _rules_of(declared["loss"], "loss")
    yield ("sampler", "num_negatives", "shared"), "loss", _names(m for m in members if m.kind == "sampled")
    yield ("label_smoothing",), "loss", _names(m for m in members if m.takes.smoothing)
    yield from _rules_of(declared["sampler"], "sampler")
    yield from _rules_of(declared["backbone"], "backbone")
    yield ("batches",), "backbone", tuple(row.name for row in BACKBONES.values() if row.pairs)
    yield ("chunk",), "batches", ("chunks",)
    yield ("multilabel",), "batches", ("users",)
    yield ("temperature",), "scale", ("cosine",)
    yield from _rules_of(declared["training"], "solver")
    of_gradients = ("lr", "weight_decay", "batch_size", "batches", "chunk", "accumulate", "clip", "bf16")
    yield (*of_gradients, "label_smoothing"), "solver", (GRADIENT,)
    ways = [way for way in computations().values() if way.name != USUAL]
    yield ("computation",), "loss", _names(m for m in members if any(way.takes(m) for way in ways))


def _rules_of(declared: Declared, chooser: str) -> Iterator[Rule]:
    for name, rows in declared.items():
        yield (name,), chooser, tuple(dict.fromkeys(row for row, _ in rows))


def _names(members: Iterable[Member]) -> tuple[str, ...]:
    return tuple(member.name for member in members)


# Nested and flat ---------------------------------------------------------------------------------


def flat_name(group: str, key: str) -> str:
    """The flat name of a setting: that of the group for what chooses a row."""
    return group if group in GROUPS and GROUPS[group].chooser == key else key


def flattened(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under their flat names, from nested tables, dotted keys, flat names or a mixture; values are not read.

    An error for a name that does not exist, and for a setting that is given twice.

    >>> flattened({"loss": {"name": "entmax", "alpha": 1.2}, "training.lr": 0.01, "seed": 3})
    {'loss': 'entmax', 'alpha': 1.2, 'lr': 0.01, 'seed': 3}
    """
    known: dict[str, list[str]] = {group: list(kind.model_fields) for group, kind in GROUPS.items()}
    for group, declared in declared_settings().items():
        known[group] += declared
    flat_names = [option.name for option in options()]
    found: dict[str, Any] = {}
    for path, value in _paths(settings):
        group, dot, key = path.partition(".")
        if not dot and path in GROUPS and path not in flat_names:
            raise ArgumentError(f"`{path}` is a group of settings: it must be a table; got {value!r}.")
        if not dot and path not in flat_names:
            raise unknown_name("option", path, [*flat_names, *(name for name in GROUPS if name not in flat_names)])
        if dot and group not in GROUPS:
            raise unknown_name("group of settings", group, GROUPS)
        if dot and key not in known[group]:
            raise unknown_name(f"setting of {group}", key, known[group])
        name = flat_name(group, key) if dot else path
        if name in found:
            raise ArgumentError(f"`{name}` is given twice, flat and as a setting of its group. Give it once.")
        found[name] = value
    return found


def _paths(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of nested settings; what is flat keeps its name."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and key in GROUPS:
            yield from ((f"{key}.{inner}", each) for inner, each in value.items())
        else:
            yield key, value


def by_flat_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under their flat names, whatever they are."""
    paths = ((path.partition("."), value) for path, value in _paths(settings))
    return {flat_name(group, key) if dot else group: value for (group, dot, key), value in paths}


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a record in the flat form of version 0.1.0, whichever form the record has.

    What a nested record leaves out, because it has no effect, has its default. A flat one, of that version, is as it
    was written. Settings that this version does not know are kept.

    >>> flat({"loss": {"name": "rg"}, "seed": 3})["loss"], flat({"seed": 3, "loss": {"name": "rg"}})["lr"]
    ('rg', 0.001)
    >>> flat({"loss": "rg", "lr": 0.1})
    {'loss': 'rg', 'lr': 0.1}
    """
    if not any(isinstance(value, Mapping) and key in GROUPS for key, value in settings.items()):
        return dict(settings)
    found = by_flat_name(settings)
    defaults = {option.name: option.default for option in options()}
    of_old = {name: defaults[name] for name in FLAT_FORM if name in defaults}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in (of_old | found).items()}


def with_source(settings: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """The settings of a record, in the form that they have, with another name of where the data comes from.

    >>> with_source({"data": {"source": "a/b.csv"}, "seed": 0}, str.upper)
    {'data': {'source': 'A/B.CSV'}, 'seed': 0}
    """
    data = settings["data"]
    if isinstance(data, Mapping):
        return {**settings, "data": {**data, "source": rename(data["source"])}}
    return {**settings, "data": rename(data)}
