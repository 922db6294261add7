"""Losses of two towers against those of sentence-transformers and transformers, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import manymax

TOLERANCE = 1e-6
COUNT, DIM = 37, 16


def towers(number: int, seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(COUNT, DIM, generator=random).requires_grad_() for _ in range(number)]


def agree(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], number: int, seed: int) -> None:
    """Both functions of as many tensors give one value and the same gradients."""
    results = []
    for function in (ours, theirs):
        given = towers(number, seed)
        loss = function(*given)
        loss.backward()
        results.append([loss.detach(), *(tensor.grad for tensor in given)])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=TOLERANCE, atol=TOLERANCE)


class Embedding(torch.nn.Module):
    """A model whose sentences are their embeddings already."""

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        return {"sentence_embedding": features}


@pytest.mark.extras
@pytest.mark.parametrize("hard", [0, 2])
@pytest.mark.parametrize("symmetric", [False, True])
def test_sentence_transformers(hard: int, symmetric: bool, seed: int) -> None:
    losses: Any = pytest.importorskip("sentence_transformers.losses")
    both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    peer = losses.MultipleNegativesRankingLoss(Embedding(), scale=20.0, **(both if symmetric else {}))

    def ours(queries: Tensor, documents: Tensor, *others: Tensor) -> Tensor:
        more = {"hard": torch.cat(others)} if others else {}
        keywords = {"temperature": 1 / 20, "normalize": True, "symmetric": symmetric}
        return manymax.in_batch_loss(queries, documents, **more, **keywords)

    agree(ours, lambda *given: peer(given, None), 2 + hard, seed)


@pytest.mark.extras
def test_clip(seed: int) -> None:
    clip: Any = pytest.importorskip("transformers.models.clip.modeling_clip")

    def theirs(texts: Tensor, images: Tensor) -> Tensor:
        texts, images = (x / x.norm(dim=-1, keepdim=True) for x in (texts, images))
        return clip.image_text_contrastive_loss(texts @ images.T / 0.07)

    agree(
        lambda *given: manymax.in_batch_loss(*given, temperature=0.07, normalize=True, symmetric=True), theirs, 2, seed
    )
