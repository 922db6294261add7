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
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from manymax.engine.member import Member, Setting
from manymax.errors import ArgumentError, ManymaxError, check_choice
from manymax.members import FAMILY
from manymax.samplers import SAMPLERS
from manymax.study.backbones import BACKBONES
from manymax.study.computations import USUAL, computations
from manymax.study.groups import (
    ALL_GROUPS,
    GRADIENT,
    GROUPS,
    BackboneSettings,
    DataSettings,
    EvaluationSettings,
    Group,
    LossSettings,
    MachineSettings,
    SamplerSettings,
    ScoreSettings,
    TrainingSettings,
    find_loss,
    losses,
)
from manymax.study.metrics import METRICS
from manymax.study.run_options import (
    by_flat_name,
    declared_settings,
    flat,
    flat_name,
    flattened,
    options,
    rules,
    unset_value,
    with_switches,
)


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
        declared = {name: rows for group in declared_settings().values() for name, rows in group.items()}
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
        usual = {setting.public_name: unset_value(setting) for setting in with_switches(member.settings)}
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
        given, every = flattened(settings), rules()
        deciding, sketch = {option for _, option, _ in every}, cls()
        depending = {name for names, _, _ in every for name in names}
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
        for names, option, values in rules():  # an option that has no effect itself gives none to others
            if now[option] not in values or option in idle:
                idle |= {name: (option, values) for name in names if name not in idle}
        return idle

    # Forms

    def _values(self) -> dict[str, Any]:
        """The settings that the groups hold, by their flat names."""
        found = {"seed": self.seed}
        for group in GROUPS:
            found |= {flat_name(group, key): value for key, value in getattr(self, group)}
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
            elif kept := {key: each for key, each in content.items() if flat_name(group, key) not in unused}:
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
        named = by_flat_name(self.model_dump(mode="json"))
        content = {name: value for name, value in named.items() if name not in unnamed}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _fixed_groups(given: Mapping[str, Any]) -> dict[str, Group]:
    """The groups without what rows declare; an error that names every setting that is wrong."""
    found, complaints = {}, []
    for group, kind in ALL_GROUPS.items():
        content = {key: given[name] for key in kind.model_fields if (name := flat_name(group, key)) in given}
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
        for setting in with_switches(settings):
            try:
                own[setting.public_name] = _own_value(setting, given)
            except ManymaxError as error:
                complaints.append(str(error))
        found[name] = type(groups[name])(**groups[name].model_dump(), **own)
    if complaints:
        raise ArgumentError(" ".join(complaints))
    return found


def _own_value(setting: Setting, given: Mapping[str, Any]) -> Any:
    value = given.get(setting.public_name, unset_value(setting))
    return value if value is None and unset_value(setting) is None else setting.read(value)


def _is_default(setting: Setting, value: Any) -> bool:
    """Whether a value is what the setting has where nobody gives it."""
    try:
        return bool(_own_value(setting, {setting.public_name: value}) == unset_value(setting))
    except ManymaxError:
        return False


def _complaint(group: str, error: Any) -> str:
    """One sentence or two from what pydantic says of a setting."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    key, *rest = map(str, error["loc"])
    name = ".".join((flat_name(group, key), *rest))
    return f"`{name}`: {error['msg'][:1].lower()}{error['msg'][1:]}; got {error['input']!r}."
