"""What a training loop asks of a backbone, and what a row of `BACKBONES` says of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from manymax.errors import ArgumentError, check_choice
from manymax.settings import Setting
from manymax.study.data.batches import Batch
from manymax.study.data.interactions import Split


class Head(Protocol):
    """What backbones know of a head."""

    @property
    def takes_class_vectors(self) -> bool: ...


class Vectors(NamedTuple):
    """What one step computes once for everybody: (C, d) item vectors, and (U, d) user vectors where there are any."""

    items: Tensor
    users: Tensor | None = None

    def for_head(self, head: Head) -> Tensor | None:
        """The item vectors, where the head scores by vectors that it is given; None where it has its own."""
        return self.items if head.takes_class_vectors else None


class Backbone(nn.Module, ABC):
    """A model that turns a batch into queries; scores are inner products of queries and item vectors.

    A step is

        vectors = backbone.vectors()
        queries = backbone.queries(batch, vectors)
        loss = head(queries, batch.target, vectors.for_head(head))

    `needs_history` says whether batches must bring histories, `max_length` how many items of them at most.
    """

    needs_history: bool = False
    max_length: int | None = None

    @abstractmethod
    def vectors(self) -> Vectors:
        """Item vectors (C, d), and user vectors if there are any; a graph backbone propagates here, once a step."""

    @abstractmethod
    def queries(self, batch: Batch, vectors: Vectors) -> Tensor:
        """(B, d), one query a row; (N, d), one for each entry of the histories, if `batch.every_position`."""


class Cosine(Backbone):
    """Another backbone with scores cos(query, item) / temperature instead of inner products."""

    def __init__(self, backbone: Backbone, temperature: float) -> None:
        super().__init__()
        if not temperature > 0:
            raise ArgumentError(f"`temperature` must be positive; got {temperature}.")
        self.backbone, self.temperature = backbone, temperature
        self.needs_history, self.max_length = backbone.needs_history, backbone.max_length

    def vectors(self) -> Vectors:
        """Item vectors of length 1; user vectors as they are."""
        vectors = self.backbone.vectors()
        return vectors._replace(items=nn.functional.normalize(vectors.items, dim=-1))

    def queries(self, batch: Batch, vectors: Vectors) -> Tensor:
        """Queries of length 1 / temperature."""
        return nn.functional.normalize(self.backbone.queries(batch, vectors), dim=-1) / self.temperature


# The number of layers, of backbones that have some.
LAYERS = Setting("layers", int, 2, "Transformer blocks, or rounds of propagation.", least=0)


class Settings(Protocol):
    """The options that backbones read, whatever holds them; `manymax.study.config` says what they mean.

    Settings that a row of `BACKBONES` declares itself are attributes too.
    """

    @property
    def dim(self) -> int: ...

    @property
    def layers(self) -> int: ...

    @property
    def attention_heads(self) -> int: ...

    @property
    def hidden(self) -> int: ...

    @property
    def dropout(self) -> float: ...

    @property
    def max_length(self) -> int: ...

    @property
    def init(self) -> str: ...

    @property
    def init_scale(self) -> float: ...

    @property
    def scale(self) -> str: ...

    @property
    def temperature(self) -> float: ...


@dataclass(frozen=True)
class BackboneEntry:
    """One row of `BACKBONES`.

    `make(split, settings, generator)` builds a backbone with first weights from the generator; `build` then sets the
    scale of its scores. `needs_history` is that of the backbones that it builds: whether batches bring histories.
    `settings`: what it can be set to beside what all backbones share. `pairs`: whether its batches are of (user, item)
    pairs, made as a run's `batches` says. `factors`: whether it is nothing but two tables of vectors, `users` and
    `items`, which a solver other than gradients can find.
    """

    name: str
    title: str
    make: Callable[[Split, Settings, torch.Generator], Backbone]
    citation: str
    needs_history: bool = False
    aliases: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()
    pairs: bool = True
    factors: bool = False

    def build(self, split: Split, settings: Settings, generator: torch.Generator) -> Backbone:
        """A backbone for the users and items of a split.

        Args:
            split: its sizes are used, by LightGCN also its training part.
            settings: any object with the options of `Settings`.
            generator: of the first weights.
        """
        check_choice("scale", settings.scale, ("dot", "cosine"))
        backbone = self.make(split, settings, generator)
        return Cosine(backbone, settings.temperature) if settings.scale == "cosine" else backbone


def draw_weights(module: nn.Module, settings: Settings, generator: torch.Generator) -> None:
    """Draw the matrices of all embeddings and linear layers, in their order, and zero the biases.

    With `init` "normal" the standard deviation is `init_scale`, with "xavier" sqrt(2 / (rows + columns)).
    """
    check_choice("init", settings.init, ("normal", "xavier"))
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.Linear):
            if settings.init == "normal":
                nn.init.normal_(part.weight, std=settings.init_scale, generator=generator)
            else:
                nn.init.xavier_normal_(part.weight, generator=generator)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
