"""A loss for sentence-transformers on `manymax.in_batch_loss`: `InBatchSentenceLoss`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manymax.engine.member import Member
from manymax.errors import ArgumentError
from manymax.heads.in_batch import InBatchLoss
from manymax.members import BASELINE

__all__ = ["InBatchSentenceLoss"]


class InBatchSentenceLoss(nn.Module):
    """The loss of finding the own document of each query among those of the batch, for a `SentenceTransformer`.

    For softmax it is sentence-transformers' own `MultipleNegativesRankingLoss` with scale = 1 / temperature, without a
    table of all scores; every other exact member of the family takes its place by its name.

    Args:
        model: the `SentenceTransformer`.
        temperature: divides the cosines.
        learnable: learn the temperature along with the model.
        normalize: compare cosines; without it, products.
        symmetric: add the loss of finding the own query of each document, and take the mean of both.
        gather: documents of all processes are candidates.
        member: an exact member of the family: a name, an alias, or an entry.
        keywords: settings of the member, such as `alpha`, and further keywords of `manymax.in_batch_loss`.

    Columns of the data set are a query, its document, and any number of hard negatives, which are candidates of all
    queries. A document that stands twice in a batch would be its own negative, which `BatchSamplers.NO_DUPLICATES`
    prevents.

    Example:
        >>> import manymax.integrations.sentence_transformers as ours
        >>> class Given(nn.Module):  # a model whose sentences are vectors already
        ...     def forward(self, features):
        ...         return {"sentence_embedding": features}
        >>> loss = ours.InBatchSentenceLoss(Given(), temperature=0.5, member="sparsemax")
        >>> loss([torch.eye(3), torch.eye(3)])
        tensor(0.)
        >>> loss.get_config_dict()["member"], loss.get_config_dict()["temperature"]
        ('sparsemax', 0.5)
    """

    def __init__(
        self,
        model: nn.Module,
        temperature: float = 0.05,
        *,
        learnable: bool = False,
        normalize: bool = True,
        symmetric: bool = False,
        gather: bool = False,
        member: str | Member = BASELINE.name,
        **keywords: Any,
    ) -> None:
        super().__init__()
        self.model = model  # under this name a trainer finds it and puts in its place what it has prepared
        given = {"normalize": normalize, "symmetric": symmetric, "gather": gather, "member": member, **keywords}
        self.loss = InBatchLoss(temperature, learnable=learnable, **given)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch, from the tokens of each column; labels are not looked at."""
        embeddings = [self.model(features)["sentence_embedding"] for features in sentence_features]
        return self.compute_loss_from_embeddings(embeddings, labels)

    def compute_loss_from_embeddings(self, embeddings: Sequence[Tensor], labels: Tensor | None = None) -> Tensor:
        """The loss of the vectors (N, d) of each column: queries, documents, and hard negatives if there are any."""
        if len(embeddings) < 2:
            raise ArgumentError(
                f"a batch must have two columns at least, queries and documents; got {len(embeddings)}."
            )
        queries, documents, *others = embeddings
        loss: Tensor = self.loss(queries, documents, hard=torch.cat(others) if others else None)
        return loss

    def get_config_dict(self) -> dict[str, Any]:
        """What the loss was built with, for the card of a model."""
        keywords = dict(self.loss.keywords)
        member = keywords.pop("member")
        temperature = self.loss.temperature
        return {
            "member": member if isinstance(member, str) else member.name,
            "temperature": temperature.item() if isinstance(temperature, Tensor) else temperature,
            "learnable": self.loss.log_temperature is not None,
            **keywords,
        }
