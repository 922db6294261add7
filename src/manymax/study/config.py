"""`RunConfig`: all settings of one run, in groups. Command-line options, TOML keys and records follow from it.

    data         the source of the interactions, the filters and the split
    backbone     the model that makes user and item vectors, with the settings that its row of `BACKBONES` declares
    scores       how scores are computed from vectors
    loss         a member of the family or a reference loss, with the settings that its entry declares
    sampler      the source of negatives, with the settings that its row of `SAMPLERS` declares
    training     the solver, its batches and steps, and the settings that the solver declares
    evaluation   the metrics, and the one that early stopping uses
    machine      settings that change how long a run takes rather than what it learns
    seed         of all random numbers

Every setting also has a flat name: its name within the group, or the name of the group if it chooses a row of a table
(`loss` is `loss.name`, `data` is `data.source`). Commands, files and Python take either form; records hold the nested
one. Settings that rows declare are read from the tables when a config is made, so that a row added to a table brings
its settings along.
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
from manymax.study.computations import find_computation
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
    LATER_OPTIONS,
    LATER_SETTINGS,
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
    """The settings of one run, in groups.

    Unknown names, wrong types, values out of range and settings that would have no effect raise an `ArgumentError`.

    Args:
        settings: nested (`loss={"name": "ssm"}`), flat (`loss="ssm"`), or a mixture of both.

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
        self._check_exclude()
        self._check_monitor()

    @property
    def member(self) -> Member:
        """The entry of the loss in the table of the family or of the reference losses."""
        return find_loss(self.loss.name)

    @property
    def sums_by_row(self) -> bool:
        """Whether the loss takes rows with several positives: always, but for exact losses that exclude some items."""
        return self.loss.exclude == "none" or self.member.kind == "sampled" or self.member.log_partition

    @property
    def groups_pairs(self) -> bool:
        """Whether pairs of one user that meet in a batch share a row: wherever the loss is the same either way."""
        return self.sums_by_row and not (self.member.joint and self.training.batches == "pairs")

    @property
    def keeps_pairs(self) -> bool:
        """Whether the head of the run keeps a number for each training pair from one step to the next."""
        return self.member.keeps_pairs({s.name: self.loss.own.get(s.public_name) for s in self.member.settings})

    @property
    def monitored(self) -> str:
        """The metric that early stopping uses, for example "ndcg@20"."""
        return self.evaluation.monitor or f"ndcg@{max(self.evaluation.cutoffs)}"

    # Checks that involve several settings

    def _check_idle(self, given: Mapping[str, Any]) -> None:
        """Refuse settings without effect, unless they have their default: a silent one would mislead."""
        all_options, now = {option.name: option for option in options()}, self._values()
        declared = {name: rows for group in declared_settings().values() for name, rows in group.items()}
        for name, (option, values) in self._idle().items():
            if name in now:
                at_default = now[name] == all_options[name].default
            else:  # a setting of a row that is not chosen is in no group: look at what was given
                at_default = name not in given or any(
                    _is_default(setting, given[name]) for _, setting in declared[name]
                )
            if not at_default:
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
            known_losses = " or ".join(repr(name) for name, member in losses().items() if solver in member.solvers)
            known_backbones = " or ".join(repr(row.name) for row in rows if row.factors)
            raise ArgumentError(
                f"`solver={solver!r}` needs loss {known_losses}, backbone {known_backbones} and scale 'dot'; got loss "
                f"{self.loss.name!r}, backbone {self.backbone.name!r} and scale {self.scores.scale!r}."
            )

    def _check_computation(self) -> None:
        computation, member = find_computation(self.machine.computation), self.member
        if not computation.takes(member):
            known = ", ".join(name for name, other in losses().items() if computation.takes(other))
            raise ArgumentError(f"`computation={computation.name!r}` is for {known}; got {member.name!r}.")
        backend = self.machine.backend
        # What builds a head of its own knows nothing of the native code.
        wanted = computation.options.get("backend", "auto") if computation.build is None else "torch"
        if "torch" in (backend, wanted) and any(each.startswith("native") for each in (backend, wanted)):
            raise ArgumentError(
                f"`backend={backend!r}` contradicts `computation={computation.name!r}`, which is computed "
                f"by {wanted}: leave one of them out."
            )
        if computation.build is not None and (self.loss.exclude != "none" or self.loss.decoupled):
            raise ArgumentError(
                f"`computation={computation.name!r}` knows neither `exclude` nor `decoupled`: leave them out."
            )
        if not computation.defaults_only:
            return
        defaults = {setting.public_name: unset_value(setting) for setting in with_switches(member.settings)}
        defaults |= {"label_smoothing": 0.0, "multilabel": "sum"}
        now = self._values()
        if any(now[name] != value for name, value in defaults.items()):
            known = ", ".join(f"{name} {value!r}" for name, value in defaults.items())
            raise ArgumentError(f"`computation={computation.name!r}` works with {known} only.")

    def _check_exclude(self) -> None:
        if self.loss.exclude == "none":
            return
        batches = self.training.batches
        if batches != "pairs" and not self.sums_by_row:
            raise ArgumentError(
                f"`exclude={self.loss.exclude!r}` compares each positive with other items, and {self.member.name} has"
                f" no closed form for rows with several positives: use `batches='pairs'` in place of {batches!r}."
            )

    def _check_monitor(self) -> None:
        metric, at, cutoff = self.monitored.partition("@")
        check_choice("monitor", metric, METRICS)
        if not at:
            cutoffs = " or ".join(f"{metric}@{each}" for each in self.evaluation.cutoffs)
            raise ArgumentError(f"`monitor` must name a cutoff, {cutoffs}; got {self.monitored!r}.")
        check_choice("monitor", cutoff, map(str, self.evaluation.cutoffs))

    # Settings without effect

    @classmethod
    def trimmed(cls, settings: Mapping[str, Any]) -> RunConfig:
        """A config from settings of which some may have no effect; those are left out, for grids of settings.

        >>> RunConfig.trimmed({"loss": "softmax", "alpha": 1.2, "lr": 0.01}).loss.own
        {}
        """
        given, all_rules = flattened(settings), rules()
        deciding, config = {option for _, option, _ in all_rules}, cls()
        depending = {name for names, _, _ in all_rules for name in names}
        # Three rounds, because what has an effect depends on other settings: first those that decide and depend on
        # none (the loss), then all that decide (the sampler, which has an effect with some losses), then the rest.
        for names in (deciding - depending, deciding, set(given)):
            config = cls(**{name: value for name, value in given.items() if name in names - config.unused()})
        return config

    def unused(self) -> set[str]:
        """The flat names of options that have no effect together with the values of the others."""
        return set(self._idle())

    def _idle(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """{option without effect: (the option that decides this, its values with which the first has an effect)}."""
        idle: dict[str, tuple[str, tuple[str, ...]]] = {}
        now = self._values()
        for names, option, values in rules():
            # `option in idle`: settings of a sampler have no effect with a loss that takes no sampler.
            if now[option] not in values or option in idle:
                idle |= {name: (option, values) for name in names if name not in idle}
        return idle

    # Conversions

    def _values(self) -> dict[str, Any]:
        """The values of all settings in the groups, by their flat names."""
        found = {"seed": self.seed}
        for group in GROUPS:
            found |= {flat_name(group, key): value for key, value in getattr(self, group)}
        return found

    def flat(self) -> dict[str, Any]:
        """All settings by their flat names, with values of JSON; those of rows that are not chosen have defaults."""
        return flat(self.model_dump(mode="json"))

    def nested(self) -> dict[str, Any]:
        """The settings that have an effect, in their groups, with values of JSON: the form that records hold.

        >>> RunConfig(loss="entmax").nested()["loss"]
        {'name': 'entmax', 'label_smoothing': 0.0, 'exclude': 'none', 'alpha': 1.5, 'learnable_alpha': False}
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
        """16 hex digits, a hash of all settings that have an effect: equal for equal runs, different for others.

        Folders of runs are named by it and checkpoints hold it, so it must stay the hash of version 0.1.0: that of the
        flat form, as JSON with sorted keys.
        """
        left_out = self.unused()
        flat_settings = by_flat_name(self.model_dump(mode="json"))
        # A peculiarity of version 0.1.0, kept for the sake of equal hashes: it hashed the label smoothing of sampled
        # members of the family, which take none.
        if self.member.name in FAMILY and self.member.kind == "sampled" and self.training.solver == GRADIENT:
            left_out.discard("label_smoothing")
        # Options that version 0.1.0 did not have, or left out. What the back end "auto" becomes depends on the machine,
        # and is in the record.
        later = {**LATER_OPTIONS, **LATER_SETTINGS}
        left_out |= {name for name, default in later.items() if flat_settings.get(name, default) == default}
        content = {name: value for name, value in flat_settings.items() if name not in left_out}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _fixed_groups(given: Mapping[str, Any]) -> dict[str, Group]:
    """The groups without the settings that rows declare; one `ArgumentError` for all settings that are wrong."""
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
    """The groups with the settings that their chosen rows declare; one `ArgumentError` for all that are wrong."""
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
    """The checked value of a setting that a row declares, given or unset."""
    value = given.get(setting.public_name, unset_value(setting))
    return value if value is None and unset_value(setting) is None else setting.read(value)


def _is_default(setting: Setting, value: Any) -> bool:
    """Whether a value is the one that the setting has if it is not given."""
    try:
        return bool(_own_value(setting, {setting.public_name: value}) == unset_value(setting))
    except ManymaxError:
        return False


def _complaint(group: str, error: Any) -> str:
    """An error of pydantic about one setting as a sentence that names the setting by its flat name."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    key, *inner_keys = map(str, error["loc"])
    name = ".".join((flat_name(group, key), *inner_keys))
    return f"`{name}`: {error['msg'][:1].lower()}{error['msg'][1:]}; got {error['input']!r}."
