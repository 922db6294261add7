"""The options of a run under flat names, which of them have an effect together, and nested and flat forms of settings.

Options are read from the tables (`FAMILY`, `SAMPLERS`, `BACKBONES`, ...) when they are asked for, so that a row that is
added to a table brings its settings along.

    nested   {"loss": {"name": "entmax", "alpha": 1.2}, "training": {"lr": 0.01}}
    flat     {"loss": "entmax", "alpha": 1.2, "lr": 0.01}
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from manymax.engine.member import Member, Setting
from manymax.engine.native_library import BACKENDS
from manymax.errors import ArgumentError, ManymaxError, unknown_name
from manymax.members import FAMILY, REFERENCE_LOSSES
from manymax.samplers import SAMPLERS
from manymax.study.backbones import BACKBONES
from manymax.study.computations import COMPUTATIONS, computation_names, has_native_code
from manymax.study.groups import ALL_GROUPS, GRADIENT, GROUPS, WITH_COMMAS, losses, solver_names

# The options of version 0.1.0 in their order. Records of that version hold the flat form, reports read it, and the hash
# of a run is computed from it: neither names nor order may change. Later options of all runs follow at the end.
FLAT_FORM = (
    *("data", "columns", "preset", "min_rating", "k_core", "size", "name", "split"),
    *("backbone", "dim", "layers", "attention_heads", "hidden", "dropout", "max_length", "positions"),
    *("init", "init_scale", "scale", "temperature"),
    *("loss", "alpha", "learnable_alpha", "order", "num_negatives", "sampler", "power", "smoothing", "pool"),
    *("codewords", "shared", "correction", "hit_policy", "debias", "log_z", "learnable_log_z"),
    *("multilabel", "label_smoothing", "computation", "solver", "ridge", "ridge_power", "positive_weight"),
    *("lr", "weight_decay", "batch_size", "batches", "chunk", "accumulate", "clip", "bf16", "threads"),
    *("epochs", "patience", "eval_every", "cutoffs", "monitor", "seed"),
    *("backend", "exclude", "decoupled", "compositional", "bound_epochs"),
    *("encoding", "date_format", "drop_missing"),
)

# Options that the oldest records do not have, with the value that they would have had. With this value they do not
# enter the hash of a run, which is then that of the older version.
LATER_OPTIONS = {
    "computation": "blocks",
    "backend": "auto",
    "exclude": "none",
    "decoupled": False,
    "compositional": None,
    "bound_epochs": 0,
    "encoding": None,
    "date_format": None,
    "drop_missing": False,
}
# The same for settings that losses of that version have got since.
LATER_SETTINGS = {"simplex": 1}

ResultT = TypeVar("ResultT")


def _cached_until_a_table_changes(function: Callable[[], ResultT]) -> Callable[[], ResultT]:
    """Cache the result of a function of the tables until a row is added to one of them: a study makes many configs."""
    cache: list[tuple[tuple[int, ...], ResultT]] = []

    @wraps(function)
    def cached() -> ResultT:
        versions = tuple(table.version for table in (FAMILY, REFERENCE_LOSSES, SAMPLERS, BACKBONES, COMPUTATIONS))
        if not cache or cache[-1][0] != versions:
            cache[:] = [(versions, function())]
        return cache[-1][1]

    return cached


Declared = dict[str, list[tuple[str, Setting]]]  # {option: [(name of a row, its setting), ...]}


@_cached_until_a_table_changes
def declared_settings() -> dict[str, Declared]:
    """The settings that the rows of the tables declare, by group and option.

    Raises:
        ManymaxError: two groups, or a row and every run, would have an option of the same name.
    """
    rows: dict[str, list[tuple[str, tuple[Setting, ...]]]] = {
        "backbone": [(row.name, row.settings) for row in BACKBONES.values()],
        "loss": [(member.name, member.settings) for member in losses().values()],
        "sampler": [(row.name, row.settings) for row in SAMPLERS.values()],
        "training": [(name, each.settings) for member in losses().values() for name, each in member.solvers.items()],
    }
    owners = {flat_name(group, name): "every run" for group, kind in ALL_GROUPS.items() for name in kind.model_fields}
    found: dict[str, Declared] = {}
    for group, rows_of_group in rows.items():
        found[group] = {}
        for row, settings in rows_of_group:
            for setting in with_switches(settings):
                name = setting.public_name
                if (owner := owners.setdefault(name, group)) != group:
                    raise ManymaxError(
                        f"setting `{name}` of {row!r}: {owner} has a setting of this name already. Declare it with "
                        "another `option`."
                    )
                found[group].setdefault(name, []).append((row, setting))
    return found


def with_switches(settings: Iterable[Setting]) -> Iterator[Setting]:
    """The settings; each one that can be learned is followed by its switch `learnable_...`."""
    for setting in settings:
        yield from (setting, *setting.switches())


@_cached_until_a_table_changes
def left_to_the_row() -> frozenset[str]:
    """Options whose unset value is None: rows declare them with different defaults, and None means the row's own."""
    every = (pair for declared in declared_settings().values() for pair in declared.items())
    return frozenset(name for name, rows in every if len({setting.default for _, setting in rows}) > 1)


def unset_value(setting: Setting) -> Any:
    """The value that a setting has in a run if it is not given."""
    return None if setting.public_name in left_to_the_row() else setting.default


@dataclass(frozen=True)
class Option:
    """A setting of a run under its flat name, as the command line and the documentation show it.

    name: the flat name.
    group: the group that it belongs to; "" for those without a group.
    kind: bool, int, float or str; str also for lists and mappings, which are written as text on a command line.
    default: its value if it is not given.
    help: one or two sentences.
    choices: the words that are allowed; empty if any value of the kind is.
    has_commas: whether a value may have commas, so that they do not separate several values.
    """

    name: str
    group: str
    kind: type
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    has_commas: bool = False


@_cached_until_a_table_changes
def options() -> tuple[Option, ...]:
    """All options that a run has, in the order of `FLAT_FORM`; later ones at the end."""
    found = {option.name: option for option in (*_fixed_options(), *_declared_options())}
    return tuple(found[name] for name in dict.fromkeys((*FLAT_FORM, *found)) if name in found)


def _fixed_options() -> Iterator[Option]:
    """The options that every run has: the fields of the groups."""
    # What replaces `{}` in a description.
    names: dict[str, Iterable[str]] = {"backbone": BACKBONES, "loss": REFERENCE_LOSSES, "sampler": SAMPLERS}
    choices = {"solver": tuple(solver_names()), "computation": computation_names(), "backend": BACKENDS}
    for group, kind in ALL_GROUPS.items():
        for key, field in kind.model_fields.items():
            name = flat_name(group, key)
            kinds = [each for each in _alternatives(field.annotation) if each is not types.NoneType]
            words = tuple(str(word) for each in kinds if get_origin(each) is Literal for word in get_args(each))
            yield Option(
                name,
                group,
                kinds[0] if kinds[0] in (bool, int, float) else str,
                field.default,
                str(field.description).format(", ".join(names.get(name, ()))),
                choices.get(name, words),
                has_commas=field.json_schema_extra == WITH_COMMAS,
            )


def _declared_options() -> Iterator[Option]:
    """The options that rows declare; one that several rows declare has the help texts and choices of all of them."""
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


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The types of a union; of any other annotation itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


Rule = tuple[tuple[str, ...], str, tuple[str, ...]]


@_cached_until_a_table_changes
def rules() -> tuple[Rule, ...]:
    """Which options have an effect with which others.

    A rule (options, deciding option, values) says: these options have an effect only if the deciding option has one of
    the values; otherwise they must keep their default. If the deciding option of a rule is itself subject to rules,
    those come before, so that one pass in this order suffices.
    """
    return tuple(_make_rules())


def _make_rules() -> Iterator[Rule]:
    members = losses().values()
    declared = declared_settings()
    yield from _rules_of(declared["loss"], "loss")
    yield ("sampler", "num_negatives", "shared"), "loss", _names(m for m in members if m.kind == "sampled")
    yield ("label_smoothing",), "loss", _names(m for m in members if m.takes.smoothing)
    yield ("exclude",), "loss", _names(m for m in members if m.kind in ("exact", "sampled"))
    yield ("decoupled",), "loss", _names(m for m in members if m.log_partition)
    yield from _rules_of(declared["sampler"], "sampler")
    yield from _rules_of(declared["backbone"], "backbone")
    yield ("bound_epochs",), "loss", _names(m for m in members if m.bounded)
    yield ("batches", "exclude", "bound_epochs"), "backbone", tuple(row.name for row in BACKBONES.values() if row.pairs)
    yield ("chunk",), "batches", ("chunks",)
    yield ("multilabel",), "batches", ("users",)
    yield ("temperature",), "scale", ("cosine",)
    yield from _rules_of(declared["training"], "solver")
    gradient_options = ("lr", "weight_decay", "batch_size", "batches", "chunk", "accumulate", "clip", "bf16")
    yield (*gradient_options, "label_smoothing", "exclude", "decoupled", "bound_epochs"), "solver", (GRADIENT,)
    # Which members a computation takes is not asked here: that would import the packages of all computations.
    yield ("computation",), "loss", _names(m for m in members if m.kind == "exact")
    yield ("backend",), "loss", _names(m for m in members if has_native_code(m))


def _rules_of(declared: Declared, chooser: str) -> Iterator[Rule]:
    """An option that rows declare has an effect if the `chooser` chooses one of these rows."""
    for name, rows in declared.items():
        yield (name,), chooser, tuple(dict.fromkeys(row for row, _ in rows))


def _names(members: Iterable[Member]) -> tuple[str, ...]:
    return tuple(member.name for member in members)


# Nested and flat ---------------------------------------------------------------------------------


def flat_name(group: str, key: str) -> str:
    """The flat name of the setting `group.key`: the name of the group if it chooses a row of a table, else `key`."""
    return group if group in GROUPS and GROUPS[group].chooser == key else key


def flattened(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under their flat names, from nested tables, dotted keys, flat names or a mixture of them.

    Names are checked, values are not: a name that does not exist and a setting that is given twice are errors.

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
            raise ArgumentError(f"`{path}` is a group of settings, so it must be a table; got {value!r}.")
        if not dot and path not in flat_names:
            raise unknown_name("option", path, [*flat_names, *(name for name in GROUPS if name not in flat_names)])
        if dot and group not in GROUPS:
            raise unknown_name("group of settings", group, GROUPS)
        if dot and key not in known[group]:
            raise unknown_name(f"setting of {group}", key, known[group])
        name = flat_name(group, key) if dot else path
        if name in found:
            raise ArgumentError(f"`{name}` is given twice, under its flat name and in its group. Give it once.")
        found[name] = value
    return found


def _paths(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of nested settings; (name, value) of flat ones."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and key in GROUPS:
            yield from ((f"{key}.{inner}", each) for inner, each in value.items())
        else:
            yield key, value


def by_flat_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under their flat names, without checks: names of another version are kept."""
    paths = ((path.partition("."), value) for path, value in _paths(settings))
    return {flat_name(group, key) if dot else group: value for (group, dot, key), value in paths}


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a record in the flat form, whichever form the record has.

    A nested record leaves out settings that have no effect; here they have their default. A flat record, of version
    0.1.0, is returned as it was written. Settings that this version does not know are kept.

    >>> flat({"loss": {"name": "rg"}, "seed": 3})["loss"], flat({"seed": 3, "loss": {"name": "rg"}})["lr"]
    ('rg', 0.001)
    >>> flat({"loss": "rg", "lr": 0.1})
    {'loss': 'rg', 'lr': 0.1}
    """
    if not any(isinstance(value, Mapping) and key in GROUPS for key, value in settings.items()):
        return dict(settings)
    found = by_flat_name(settings)
    defaults = {option.name: option.default for option in options()}
    in_order = {name: defaults[name] for name in FLAT_FORM if name in defaults}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in (in_order | found).items()}


def with_source(settings: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """The settings of a record, in the form that they have, with the name of the data source changed by `rename`.

    >>> with_source({"data": {"source": "a/b.csv"}, "seed": 0}, str.upper)
    {'data': {'source': 'A/B.CSV'}, 'seed': 0}
    """
    data = settings["data"]
    if isinstance(data, Mapping):
        return {**settings, "data": {**data, "source": rename(data["source"])}}
    return {**settings, "data": rename(data)}
