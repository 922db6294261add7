"""Sequential models of RecTools that train through a head: `HeadLightningModule`.

This module imports RecTools: import it where you have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from rectools.models.nn.transformers.lightning import TransformerLightningModule
from rectools.models.rank import Distance
from torch import Tensor

from manymax.errors import ArgumentError
from manymax.heads.build import head_class
from manymax.members import FAMILY, REFERENCE_LOSSES

__all__ = ["HeadLightningModule"]

PAD_ITEM = 0  # the id of the item that fills up sequences, and the target of positions that predict nothing


class HeadLightningModule(TransformerLightningModule):
    """How a SASRec, BERT4Rec or another transformer of RecTools trains with any loss of manymax, without logits.

    Pass it as `lightning_module_type`. The model's `loss` is then a name in `manymax.FAMILY` or of a reference loss; a
    loss that draws negatives draws them itself. `loss="softmax"` is RecTools' own loss of that name.

    Args:
        head_keywords: keywords of the head, such as `alpha` or `label_smoothing`, in `lightning_module_kwargs`. With
            `logits_t` there the scores are divided by that, and with the similarity "cosine" they are cosines.

    Example:
        >>> from rectools.models import SASRecModel  # doctest: +SKIP
        >>> model = SASRecModel(  # doctest: +SKIP
        ...     loss="entmax",
        ...     lightning_module_type=HeadLightningModule,
        ...     lightning_module_kwargs={"head_keywords": {"alpha": 1.5}, "logits_t": 0.5},
        ... )
    """

    def __init__(self, *given: Any, head_keywords: Mapping[str, Any] | None = None, **named: Any) -> None:
        super().__init__(*given, **named)
        member = REFERENCE_LOSSES[self.loss] if self.loss in REFERENCE_LOSSES else FAMILY[self.loss]
        head = head_class(member)
        if not head.takes_class_vectors:
            raise ArgumentError(f"`loss` must be one of given item vectors; {member.name} has vectors of its own.")
        similarity = getattr(self.torch_model.similarity_module, "distance", None)
        if similarity not in (Distance.DOT, Distance.COSINE):
            raise ArgumentError(
                "`similarity_module_type` must be RecTools' own, whose scores are products or cosines; got"
                f" {type(self.torch_model.similarity_module).__name__}."
            )
        keywords = dict(head_keywords or {})
        if similarity == Distance.COSINE:
            keywords["normalize"] = True
        if self.logits_t != 1:
            keywords["temperature"] = self.logits_t
        self.head = head(None, self.torch_model.item_model.n_items, **keywords)

    @staticmethod
    def requires_negatives(loss: str) -> bool:
        """No loss needs negatives of RecTools: those that draw some do it themselves."""
        return False

    def get_loss_calculator(self) -> None:
        """No loss is computed from logits."""

    def configure_optimizers(self) -> torch.optim.Adam:
        """RecTools' optimiser, of the parameters of the head as well, such as a learned alpha."""
        optimizer: torch.optim.Adam = super().configure_optimizers()
        learned = list(self.head.parameters())
        if learned and len(optimizer.param_groups) == 1:  # RecTools keeps its optimiser and asks for it again
            optimizer.add_param_group({"params": learned})
        return optimizer

    def _calc_custom_loss(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The loss of a training step; RecTools calls it where there is no loss calculator."""
        vectors = self.torch_model.item_model.get_all_embeddings()
        return self._head_loss(self.torch_model.encode_sessions(batch, vectors), vectors, batch)

    def _calc_custom_loss_outputs(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The loss of a validation step, of the last position, and its logits, for callbacks with metrics."""
        sessions = self.torch_model.encode_sessions(batch, self.item_embs)[:, -1:]
        loss = self._head_loss(sessions, self.item_embs, batch)
        logits = self.torch_model.similarity_module(sessions, self.item_embs) / self.logits_t
        return {"loss": loss, "logits": logits.squeeze()}

    def _head_loss(self, sessions: Tensor, vectors: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """The head's loss of session vectors (B, T, d) against all item vectors (C, d), weighted as in RecTools."""
        target, weight = batch["y"], batch["yw"]
        counted = (target != PAD_ITEM) & (weight != 0)
        # RecTools divides by the number of positions and not by the sum of their weights.
        loss: Tensor = self.head(
            sessions,
            target.masked_fill(target == PAD_ITEM, -100),
            vectors,
            row_weight=weight,
            num_items=counted.sum().clamp(min=1),
        )
        return loss
