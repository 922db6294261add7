"""`RunConfig`: every setting of a run, in groups, with its default and its meaning; the source of options and records.

    data         where interactions come from, what is kept of them and how they are split
    backbone     what makes user and item vectors, with the settings that its row of `BACKBONES` declares
    scores       how vectors become scores
    loss         a member of the family or a reference, with the settings that its record declares
    sampler      where negatives come from, with the settings that its row of `SAMPLERS` declares
    training     batches and steps, and what a solver other than gradients declares
    evaluation   what is measured and watched
    machine      what changes the time that a run takes rather than what it learns
    seed         of all random numbers

Every setting also has a flat name of its own: that within its group, or that of the group for what chooses a row
(`loss` is `loss.name`, `data` is `data.source`). Commands, files and Python take either form, records hold the nested
one. What belongs to a row of a table is read from the table when a config is made, so that a row added to it before
brings its settings along.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from manymax.engine.member import Member, Setting
from manymax.errors import ArgumentError, ManymaxError, check_choice, unknown_name
from manymax.members import BASELINE, FAMILY, REFERENCES
from manymax.samplers import SAMPLERS
from manymax.study.backbones import BACKBONES
from manymax.study.computations import USUAL, computations
from manymax.study.metrics import METRICS

GRADIENT = "gradient"  # the solver that every loss has

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


class Group(BaseModel):
    """Some settings that belong together; `chooser` is the field whose flat name is that of the group."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    chooser: ClassVar[str | None] = None


class RowGroup(Group):
    """A group that chooses a row of a table, and holds the settings that this row declares beside its fields."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    @property
    def own(self) -> dict[str, Any]:
        """What the chosen row declares, by the names that its settings have outside of it."""
        return dict(self.model_extra or {})


class DataSettings(Group):
    """Where interactions come from, what is kept of them and how they are split."""

    chooser = "source"

    source: str = Field("planted", description="A built-in set, a downloaded one, or a CSV, TSV or Parquet file.")
    columns: dict[str, str] | None = Field(None, description="Of an own file: user=..,item=..,rating=..,time=..")
    preset: str | None = Field(None, description="Filters as in the paper: paper-table or paper-text.")
    min_rating: float | None = Field(None, description="Keep interactions with at least this rating.")
    k_core: int | None = Field(None, ge=1, description="Keep users and items with at least this many interactions.")
    size: str | None = Field(None, description="Of planted data: tiny, small, medium, ml-1m or USERSxITEMSxMEAN.")
    name: str | None = Field(None, description="What the set in an own file is called; presets go by it.")
    split: Literal["ratio", "ratio-time", "leave-one-out", "given"] | None = Field(
        None, description="Of each user's items; as given by the file if it has a split, else 0.8/0.1/0.1 at random."
    )

    @field_validator("columns", mode="before")
    @classmethod
    def _columns(cls, value: Any) -> Any:
        """ "user=u,item=i" as a mapping."""
        if not isinstance(value, str):
            return value
        pairs = [part.partition("=") for part in value.split(",")]
        if not all(left.strip() and right.strip() for left, _, right in pairs):
            raise ArgumentError(f"`columns` must look like user=..,item=..; got {value!r}.")
        return {left.strip(): right.strip() for left, _, right in pairs}


class BackboneSettings(RowGroup):
    """What makes user and item vectors."""

    chooser = "name"

    name: str = Field("mf", description="What makes user and item vectors: {}.")
    dim: int = Field(64, ge=1, description="Length of the vectors.")
    init: Literal["normal", "xavier"] = Field("normal", description="Law of the first weights.")
    init_scale: float = Field(0.02, gt=0, description="Standard deviation of the normal law.")

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        """The canonical name."""
        return BACKBONES[value].name


class ScoreSettings(Group):
    """How vectors become scores."""

    scale: Literal["dot", "cosine"] = Field("dot", description="Scores: inner products, or cosines / temperature.")
    temperature: float = Field(0.1, gt=0, description="What cosines are divided by.")


class LossSettings(RowGroup):
    """What is minimised."""

    chooser = "name"

    name: str = Field(BASELINE.name, description="A member of the family (`manymax losses`), or {}.")
    multilabel: Literal["sum", "normalized"] = Field("sum", description="Sum over a user's positives, or mean.")
    label_smoothing: float = Field(0.0, ge=0, le=1, description="Share of the target spread over all items.")

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        """The canonical name."""
        return find_loss(value).name


class SamplerSettings(RowGroup):
    """Where the negatives of a loss that draws some come from."""

    chooser = "name"

    name: str = Field("uniform", description="Of negatives: {}.")
    num_negatives: int = Field(100, ge=0, description="Negatives of each positive; 0: the batch, with in_batch.")
    shared: bool = Field(False, description="One draw of negatives for all rows of a batch.")

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        """The canonical name."""
        return SAMPLERS[value].name


class TrainingSettings(RowGroup):
    """Batches and steps, and when they end."""

    solver: str = Field(GRADIENT, description="Adam, or a way of the loss itself, such as alternating least squares.")
    lr: float = Field(1e-3, gt=0, description="Learning rate of Adam.")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty, added to the gradient as Adam does.")
    batch_size: int = Field(2048, ge=1, description="Positives of a batch.")
    batches: Literal["pairs", "chunks", "users"] = Field(
        "pairs", description="Of (user, item) pairs, of a few pairs of some users, or of all their pairs."
    )
    chunk: int = Field(8, ge=1, description="Pairs of a user that stay together in chunks.")
    accumulate: int = Field(1, ge=1, description="Batches whose gradients are averaged for one step.")
    clip: float | None = Field(None, gt=0, description="Largest norm of the gradient.")
    bf16: bool = Field(False, description="Matrix products in bfloat16.")
    epochs: int = Field(1000, ge=1, description="At most this many.")
    patience: int = Field(10, ge=1, description="Evaluations without a better value before training ends.")
    eval_every: int = Field(1, ge=1, description="Epochs between evaluations on the validation part.")

    @field_validator("solver")
    @classmethod
    def _solver(cls, value: str) -> str:
        check_choice("solver", value, solver_names())
        return value


class EvaluationSettings(Group):
    """What is measured and watched."""

    cutoffs: tuple[int, ...] = Field((20,), min_length=1, description="Lengths of the lists that metrics look at.")
    monitor: str | None = Field(None, description="What early stopping watches, else ndcg at the largest cutoff.")

    @field_validator("cutoffs", mode="before")
    @classmethod
    def _cutoffs(cls, value: Any) -> Any:
        """ "5,20" or 20 as a tuple."""
        if isinstance(value, str):
            value = value.split(",")
        return (value,) if isinstance(value, int) else value

    @field_validator("cutoffs")
    @classmethod
    def _sorted(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if min(value) < 1:
            raise ArgumentError(f"`cutoffs` must be at least 1; got {min(value)}.")
        return tuple(sorted(set(value)))


class MachineSettings(Group):
    """What changes the time that a run takes."""

    threads: int | None = Field(None, ge=1, description="Processor threads; the default is torch's.")
    computation: str = Field(
        USUAL, description="Of exact losses: blocks, also compiled; to compare, whole tables, also with detached items."
    )

    @field_validator("computation")
    @classmethod
    def _computation(cls, value: str) -> str:
        return computations()[value].name


class General(Group):
    """Settings that belong to no group: nested and flat they have the same name."""

    seed: int = Field(0, ge=0, description="Makes split, first weights, order, negatives and dropout.")


GROUPS: dict[str, type[Group]] = {
    "data": DataSettings,
    "backbone": BackboneSettings,
    "scores": ScoreSettings,
    "loss": LossSettings,
    "sampler": SamplerSettings,
    "training": TrainingSettings,
    "evaluation": EvaluationSettings,
    "machine": MachineSettings,
}
ALL_GROUPS: dict[str, type[Group]] = {**GROUPS, "": General}


# What the tables say -----------------------------------------------------------------------------


def losses() -> dict[str, Member]:
    """What a run can minimise: the members of the family, then the references beside it."""
    return {member.name: member for table in (FAMILY, REFERENCES) for member in table.values()}


def find_loss(name: str) -> Member:
    """The member or reference of this name, or of this other name."""
    for table in (FAMILY, REFERENCES):
        if name in table:
            return table[name]
    raise unknown_name("loss", name, losses())


def solver_names() -> list[str]:
    """The solvers that some loss has."""
    return [GRADIENT, *dict.fromkeys(name for member in losses().values() for name in member.solvers)]


FoundT = TypeVar("FoundT")


def _until_a_table_changes(function: Callable[[], FoundT]) -> Callable[[], FoundT]:
    """Remember what is read from the tables for as long as they have the same rows: a study makes many configs."""
    last: list[tuple[tuple[int, ...], FoundT]] = []

    @wraps(function)
    def remembered() -> FoundT:
        now = tuple(table.version for table in (FAMILY, REFERENCES, SAMPLERS, BACKBONES, computations()))
        if not last or last[-1][0] != now:
            last[:] = [(now, function())]
        return last[-1][1]

    return remembered


Declared = dict[str, list[tuple[str, Setting]]]  # {option: [(row, its setting), ...]}


@_until_a_table_changes
def _declared() -> dict[str, Declared]:
    """What the rows of the tables can be set to, by group; an error where one option would mean two things."""
    rows: dict[str, list[tuple[str, tuple[Setting, ...]]]] = {
        "backbone": [(row.name, row.settings) for row in BACKBONES.values()],
        "loss": [(member.name, member.settings) for member in losses().values()],
        "sampler": [(row.name, row.settings) for row in SAMPLERS.values()],
        "training": [(name, each.settings) for member in losses().values() for name, each in member.solvers.items()],
    }
    taken = {_flat_name(group, name): "every run" for group, kind in ALL_GROUPS.items() for name in kind.model_fields}
    found: dict[str, Declared] = {}
    for group, settings_of in rows.items():
        found[group] = {}
        for row, settings in settings_of:
            for setting in _with_switches(settings):
                name = setting.public_name
                if (owner := taken.setdefault(name, group)) != group:
                    raise ManymaxError(
                        f"setting `{name}` of {row!r}: this name is taken by {owner}. Declare it with another `option`."
                    )
                found[group].setdefault(name, []).append((row, setting))
    return found


def _with_switches(settings: Iterable[Setting]) -> Iterator[Setting]:
    """Settings, each followed by the switch that makes it a parameter, where it can be learned."""
    for setting in settings:
        yield from (setting, *setting.switches())


def _unset(setting: Setting) -> Any:
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
    names: dict[str, Iterable[str]] = {"backbone": BACKBONES, "loss": REFERENCES, "sampler": SAMPLERS}
    choices = {"solver": tuple(solver_names()), "computation": tuple(computations())}
    for group, kind in ALL_GROUPS.items():
        for key, field in kind.model_fields.items():
            name = _flat_name(group, key)
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
    for group, declared in _declared().items():
        for name, rows in declared.items():
            settings = [setting for _, setting in rows]
            kinds = {setting.kind for setting in settings}
            yield Option(
                name,
                group,
                settings[0].kind if len(kinds) == 1 else str,
                _unset(settings[0]),
                " ".join(dict.fromkeys(setting.help for setting in settings)),
                tuple(dict.fromkeys(word for setting in settings for word in setting.choices)),
            )


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


Rule = tuple[tuple[str, ...], str, tuple[str, ...]]


@_until_a_table_changes
def _rules() -> tuple[Rule, ...]:
    """(options, deciding option, values): elsewhere these options have no effect and must keep their default.

    The deciding option of a rule stands in rules before it, if at all.
    """
    return tuple(_every_rule())


def _every_rule() -> Iterator[Rule]:
    members = losses().values()
    declared = _declared()
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


def _flat_name(group: str, key: str) -> str:
    return group if group in GROUPS and GROUPS[group].chooser == key else key


def flattened(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under their flat names, from nested tables, dotted keys, flat names or a mixture; values are not read.

    An error for a name that does not exist, and for a setting that is given twice.

    >>> flattened({"loss": {"name": "entmax", "alpha": 1.2}, "training.lr": 0.01, "seed": 3})
    {'loss': 'entmax', 'alpha': 1.2, 'lr': 0.01, 'seed': 3}
    """
    known: dict[str, list[str]] = {group: list(kind.model_fields) for group, kind in GROUPS.items()}
    for group, declared in _declared().items():
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
        name = _flat_name(group, key) if dot else path
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


def _by_flat_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under their flat names, whatever they are."""
    paths = ((path.partition("."), value) for path, value in _paths(settings))
    return {_flat_name(group, key) if dot else group: value for (group, dot, key), value in paths}


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
    found = _by_flat_name(settings)
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


# The settings of a run ---------------------------------------------------------------------------


class RunConfig(BaseModel):
    """The settings of one run, in groups; options of `manymax train`, keys of a TOML file and of a record.

    Unknown keys, wrong types, values out of range and settings that would have no effect are refused with an
    `ArgumentError`.

    Args:
        settings: nested (`loss={"name": "ssm"}`), flat (`loss="ssm"`), or some of both.

    Example:
        >>> config = RunConfig(loss="ssm", num_negatives=50)
        >>> config.loss.name, config.sampler.num_negatives
        ('sampled_softmax', 50)
        >>> config == RunConfig(loss={"name": "ssm"}, sampler={"num_negatives": 50})
        True
        >>> RunConfig(lr=0.0)
        Traceback (most recent call last):
        manymax.errors.ArgumentError: `lr`: input should be greater than 0; got 0.0.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: DataSettings
    backbone: BackboneSettings
    scores: ScoreSettings
    loss: LossSettings
    sampler: SamplerSettings
    training: TrainingSettings
    evaluation: EvaluationSettings
    machine: MachineSettings
    seed: int

    def __init__(self, **settings: Any) -> None:
        given = flattened(settings)
        fixed = _fixed_groups(given)
        super().__init__(**_with_own(fixed, given), seed=fixed[""].seed)  # type: ignore[attr-defined]
        self._check_idle(given)
        self._check_solver()
        self._check_computation()
        self._check_monitor()

    @property
    def member(self) -> Member:
        """The record of the loss."""
        return find_loss(self.loss.name)

    @property
    def monitored(self) -> str:
        """The metric that early stopping watches, for example "ndcg@20"."""
        return self.evaluation.monitor or f"ndcg@{max(self.evaluation.cutoffs)}"

    # Checks of what only several settings together can tell

    def _check_idle(self, given: Mapping[str, Any]) -> None:
        usual, now = {option.name: option for option in options()}, self._values()
        declared = {name: rows for group in _declared().values() for name, rows in group.items()}
        for name, (option, values) in self._idle().items():
            if name in now:
                idle = now[name] == usual[name].default
            else:  # a setting of another row: it is there only as it was given
                idle = name not in given or any(_is_default(setting, given[name]) for _, setting in declared[name])
            if not idle:
                known = " or ".join(map(repr, values))
                raise ArgumentError(
                    f"`{name}` has no effect with {option} {now[option]!r}: it belongs to {option} {known}. "
                    "Leave it out."
                )

    def _check_solver(self) -> None:
        solver, rows = self.training.solver, BACKBONES.values()
        if solver == GRADIENT:
            return
        fits = solver in self.member.solvers and BACKBONES[self.backbone.name].factors and self.scores.scale == "dot"
        if not fits:
            solved = " or ".join(repr(name) for name, member in losses().items() if solver in member.solvers)
            places = " or ".join(repr(row.name) for row in rows if row.factors)
            raise ArgumentError(
                f"`solver={solver!r}` solves loss {solved} on backbone {places} with scale 'dot'; got another."
            )

    def _check_computation(self) -> None:
        way, member = computations()[self.machine.computation], self.member
        if not way.takes(member):
            known = ", ".join(name for name, other in losses().items() if way.takes(other))
            raise ArgumentError(f"`computation={way.name!r}` is for {known}; got {member.name!r}.")
        if not way.defaults_only:
            return
        usual = {setting.public_name: _unset(setting) for setting in _with_switches(member.settings)}
        usual |= {"label_smoothing": 0.0, "multilabel": "sum"}
        now = self._values()
        if any(now[name] != value for name, value in usual.items()):
            known = ", ".join(f"{name} {value!r}" for name, value in usual.items())
            raise ArgumentError(f"`computation={way.name!r}` knows {known} alone.")

    def _check_monitor(self) -> None:
        metric, at, cutoff = self.monitored.partition("@")
        check_choice("monitor", metric, METRICS)
        if not at:
            cutoffs = " or ".join(f"{metric}@{each}" for each in self.evaluation.cutoffs)
            raise ArgumentError(f"`monitor` must name a cutoff, {cutoffs}; got {self.monitored!r}.")
        check_choice("monitor", cutoff, map(str, self.evaluation.cutoffs))

    # What has an effect

    @classmethod
    def trimmed(cls, settings: Mapping[str, Any]) -> RunConfig:
        """A config from settings of which some may have no effect: those keep their default. For grids.

        >>> RunConfig.trimmed({"loss": "softmax", "alpha": 1.2, "lr": 0.01}).loss.own
        {}
        """
        given, rules = flattened(settings), _rules()
        deciding, sketch = {option for _, option, _ in rules}, cls()
        depending = {name for names, _, _ in rules for name in names}
        for names in (deciding - depending, deciding, set(given)):  # a sampler is chosen where the loss takes one
            sketch = cls(**{name: value for name, value in given.items() if name in names - sketch.unused()})
        return sketch

    def unused(self) -> set[str]:
        """The flat names of options that have no effect beside the others."""
        return set(self._idle())

    def _idle(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """{option without effect: (option that decides so, its values that would give it one)}."""
        idle: dict[str, tuple[str, tuple[str, ...]]] = {}
        now = self._values()
        for names, option, values in _rules():  # an option that has no effect itself gives none to others
            if now[option] not in values or option in idle:
                idle |= {name: (option, values) for name in names if name not in idle}
        return idle

    # Forms

    def _values(self) -> dict[str, Any]:
        """The settings that the groups hold, by their flat names."""
        found = {"seed": self.seed}
        for group in GROUPS:
            found |= {_flat_name(group, key): value for key, value in getattr(self, group)}
        return found

    def flat(self) -> dict[str, Any]:
        """All settings by their flat names, as JSON has them; those of rows that are not chosen have their default."""
        return flat(self.model_dump(mode="json"))

    def nested(self) -> dict[str, Any]:
        """The settings that have an effect, in their groups, as JSON has them: what records hold.

        >>> RunConfig(loss="entmax").nested()["loss"]
        {'name': 'entmax', 'label_smoothing': 0.0, 'alpha': 1.5, 'learnable_alpha': False}
        """
        unused = self.unused()
        found: dict[str, Any] = {}
        for group, content in self.model_dump(mode="json").items():
            if group not in GROUPS:
                found[group] = content
            elif kept := {key: each for key, each in content.items() if _flat_name(group, key) not in unused}:
                found[group] = kept
        return found

    def content_hash(self) -> str:
        """16 hex digits of everything that can change the result: equal exactly for equal runs.

        It is that of version 0.1.0, so that studies of that version are found again: of the flat form without what has
        no effect. Two of its habits are kept: the usual computation does not tell runs apart, and label smoothing is
        named for sampled members of the family, which take none.
        """
        unnamed = self.unused()
        if self.member.name in FAMILY and self.member.kind == "sampled" and self.training.solver == GRADIENT:
            unnamed.discard("label_smoothing")
        if self.machine.computation == USUAL:
            unnamed.add("computation")
        named = _by_flat_name(self.model_dump(mode="json"))
        content = {name: value for name, value in named.items() if name not in unnamed}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _fixed_groups(given: Mapping[str, Any]) -> dict[str, Group]:
    """The groups without what rows declare; an error that names every setting that is wrong."""
    found, complaints = {}, []
    for group, kind in ALL_GROUPS.items():
        content = {key: given[name] for key in kind.model_fields if (name := _flat_name(group, key)) in given}
        try:
            found[group] = kind(**content)
        except ValidationError as error:
            complaints += [_complaint(group, each) for each in error.errors()]
    if complaints:
        raise ArgumentError(" ".join(complaints))
    return found


def _with_own(groups: Mapping[str, Group], given: Mapping[str, Any]) -> dict[str, Group]:
    """The groups with what their chosen rows declare; an error that names every such setting that is wrong."""
    loss, training = groups["loss"], groups["training"]
    assert isinstance(loss, LossSettings)
    assert isinstance(training, TrainingSettings)
    member = find_loss(loss.name)
    solver = member.solvers.get(training.solver)
    chosen = {
        "backbone": BACKBONES[groups["backbone"].name].settings,  # type: ignore[attr-defined]
        "loss": member.settings,
        "sampler": SAMPLERS[groups["sampler"].name].settings,  # type: ignore[attr-defined]
        "training": solver.settings if solver is not None else (),
    }
    found = {name: group for name, group in groups.items() if name in GROUPS}
    complaints = []
    for name, settings in chosen.items():
        own = {}
        for setting in _with_switches(settings):
            try:
                own[setting.public_name] = _own_value(setting, given)
            except ManymaxError as error:
                complaints.append(str(error))
        found[name] = type(groups[name])(**groups[name].model_dump(), **own)
    if complaints:
        raise ArgumentError(" ".join(complaints))
    return found


def _own_value(setting: Setting, given: Mapping[str, Any]) -> Any:
    value = given.get(setting.public_name, _unset(setting))
    return value if value is None and _unset(setting) is None else setting.read(value)


def _is_default(setting: Setting, value: Any) -> bool:
    """Whether a value is what the setting has where nobody gives it."""
    try:
        return bool(_own_value(setting, {setting.public_name: value}) == _unset(setting))
    except ManymaxError:
        return False


def _complaint(group: str, error: Any) -> str:
    """One sentence or two from what pydantic says of a setting."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    key, *rest = map(str, error["loc"])
    name = ".".join((_flat_name(group, key), *rest))
    return f"`{name}`: {error['msg'][:1].lower()}{error['msg'][1:]}; got {error['input']!r}."
