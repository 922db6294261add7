"""The groups of settings that every run has; what rows of tables declare joins them in study/config.py."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from manymax.engine.member import Member
from manymax.errors import ArgumentError, check_choice, unknown_name
from manymax.members import BASELINE, FAMILY, REFERENCE_LOSSES
from manymax.samplers import SAMPLERS
from manymax.study.backbones import BACKBONES
from manymax.study.computations import USUAL, computations

GRADIENT = "gradient"  # the solver that every loss has


def losses() -> dict[str, Member]:
    """What a run can minimise: the members of the family, then the references beside it."""
    return {member.name: member for table in (FAMILY, REFERENCE_LOSSES) for member in table.values()}


def find_loss(name: str) -> Member:
    """The member or reference of this name, or of this other name."""
    for table in (FAMILY, REFERENCE_LOSSES):
        if name in table:
            return table[name]
    raise unknown_name("loss", name, losses())


def solver_names() -> list[str]:
    """The solvers that some loss has."""
    return [GRADIENT, *dict.fromkeys(name for member in losses().values() for name in member.solvers)]


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
