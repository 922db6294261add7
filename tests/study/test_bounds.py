"""Bounds that a run holds for some epochs: found from all items, used in every step, saved with the model."""

from __future__ import annotations

import pytest
import torch

from manymax import ArgumentError, linear_sl_at_k_loss
from manymax.study.config import RunConfig
from manymax.study.data.interactions import Split
from manymax.study.run import build_model, prepare_data
from manymax.study.train import epoch_batches, refresh_bounds

SETTINGS = {
    "data": "planted-tiny",
    "dim": 8,
    "batch_size": 200,
    "loss": "sl_at_k",
    "k": 5,
    "gate_temperature": 12.5,
    "scale": "cosine",
    "temperature": 0.2,
    "exclude": "positives",
    "decoupled": True,
    "bound_epochs": 5,
}


@pytest.fixture(scope="module")
def split() -> Split:
    return prepare_data(RunConfig(**SETTINGS)).split


def test_bounds_are_refreshed_every_so_many_epochs(split: Split) -> None:
    """The fifth largest score of each user over all items, and the same until they are due again."""
    config = RunConfig(**SETTINGS)
    model = build_model(config, split)
    tables = model.backbone.backbone
    for epoch in range(7):
        with torch.no_grad():
            tables.users.weight.add_(torch.randn_like(tables.users.weight))
        before = None if model.bounds is None else model.bounds.clone()
        refresh_bounds(model, config, epoch)
        users, items = (torch.nn.functional.normalize(t.weight) for t in (tables.users, tables.items))
        exact = (users @ items.T / 0.2).sort(1, descending=True).values[:, 4]
        assert model.bounds is not None
        torch.testing.assert_close(model.bounds, exact if epoch in (0, 5) else before, rtol=1e-5, atol=1e-5)
        assert epoch in (0, 5) or not torch.allclose(model.bounds, exact, atol=1e-2)
    assert model.backbone.training


def test_the_loss_of_a_batch_uses_them(split: Split) -> None:
    config = RunConfig(**SETTINGS)
    model = build_model(config, split)
    assert model.bounds is not None
    model.bounds.copy_(torch.linspace(-3, 3, len(model.bounds)))
    batch = epoch_batches(config, split, model, 0)[0]
    vectors = model.backbone.vectors()
    expected = linear_sl_at_k_loss(
        model.backbone.queries(batch, vectors),
        vectors.items,
        batch.target,
        k=5,
        gate_temperature=12.5,
        exclude=batch.exclude,
        decoupled=True,
        bound=model.bounds[batch.users],
    )
    torch.testing.assert_close(model(batch), expected)
    assert "bounds" in model.state_dict()


def test_a_run_without_them_keeps_none(split: Split) -> None:
    model = build_model(RunConfig(**{**SETTINGS, "bound_epochs": 0}), split)
    assert model.bounds is None
    assert "bounds" not in model.state_dict()


@pytest.mark.parametrize("changed", [{"loss": "softmax"}, {"backbone": "sasrec"}])
def test_the_setting_is_refused_where_it_has_no_effect(changed: dict[str, str]) -> None:
    given = {"data": "planted-tiny", "loss": "talos", "bound_epochs": 5, **changed}
    with pytest.raises(ArgumentError, match="bound_epochs"):
        RunConfig(**given)
