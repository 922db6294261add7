"""SASRec of RecTools with losses of manymax: softmax is its own; others train, recommend and are saved."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("default")]


@pytest.fixture
def dataset() -> Any:
    """Users who go on by one from item to item, with a weight of two for every third interaction."""
    pytest.importorskip("rectools")
    pandas: Any = importlib.import_module("pandas")
    rectools: Any = importlib.import_module("rectools.dataset")
    rows = [
        {
            "user_id": user,
            "item_id": (user + step) % 30,
            "weight": 1 + (step % 3 == 0),
            "datetime": f"2024-01-{step + 1:02}",
        }
        for user in range(40)
        for step in range(8)
    ]
    return rectools.Dataset.construct(pandas.DataFrame(rows).astype({"datetime": "datetime64[ns]", "weight": float}))


def sasrec(loss: str, ours: bool, epochs: int = 3, similarity: str = "dot", **more: Any) -> Any:
    models: Any = importlib.import_module("rectools.models")
    if ours:
        more["lightning_module_type"] = importlib.import_module("manymax.integrations.rectools").HeadLightningModule
    torch.manual_seed(0)
    return models.SASRecModel(
        n_factors=16,
        n_blocks=1,
        n_heads=1,
        session_max_len=8,
        epochs=epochs,
        lr=0.01,
        batch_size=16,
        loss=loss,
        deterministic=True,
        similarity_module_kwargs={"distance": similarity},
        get_trainer_func=None,
        recommend_torch_device="cpu",
        **more,
    )


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_softmax_is_the_loss_of_rectools(dataset: Any, similarity: str) -> None:
    found, losses = [], []
    for ours in (True, False):
        model = sasrec("softmax", ours, similarity=similarity, lightning_module_kwargs={"logits_t": 0.5})
        torch.manual_seed(1)
        model.fit(dataset)
        losses.append(float(model.fit_trainer.callback_metrics["train_loss"]))
        # A bias of all keys changes no attention: its gradients are rounding, of which Adam makes steps.
        state = model.torch_model.state_dict().items()
        found.append({name: value for name, value in state if not name.endswith("in_proj_bias")})
    assert len(found[0]) > 5
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("loss", "keywords"),
    [
        ("entmax", {"alpha": 1.5, "learnable": True}),
        ("sampled_softmax", {"num_negatives": 10}),
        ("bpr", {"num_negatives": 5}),
    ],
)
def test_a_loss_of_manymax_trains_recommends_and_is_saved(
    dataset: Any, loss: str, keywords: Any, tmp_path: Path
) -> None:
    model = sasrec(loss, True, epochs=20, lightning_module_kwargs={"head_keywords": keywords})
    model.fit(dataset)
    if "learnable" in keywords:
        assert float(model.lightning_model.head.alpha) != pytest.approx(1.5, abs=1e-3)
    given = {"users": list(range(30)), "dataset": dataset, "k": 1, "filter_viewed": True}
    first = model.recommend(**given)
    # The next item is the one after the last: a user is at (user + 7) % 30.
    hits = (first["item_id"] == (first["user_id"] + 8) % 30).mean()
    assert hits > 0.8
    model.save(tmp_path / "model")
    again = type(model).load(tmp_path / "model").recommend(**given)
    assert again["item_id"].tolist() == first["item_id"].tolist()


def test_a_tree_is_refused(dataset: Any) -> None:
    with pytest.raises(Exception, match="vectors of its own"):
        sasrec("hierarchical_softmax", True).fit(dataset)
