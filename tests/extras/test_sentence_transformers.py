"""A loss of manymax in sentence-transformers: equal to its own, and trained by its trainer."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manymax.errors import ArgumentError
from manymax.integrations.sentence_transformers import InBatchSentenceLoss

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("default")]

WORDS = [f"word{number}" for number in range(40)]


@pytest.fixture
def model() -> Any:
    """A SentenceTransformer that averages vectors of words, so that nothing has to be downloaded."""
    library = pytest.importorskip("sentence_transformers")
    modules = importlib.import_module("sentence_transformers.sentence_transformer.modules")
    tokenizers = importlib.import_module("tokenizers")
    tokens = {word: number for number, word in enumerate(["[UNK]", *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(tokens, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    weights = torch.randn(len(tokens), 16)
    return library.SentenceTransformer(
        modules=[modules.StaticEmbedding(tokenizer, embedding_weights=weights.numpy())], device="cpu"
    )


def columns(number: int = 3) -> list[list[str]]:
    return [[f"{WORDS[row]} {WORDS[20 + row + 3 * column]}" for row in range(8)] for column in range(number)]


def features(model: Any, number: int) -> list[dict[str, Tensor]]:
    return [model.preprocess(column) for column in columns(number)]


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("symmetric", [False, True])
def test_softmax_is_their_own_loss(model: Any, number: int, symmetric: bool) -> None:
    losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    theirs = losses.MultipleNegativesRankingLoss(model, scale=10.0, **(both if symmetric else {}))
    ours = InBatchSentenceLoss(model, temperature=0.1, symmetric=symmetric)
    gradients = []
    for loss in (ours, theirs):
        model.zero_grad()
        value = loss(features(model, number), None)
        value.backward()
        gradients.append([value.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("member", ["softmax", "sparsemax"])
def test_their_trainer_trains_with_it(model: Any, member: str, tmp_path: Path) -> None:
    datasets, _ = pytest.importorskip("datasets"), pytest.importorskip("accelerate")
    library = importlib.import_module("sentence_transformers")
    loss = InBatchSentenceLoss(model, temperature=0.2, member=member, learnable=True)
    given = features(model, 3)
    before = float(loss(given).detach())
    arguments = library.SentenceTransformerTrainingArguments(
        str(tmp_path),
        max_steps=30,
        per_device_train_batch_size=8,
        learning_rate=3e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = datasets.Dataset.from_dict(dict(zip(("query", "document", "negative"), columns(), strict=True)))
    library.SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=loss).train()
    assert float(loss(given).detach()) < 0.5 * before
    assert loss.get_config_dict()["temperature"] != pytest.approx(0.2, abs=1e-3)  # learned
    model.save(str(tmp_path / "saved"))
    card = (tmp_path / "saved" / "README.md").read_text(encoding="utf-8")
    assert "loss:InBatchSentenceLoss" in card
    assert f'"member": "{member}"' in card


def test_a_batch_of_one_column_is_refused(model: Any) -> None:
    with pytest.raises(ArgumentError, match="two columns"):
        InBatchSentenceLoss(model)(features(model, 1))
