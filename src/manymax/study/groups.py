"""The groups of settings that every run has, with types, defaults, ranges and help texts.

Members, samplers, backbones and solvers declare further settings of their own; `config.py` adds them to these groups.
The descriptions are the help texts of `manymax train`; `{}` in one of them becomes the list of names of a table.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from manymax.engine.member import Member
from manymax.engine.native_library import BACKENDS
from manymax.errors import ArgumentError, check_choice, unknown_name
from manymax.members import BASELINE, FAMILY, REFERENCE_LOSSES
from manymax.samplers import SAMPLERS
from manymax.study.backbones import BACKBONES
from manymax.study.computations import USUAL, find_computation
from manymax.study.data.sources.table import TableOptions, parse_columns

WITH_COMMAS: Any = {"has_commas": True}  # marks a setting whose value may have commas
GRADIENT = "gradient"  # name of the solver that every loss has: Adam


def losses() -> dict[str, Member]:
    """All losses that a run can minimise, by name: the members of the family, then the reference losses."""
    return {member.name: member for table in (FAMILY, REFERENCE_LOSSES) for member in table.values()}


def find_loss(name: str) -> Member:
    """The member or reference loss of this name or alias."""
    for table in (FAMILY, REFERENCE_LOSSES):
        if name in table:
            return table[name]
    raise unknown_name("loss", name, losses())


def solver_names() -> list[str]:
    """The names of all solvers: that of gradients, and those that some loss declares."""
    return [GRADIENT, *dict.fromkeys(name for member in losses().values() for name in member.solvers)]


class Group(BaseModel):
    """Settings that belong together.

    `chooser` is the field that chooses a row of a table; its flat name is the name of the group (`loss` stands for
    `loss.name`). None if the group has no such field.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    chooser: ClassVar[str | None] = None


class RowGroup(Group):
    """A group that chooses a row of a table; beside its fields it holds the settings that the chosen row declares."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    @property
    def own(self) -> dict[str, Any]:
        """The values of the settings that the chosen row declares, by the names that they have in a run."""
        return dict(self.model_extra or {})


class DataSettings(Group):
    """The source of the interactions, the filters and the split."""

    chooser = "source"

    source: str = Field(
        "planted",
        description="The data: a name (`manymax data list`), or a CSV, TSV, JSON lines or Parquet file.",
    )
    columns: dict[str, str] | None = Field(
        None,
        description="Columns of your own file, such as user=NAME,item=NAME; time=none leaves out a guessed one.",
        json_schema_extra=WITH_COMMAS,
    )
    encoding: str | None = Field(
        None, description="Encoding of your own file, such as latin-1 or utf-16; UTF-8 if left out."
    )
    date_format: str | None = Field(
        None,
        description="How your own file writes times, such as '%m/%d/%Y %H:%M'; ISO dates need none.",
        json_schema_extra=WITH_COMMAS,
    )
    drop_missing: bool = Field(False, description="Leave out rows without a user, an item or another value.")
    preset: str | None = Field(None, description="Use the filters of the paper: paper-table or paper-text.")
    min_rating: float | None = Field(None, description="Keep interactions with at least this rating.")
    k_core: int | None = Field(None, ge=1, description="Keep users and items with at least this many interactions.")
    size: str | None = Field(
        None, description="Size of planted data: tiny, small, medium, ml-1m or USERSxITEMSxMEAN, such as 500x300x20."
    )
    name: str | None = Field(None, description="Name of the data set in your own file; presets are found by it.")
    split: Literal["ratio", "ratio-time", "leave-one-out", "given"] | None = Field(
        None,
        description="How a user's items are split; the default is the file's own split, else 0.8/0.1/0.1 at random.",
    )

    @field_validator("columns", mode="before")
    @classmethod
    def _columns(cls, value: Any) -> Any:
        """Turn the text "user=u,item=i" of a command line into a mapping."""
        return parse_columns(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _readable(self) -> DataSettings:
        assert self.table_options  # which refuses what no table can be read with
        return self

    @property
    def table_options(self) -> TableOptions:
        """How the caller's own table is to be read."""
        return TableOptions(self.columns, self.encoding, self.date_format)

    @property
    def title(self) -> str:
        """What the data is called in messages: the name that it was given, or its source."""
        return self.name or self.source


class BackboneSettings(RowGroup):
    """The model that makes user and item vectors."""

    chooser = "name"

    name: str = Field("mf", description="The model that makes user and item vectors: {}.")
    dim: int = Field(64, ge=1, description="Length of the user and item vectors.")
    init: Literal["normal", "xavier"] = Field("normal", description="Distribution of the first weights.")
    init_scale: float = Field(0.02, gt=0, description="Standard deviation of the first weights with init normal.")

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        """The canonical name of a name or alias."""
        return BACKBONES[value].name


class ScoreSettings(Group):
    """How scores are computed from vectors."""

    scale: Literal["dot", "cosine"] = Field(
        "dot", description="Scores are inner products, or cosines divided by the temperature."
    )
    temperature: float = Field(0.1, gt=0, description="The number that cosines are divided by.")


class LossSettings(RowGroup):
    """The loss that is minimised."""

    chooser = "name"

    name: str = Field(BASELINE.name, description="The loss: a member of the family (`manymax losses`), or {}.")
    multilabel: Literal["sum", "normalized"] = Field(
        "sum", description="The loss of a user is the sum over the positives, or their mean."
    )
    label_smoothing: float = Field(0.0, ge=0, le=1, description="Share of the target that is spread over all items.")
    exclude: Literal["none", "positives"] = Field(
        "none",
        description="Items left out of the sums of a row: none, or positives, the other training items of its user.",
    )
    decoupled: bool = Field(False, description="Leave a positive out of the sum of its own loss.")
    bound_epochs: int = Field(
        0, ge=0, description="Epochs for which the K-th largest score of a user is held; 0 takes it from every step."
    )

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        """The canonical name of a name or alias."""
        return find_loss(value).name


class SamplerSettings(RowGroup):
    """The source of negatives for losses that sample them."""

    chooser = "name"

    name: str = Field("uniform", description="The sampler of negatives: {}.")
    num_negatives: int = Field(
        100, ge=0, description="Number of negatives per positive; 0 with in_batch or mixed takes all of the batch."
    )
    shared: bool = Field(False, description="Draw negatives once for all rows of a batch.")

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        """The canonical name of a name or alias."""
        return SAMPLERS[value].name


class TrainingSettings(RowGroup):
    """The solver, its batches and steps, and when training ends."""

    solver: str = Field(
        GRADIENT, description="How the loss is minimised: gradient (Adam), or a solver of the loss such as als."
    )
    lr: float = Field(1e-3, gt=0, description="Learning rate of Adam.")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty, which Adam adds to the gradient.")
    batch_size: int = Field(2048, ge=1, description="Number of positives in a batch.")
    batches: Literal["pairs", "chunks", "users"] = Field(
        "pairs", description="A batch holds single (user, item) pairs, some pairs per user, or all pairs per user."
    )
    chunk: int = Field(8, ge=1, description="Number of pairs of a user that stay together, with batches chunks.")
    accumulate: int = Field(1, ge=1, description="Number of batches whose gradients are averaged for one step.")
    clip: float | None = Field(None, gt=0, description="Largest norm of the gradient; longer ones are scaled down.")
    bf16: bool = Field(False, description="Compute matrix products in bfloat16.")
    epochs: int = Field(1000, ge=1, description="Largest number of epochs.")
    patience: int = Field(10, ge=1, description="Training ends after this many evaluations without a better value.")
    eval_every: int = Field(1, ge=1, description="Number of epochs between two evaluations on the validation part.")

    @field_validator("solver")
    @classmethod
    def _solver(cls, value: str) -> str:
        check_choice("solver", value, solver_names())
        return value


class EvaluationSettings(Group):
    """The metrics that are computed, and the one that early stopping uses."""

    cutoffs: tuple[int, ...] = Field(
        (20,),
        min_length=1,
        description="Lengths of the ranked lists that metrics are computed on, such as 5,20.",
        json_schema_extra=WITH_COMMAS,
    )
    monitor: str | None = Field(
        None, description="Metric for early stopping, such as recall@20; the default is ndcg at the largest cutoff."
    )

    @field_validator("cutoffs", mode="before")
    @classmethod
    def _cutoffs(cls, value: Any) -> Any:
        """Turn the text "5,20" or the number 20 into a sequence."""
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
    """Settings that change how long a run takes."""

    threads: int | None = Field(None, ge=1, description="Number of processor threads; the default is that of torch.")
    computation: str = Field(
        USUAL, description="How exact losses are computed: in blocks, compiled or not, or for comparison whole tables."
    )
    backend: str = Field(
        "auto",
        description="Plain torch or native code, which auto takes where it serves; a resumed run keeps what it had.",
    )

    @field_validator("computation")
    @classmethod
    def _computation(cls, value: str) -> str:
        return find_computation(value).name

    @field_validator("backend")
    @classmethod
    def _backend(cls, value: str) -> str:
        check_choice("backend", value, BACKENDS)
        return value


class General(Group):
    """Settings that belong to no group; their nested and flat names are the same."""

    seed: int = Field(
        0, ge=0, description="Seed of all random numbers: split, first weights, order of batches, negatives, dropout."
    )


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
