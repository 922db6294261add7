"""`RunConfig`: every setting of a run, with its default and its meaning; the one source of options and records."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from manymax.errors import ArgumentError, check_choice, unknown_name
from manymax.members import FAMILY, REFERENCES
from manymax.paper.whole_table import TABLE_LOSSES
from manymax.samplers import SAMPLERS
from manymax.study.backbones import BACKBONES
from manymax.study.metrics import METRICS

COMPILED_LOSSES = ("sparsemax", "entmax", "rankmax")  # those of heads/rows.cpp
SAMPLED = tuple(name for name, member in FAMILY.items() if member.kind == "sampled")

# (options, deciding option, values): elsewhere these options have no effect and must keep their default.
ONLY_FOR: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (("alpha", "learnable_alpha"), "loss", ("entmax",)),
    (("order",), "loss", ("taylor_softmax",)),
    (("sampler", "num_negatives", "shared"), "loss", (*SAMPLED, *REFERENCES)),
    (("hit_policy",), "loss", SAMPLED),
    (("correction", "debias"), "loss", ("sampled_softmax",)),
    (("log_z", "learnable_log_z"), "loss", ("nce",)),
    (("label_smoothing",), "loss", tuple(name for name, member in FAMILY.items() if member.takes.smoothing)),
    (("power",), "sampler", ("popularity",)),
    (("smoothing",), "sampler", ("popularity", "in_batch")),
    (("pool",), "sampler", ("dns", "two_pass")),
    (("codewords",), "sampler", ("midx",)),
    (("layers",), "backbone", ("sasrec", "lightgcn")),
    (("attention_heads", "hidden", "dropout", "max_length", "positions"), "backbone", ("sasrec",)),
    (("batches",), "backbone", ("mf", "lightgcn")),
    (("chunk",), "batches", ("chunks",)),
    (("multilabel",), "batches", ("users",)),
    (("temperature",), "scale", ("cosine",)),
    (("ridge", "ridge_power", "positive_weight"), "solver", ("als",)),
    (("lr", "weight_decay", "batch_size", "batches", "chunk", "accumulate", "clip", "bf16"), "solver", ("gradient",)),
    (("label_smoothing",), "solver", ("gradient",)),
    (("computation",), "loss", tuple(TABLE_LOSSES)),
)


class RunConfig(BaseModel):
    """The settings of one run. The same names are options of `manymax train`, keys of a TOML file and of a record.

    Unknown keys, wrong types and settings that would have no effect are refused with an `ArgumentError`.

    Example:
        >>> RunConfig(loss="ssm", num_negatives=50).loss
        'sampled_softmax'
        >>> RunConfig(lr=0.0)
        Traceback (most recent call last):
        manymax.errors.ArgumentError: `lr`: input should be greater than 0; got 0.0.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    data: str = Field("planted", description="A built-in set, a downloaded one, or a CSV, TSV or Parquet file.")
    columns: dict[str, str] | None = Field(None, description="Of an own file: user=..,item=..,rating=..,time=..")
    preset: str | None = Field(None, description="Filters as in the paper: paper-table or paper-text.")
    min_rating: float | None = Field(None, description="Keep interactions with at least this rating.")
    k_core: int | None = Field(None, ge=1, description="Keep users and items with at least this many interactions.")
    size: str | None = Field(None, description="Of planted data: tiny, small, medium, ml-1m or USERSxITEMSxMEAN.")
    name: str | None = Field(None, description="What the set in an own file is called; presets go by it.")
    split: Literal["ratio", "ratio-time", "leave-one-out", "given"] | None = Field(
        None, description="Of each user's items; as given by the file if it has a split, else 0.8/0.1/0.1 at random."
    )

    backbone: str = Field("mf", description=f"What makes user and item vectors: {', '.join(BACKBONES)}.")
    dim: int = Field(64, ge=1, description="Length of the vectors.")
    layers: int = Field(2, ge=0, description="Transformer blocks, or rounds of propagation.")
    attention_heads: int = Field(2, ge=1, description="Attention heads of a block.")
    hidden: int = Field(128, ge=1, description="Width of the feed-forward part of a block.")
    dropout: float = Field(0.5, ge=0, lt=1, description="Share of activations dropped in training.")
    max_length: int = Field(20, ge=1, description="Items of a history that are looked at, the latest ones.")
    positions: Literal["all", "windows", "prefix"] = Field(
        "all", description="All of the latest max_length, all of a history in such windows, or one row a prefix."
    )
    init: Literal["normal", "xavier"] = Field("normal", description="Law of the first weights.")
    init_scale: float = Field(0.02, gt=0, description="Standard deviation of the normal law.")
    scale: Literal["dot", "cosine"] = Field("dot", description="Scores: inner products, or cosines / temperature.")
    temperature: float = Field(0.1, gt=0, description="What cosines are divided by.")

    loss: str = Field("softmax", description=f"A member of the family (`manymax losses`), or {', '.join(REFERENCES)}.")
    alpha: float = Field(1.5, gt=1, description="Of entmax: near 1 is softmax, 2 is sparsemax.")
    learnable_alpha: bool = Field(False, description="Learn alpha along with the model.")
    order: int = Field(2, ge=2, description="Of Taylor-softmax; even.")
    num_negatives: int = Field(100, ge=0, description="Negatives of each positive; 0: the batch, with in_batch.")
    sampler: str = Field("uniform", description=f"Of negatives: {', '.join(SAMPLERS)}.")
    power: float = Field(1.0, ge=0, description="Exponent of the counts in popularity sampling.")
    smoothing: float = Field(0.0, ge=0, description="Added to the counts in popularity and in-batch sampling.")
    pool: int = Field(500, ge=1, description="Candidates from which dns and two_pass choose.")
    codewords: int = Field(32, ge=1, description="Codewords of midx.")
    shared: bool = Field(False, description="One draw of negatives for all rows of a batch.")
    correction: Literal["logq", "partition", "none"] = Field("logq", description="How sampled softmax uses log q.")
    hit_policy: Literal["keep", "mask"] | None = Field(None, description="Negatives that hit the positive.")
    debias: Literal["delta", "jackknife"] | None = Field(None, description="Takes the 1/k bias out of log Z.")
    log_z: float | None = Field(None, description="Of NCE: assumed log partition, else that of scores 0: log C.")
    learnable_log_z: bool = Field(False, description="Learn log_z along with the model.")
    multilabel: Literal["sum", "normalized"] = Field("sum", description="Sum over a user's positives, or mean.")
    label_smoothing: float = Field(0.0, ge=0, le=1, description="Share of the target spread over all items.")

    computation: Literal["blocks", "compiled", "table", "detached"] = Field(
        "blocks",
        description="Of exact losses: blocks, also compiled; to compare, whole tables, also with detached items.",
    )

    solver: Literal["gradient", "als"] = Field("gradient", description="Adam, or alternating least squares (mf, rg).")
    ridge: float = Field(0.1, gt=0, description="Weight of the squared norms in ALS.")
    ridge_power: float = Field(1.0, description="A row's ridge grows with this power of its interactions.")
    positive_weight: float = Field(0.0, ge=0, description="Weight of the term that draws positives to 1 in ALS.")

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
    threads: int | None = Field(None, ge=1, description="Processor threads; the default is torch's.")
    epochs: int = Field(1000, ge=1, description="At most this many.")
    patience: int = Field(10, ge=1, description="Evaluations without a better value before training ends.")
    eval_every: int = Field(1, ge=1, description="Epochs between evaluations on the validation part.")
    cutoffs: tuple[int, ...] = Field((20,), min_length=1, description="Lengths of the lists that metrics look at.")
    monitor: str | None = Field(None, description="What early stopping watches, else ndcg at the largest cutoff.")
    seed: int = Field(0, ge=0, description="Makes split, first weights, order, negatives and dropout.")

    def __init__(self, **settings: Any) -> None:
        for name in settings:
            if name not in type(self).model_fields:
                raise unknown_name("option", name, type(self).model_fields)
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ArgumentError(" ".join(_complaint(each) for each in error.errors())) from None

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

    @field_validator("loss")
    @classmethod
    def _loss(cls, value: str) -> str:
        """The canonical name."""
        if value in REFERENCES:
            return REFERENCES[value].name
        if value not in FAMILY:
            raise unknown_name("loss", value, [*FAMILY, *REFERENCES])
        return FAMILY[value].name

    @field_validator("sampler")
    @classmethod
    def _sampler(cls, value: str) -> str:
        return SAMPLERS[value].name

    @field_validator("backbone")
    @classmethod
    def _backbone(cls, value: str) -> str:
        return BACKBONES[value].name

    @model_validator(mode="after")
    def _whole(self) -> RunConfig:
        """What only several options together can tell."""
        for name, (option, values) in self._idle().items():
            if getattr(self, name) != type(self).model_fields[name].default:
                known = " or ".join(map(repr, values))
                raise ArgumentError(
                    f"`{name}` has no effect with {option} {getattr(self, option)!r}: it belongs to {option} {known}. "
                    "Leave it out."
                )
        if self.solver == "als" and (self.loss, self.backbone, self.scale) != ("rg", "mf", "dot"):
            raise ArgumentError("`solver='als'` solves loss 'rg' on backbone 'mf' with scale 'dot'; got another.")
        plain = (self.alpha, self.label_smoothing, self.multilabel) == (1.5, 0.0, "sum")
        if self.computation in ("table", "detached") and not plain:
            raise ArgumentError(
                f"`computation={self.computation!r}` knows alpha 1.5, label_smoothing 0 and multilabel 'sum' alone."
            )
        if self.computation == "compiled" and self.loss not in COMPILED_LOSSES:
            raise ArgumentError(f"`computation='compiled'` is for {', '.join(COMPILED_LOSSES)}; got {self.loss!r}.")
        metric, at, cutoff = self.monitored.partition("@")
        check_choice("monitor", metric, METRICS)
        if not at:
            cutoffs = " or ".join(f"{metric}@{each}" for each in self.cutoffs)
            raise ArgumentError(f"`monitor` must name a cutoff, {cutoffs}; got {self.monitored!r}.")
        check_choice("monitor", cutoff, map(str, self.cutoffs))
        return self

    @classmethod
    def trimmed(cls, settings: Mapping[str, Any]) -> RunConfig:
        """A config from settings of which some may have no effect: those keep their default. For grids.

        >>> RunConfig.trimmed({"loss": "softmax", "alpha": 1.2, "lr": 0.01}).alpha
        1.5
        """
        deciding, sketch = {option for _, option, _ in ONLY_FOR}, cls()
        depending = {name for names, _, _ in ONLY_FOR for name in names}
        for names in (deciding - depending, deciding, set(settings)):  # a sampler is chosen where the loss takes one
            sketch = cls(**{name: value for name, value in settings.items() if name in names - sketch.unused()})
        return sketch

    def unused(self) -> set[str]:
        """Options that have no effect beside the others."""
        return set(self._idle())

    def _idle(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """{option without effect: (option that decides so, its values that would give it one)}."""
        idle: dict[str, tuple[str, tuple[str, ...]]] = {}
        for names, option, values in ONLY_FOR:  # an option that has no effect itself gives none to others
            if getattr(self, option) not in values or option in idle:
                idle |= {name: (option, values) for name in names if name not in idle}
        return idle

    @property
    def monitored(self) -> str:
        """The metric that early stopping watches, for example "ndcg@20"."""
        return self.monitor or f"ndcg@{max(self.cutoffs)}"

    def content_hash(self) -> str:
        """16 hex digits of everything that can change the result: equal exactly for equal runs."""
        content = self.model_dump(mode="json", exclude=self.unused())
        if self.computation == "blocks":
            content.pop("computation", None)  # the normal way does not tell runs apart
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _complaint(error: Any) -> str:
    """One sentence or two from what pydantic says of an option."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    name = ".".join(map(str, error["loc"]))
    return f"`{name}`: {error['msg'][:1].lower()}{error['msg'][1:]}; got {error['input']!r}."
