"""The interface of a backbone, and `BackboneEntry`, a row of `BACKBONES`."""

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
    """The part of a head that backbones use."""

    @property
    def takes_class_vectors(self) -> bool: ...


class Vectors(NamedTuple):
    """The vectors that are computed once per step: items (C, d), and users (U, d) if the backbone has user vectors."""

    items: Tensor
    users: Tensor | None = None

    def for_head(self, head: Head) -> Tensor | None:
        """The item vectors for a head that takes class vectors; None for a head with vectors of its own (a tree)."""
        return self.items if head.takes_class_vectors else None


class Backbone(nn.Module, ABC):
    """A model that turns a batch into queries; scores are inner products of queries and item vectors.

    A training step is

        vectors = backbone.vectors()
        queries = backbone.queries(batch, vectors)
        loss = head(queries, batch.target, vectors.for_head(head))

    `needs_history` says whether batches must have histories, and `max_length` how many items a history may have.
    """

    needs_history: bool = False
    max_length: int | None = None

    @abstractmethod
    def vectors(self) -> Vectors:
        """Item vectors (C, d), and user vectors if there are any; a graph backbone propagates here, once per step."""

    @abstractmethod
    def queries(self, batch: Batch, vectors: Vectors) -> Tensor:
        """(B, d), one query per row; with `batch.every_position` (N, d), one per entry of the histories."""


class Cosine(Backbone):
    """A backbone around another one, whose scores are cos(query, item) / temperature instead of inner products."""

    def __init__(self, backbone: Backbone, temperature: float) -> None:
        super().__init__()
        if not temperature > 0:
            raise ArgumentError(f"`temperature` must be positive; got {temperature}.")
        self.backbone, self.temperature = backbone, temperature
        self.needs_history, self.max_length = backbone.needs_history, backbone.max_length

    def vectors(self) -> Vectors:
        """Item vectors of length 1. User vectors stay as they are: `queries` normalises what is made of them."""
        vectors = self.backbone.vectors()
        return vectors._replace(items=nn.functional.normalize(vectors.items, dim=-1))

    def queries(self, batch: Batch, vectors: Vectors) -> Tensor:
        """Queries of length 1 / temperature."""
        return nn.functional.normalize(self.backbone.queries(batch, vectors), dim=-1) / self.temperature


# The setting of all backbones with layers, one object so that they share the option.
LAYERS = Setting("layers", int, 2, "Number of transformer blocks, or of rounds of propagation.", least=0)


class Settings(Protocol):
    """The options that backbones read, as attributes; `groups.py` and the rows of `BACKBONES` say what they mean.

    Further settings that a row of `BACKBONES` declares are attributes too.
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

    name, aliases, title: what settings and reports call it.
    make: (split, settings, generator) -> a backbone with random first weights from the generator.
    citation: where it was published.
    needs_history: whether its batches must have histories.
    settings: its settings beside those that all backbones share.
    pairs: whether its batches consist of (user, item) pairs, so that the option `batches` has an effect.
    factors: whether it consists of nothing but two embeddings, `users` and `items`; solvers other than gradients
        need this.
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
        """A backbone for the users and items of a split, with the scale of scores that the settings ask for.

        Args:
            split: gives the numbers of users and items; LightGCN also uses its training part.
            settings: any object with the attributes of `Settings`.
            generator: for the first weights.
        """
        check_choice("scale", settings.scale, ("dot", "cosine"))
        backbone = self.make(split, settings, generator)
        return Cosine(backbone, settings.temperature) if settings.scale == "cosine" else backbone


def draw_weights(module: nn.Module, settings: Settings, generator: torch.Generator) -> None:
    """Draw the weights of all embeddings and linear layers, in the order of `module.modules()`, and zero the biases.

    The standard deviation is `init_scale` with `init` "normal", and sqrt(2 / (rows + columns)) with "xavier".
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
