"""From settings to heads: every option reaches the head, under the name that the head has for it."""

from __future__ import annotations

import math

import pytest
import torch

from manymax.errors import ArgumentError
from manymax.members import FAMILY, REFERENCE_LOSSES
from manymax.samplers import SAMPLERS
from manymax.study.backbones import Vectors
from manymax.study.config import RunConfig
from manymax.study.data.interactions import Lists, Split
from manymax.study.run_head import build_head, build_sampler


@pytest.fixture
def split() -> Split:
    items = torch.tensor([0, 1, 0, 2, 3, 4])
    train = Lists(torch.tensor([0, 2, 4, 6]), items)
    return Split(train, train, train, num_items=6)  # item 5 never occurs


@pytest.mark.parametrize("loss", [*FAMILY, *REFERENCE_LOSSES])
def test_every_loss_has_a_head_that_trains_and_ranks(loss: str, split: Split) -> None:
    head = build_head(RunConfig(loss=loss, dim=4), split)
    queries, vectors = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4)
    items = Vectors(vectors).for_head(head)
    head(queries, torch.tensor([0, 1, 2]), items).backward()
    assert queries.grad is not None
    assert head.topk(queries.detach(), 2, linear_weight=items)[1].shape == (3, 2)


@pytest.mark.parametrize(
    ("settings", "attribute", "value"),
    [
        ({"loss": "entmax", "alpha": 1.3}, "alpha", 1.3),
        ({"loss": "taylor_softmax", "order": 4}, "order", 4),
        ({"loss": "ssm", "num_negatives": 7}, "num_negatives", 7),
        ({"loss": "ssm", "sampler": "in_batch", "num_negatives": 0}, "num_negatives", None),
        ({"loss": "ssm", "sampler": "mixed", "num_negatives": 0}, "num_negatives", None),
        ({"loss": "ssm", "sampler": "mixed", "batch_size": 4, "num_negatives": 9}, "num_negatives", 9),
        ({"loss": "ssm", "shared": True}, "shared", True),
        ({"loss": "ssm", "correction": "partition"}, "correction", "partition"),
        ({"loss": "ssm", "correction": "corrected_logq"}, "correction", "corrected_logq"),
        ({"loss": "ssm", "hit_policy": "mask"}, "hit_policy", "mask"),
        ({"loss": "ssm", "correction": "partition", "debias": "delta"}, "debias", "delta"),
        ({"loss": "ssm", "correction": "partition", "compositional": 0.3}, "compositional", 0.3),
        ({"loss": "nce", "hit_policy": "mask"}, "hit_policy", "mask"),
        ({"loss": "nce"}, "hit_policy", "keep"),
        ({"loss": "nce", "log_z": 0.0}, "log_z", 0.0),
        ({"loss": "nce"}, "log_z", math.log(6)),
        ({"loss": "bpr", "num_negatives": 3}, "num_negatives", 3),
        ({"loss": "gbce", "t": 0.5}, "t", 0.5),
        ({"loss": "softmax", "label_smoothing": 0.1}, "label_smoothing", 0.1),
        ({"loss": "hsm", "label_smoothing": 0.1}, "label_smoothing", 0.1),
        *(
            ({"loss": loss, "batches": "users", "multilabel": "normalized"}, "multilabel", "normalized")
            for loss in ("softmax", "rg", "ssm", "nce", "hsm", "bce")
        ),
    ],
    ids=str,
)
def test_options_arrive(settings: dict, attribute: str, value: object, split: Split) -> None:
    assert getattr(build_head(RunConfig(**settings), split), attribute) == value


def test_the_share_of_mixed_negatives_arrives(split: Split) -> None:
    head = build_head(RunConfig(loss="ssm", sampler="mixed", in_batch_share=0.25), split)
    assert head.sampler.in_batch_share == 0.25


@pytest.mark.parametrize(("loss", "option"), [("entmax", "learnable_alpha"), ("nce", "learnable_log_z")])
def test_a_learnable_setting_is_a_parameter_only_if_asked_for(loss: str, option: str, split: Split) -> None:
    assert len(list(build_head(RunConfig(loss=loss), split).parameters())) == 0
    assert len(list(build_head(RunConfig(**{"loss": loss, option: True}), split).parameters())) == 1


def test_bf16_reaches_the_products(split: Split) -> None:
    assert build_head(RunConfig(bf16=True), split).options.matmul == "bf16"
    assert build_head(RunConfig(), split).options.matmul == "float32"


def test_the_tree_follows_the_training_counts_and_the_seed(split: Split) -> None:
    first, again, other = (build_head(RunConfig(loss="hsm", dim=4, seed=seed), split) for seed in (0, 0, 1))
    assert torch.equal(first.node_vectors, again.node_vectors)
    assert not torch.equal(first.node_vectors, other.node_vectors)
    assert first.tree.mean_length(split.counts()) < first.tree.mean_length(torch.ones(6))


def test_samplers_get_their_options_and_the_training_counts(split: Split) -> None:
    config = RunConfig(loss="ssm", sampler="popularity", power=0.5, smoothing=1.0)
    weights = (split.counts() + 1.0).sqrt()
    torch.testing.assert_close(build_sampler(config, split).log_probs().exp(), weights / weights.sum())
    for sampler in ("dns", "two_pass"):
        assert build_sampler(RunConfig(loss="ssm", sampler=sampler, pool=11), split).num_candidates == 11
    assert build_sampler(RunConfig(loss="ssm", sampler="midx", codewords=3), split).num_codewords == 3
    assert all(build_sampler(RunConfig(loss="ssm", sampler=name), split).num_classes == 6 for name in SAMPLERS)


def test_a_last_batch_too_small_for_its_negatives_is_refused_before_training(split: Split) -> None:
    settings = {"loss": "ssm", "sampler": "in_batch", "batch_size": 4, "num_negatives": 2}
    with pytest.raises(ArgumentError, match="last batch of an epoch has 2 pairs"):
        build_head(RunConfig(**settings), split)
    build_head(RunConfig(**settings | {"num_negatives": 1}), split)
    build_head(RunConfig(**settings | {"num_negatives": 0}), split)
