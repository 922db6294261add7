"""The training loop against a plain one; early stopping; what the random numbers of a step depend on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from manymax.members import FAMILY, REFERENCE_LOSSES
from manymax.members.rg.als import RGFactorization
from manymax.samplers import SAMPLERS
from manymax.study.checkpoint import snapshot
from manymax.study.config import RunConfig
from manymax.study.data.prepare import Prepared
from manymax.study.run import build_model, prepare_data
from manymax.study.seeds import generator
from manymax.study.supervisor import Diverged, ProgressReporter, TrainingSupervisor
from manymax.study.train import Model, build_optimizer, epoch_batches, train
from manymax.study.train_als import train_als

TINY = {"data": "planted-tiny", "dim": 8, "batch_size": 500, "epochs": 2, "lr": 0.01}


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare_data(RunConfig(**TINY))


def start(
    config: RunConfig, prepared: Prepared, path: Path, validate=lambda: {"ndcg@20": 0.0}
) -> tuple[Model, TrainingSupervisor]:
    model = build_model(config, prepared.split)
    optimizer = build_optimizer(config, model) if config.training.solver == "gradient" else None
    supervisor = TrainingSupervisor(
        config, model, validate, path / "c", progress=ProgressReporter(), checkpoint_seconds=1e9, optimizer=optimizer
    )
    return model, supervisor


def go(config: RunConfig, prepared: Prepared, path: Path, **kwargs) -> tuple[Model, TrainingSupervisor]:
    model, supervisor = start(config, prepared, path, **kwargs)
    train(model, supervisor.optimizer, prepared.split, supervisor)
    return model, supervisor


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"clip": 0.01}, {"accumulate": 3}, {"batches": "users"}],
    ids=str,
)
def test_the_loop_takes_the_steps_of_a_plain_one(options: dict, prepared: Prepared, tmp_path: Path) -> None:
    """In float64, because Adam divides by the size of the gradient, which amplifies rounding if it is nearly zero."""
    config = RunConfig(**TINY | options)
    model, supervisor = start(config, prepared, tmp_path)
    train(model.double(), supervisor.optimizer, prepared.split, supervisor)

    plain = build_model(config, prepared.split).double()
    users, items = plain.backbone.users.weight, plain.backbone.items.weight
    adam = torch.optim.Adam([users, items], lr=0.01, weight_decay=config.training.weight_decay)
    losses: list[float] = []
    for epoch in range(2):
        batches = list(epoch_batches(config, prepared.split, plain, epoch))
        for first in range(0, len(batches), config.training.accumulate):
            group = batches[first : first + config.training.accumulate]
            means = []
            for batch in group:
                pairs = [
                    (user, item)
                    for user, row, weights in zip(batch.users, batch.target.ids, batch.target.weights, strict=True)
                    for item, weight in zip(row, weights, strict=True)
                    if weight
                ]
                rows, targets = (torch.stack(side) for side in zip(*pairs, strict=True))
                means.append(cross_entropy(users[rows] @ items.T, targets))
            adam.zero_grad()
            (sum(means) / len(group)).backward()
            if config.training.clip:
                torch.nn.utils.clip_grad_norm_([users, items], config.training.clip)
            adam.step()
            losses += [mean.item() for mean in means] if epoch == 1 else []
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, atol=1e-10, rtol=1e-8)
    assert supervisor.state.rows[1]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-8)


def test_training_ends_when_patience_is_used_up_and_the_best_weights_are_kept(
    prepared: Prepared, tmp_path: Path
) -> None:
    values = iter([0.1, 0.3, 0.3, 0.2, 0.29, 0.9])
    kept: list[dict[str, torch.Tensor]] = []
    model: Model

    def validate() -> dict[str, float]:
        kept.append(snapshot(model))
        return {"ndcg@20": next(values)}

    config = RunConfig(**TINY | {"epochs": 6, "patience": 3})
    model, supervisor = start(config, prepared, tmp_path, validate)
    train(model, supervisor.optimizer, prepared.split, supervisor)
    state = supervisor.state
    assert (state.epoch, state.best_epoch, state.best_value) == (5, 2, 0.3)  # an equal value does not count as better
    assert [row["ndcg@20"] for row in state.rows] == [0.1, 0.3, 0.3, 0.2, 0.29]
    assert all(torch.equal(supervisor.best[name], kept[1][name]) for name in kept[1])
    assert not torch.equal(supervisor.best["backbone.items.weight"], model.state_dict()["backbone.items.weight"])


def test_a_metric_that_should_be_small_is_watched_downwards(prepared: Prepared, tmp_path: Path) -> None:
    values = iter([0.5, 0.4, 0.6])
    config = RunConfig(**TINY | {"epochs": 3, "monitor": "regret@20"})
    _, supervisor = go(config, prepared, tmp_path, validate=lambda: {"regret@20": next(values)})
    assert (supervisor.state.best_epoch, supervisor.state.best_value) == (2, 0.4)


def test_evaluation_every_so_often_and_always_after_the_last_epoch(prepared: Prepared, tmp_path: Path) -> None:
    config = RunConfig(**TINY | {"epochs": 5, "eval_every": 2})
    _, supervisor = go(config, prepared, tmp_path)
    assert ["ndcg@20" in row for row in supervisor.state.rows] == [False, True, False, True, True]


def test_changing_the_loss_changes_neither_weights_nor_order(prepared: Prepared) -> None:
    first = {}
    for loss in FAMILY:
        config = RunConfig(**TINY, loss=loss)
        model = build_model(config, prepared.split)
        batch = epoch_batches(config, prepared.split, model, 1)[0]
        weights = model.backbone.state_dict()
        first = first or {"weights": weights, "users": batch.users, "ids": batch.target.ids}
        assert all(torch.equal(weights[name], weight) for name, weight in first["weights"].items()), loss
        if config.groups_pairs:
            assert torch.equal(batch.users, first["users"])
            assert torch.equal(batch.target.ids, first["ids"])
        else:  # a loss of all positives of a row together: its pairs stay apart
            assert torch.equal(batch.users.unique(), first["users"])


def test_another_seed_is_another_run(prepared: Prepared) -> None:
    one, other = (RunConfig(**TINY, seed=seed) for seed in (0, 1))
    models = [build_model(config, prepared.split) for config in (one, other)]
    assert not torch.equal(models[0].backbone.users.weight, models[1].backbone.users.weight)
    assert not torch.equal(prepare_data(one).split.train.items, prepare_data(other).split.train.items)


@pytest.mark.parametrize("sampler", list(SAMPLERS))
def test_every_sampler_trains_reproducibly(sampler: str, prepared: Prepared, tmp_path: Path) -> None:
    settings = TINY | {"loss": "ssm", "sampler": sampler, "pool": 20, "num_negatives": 5, "codewords": 4}
    config = RunConfig.trimmed(settings)
    weights = [go(config, prepared, tmp_path)[0].state_dict() for _ in range(2)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_negatives_and_dropout_differ_from_step_to_step(prepared: Prepared, tmp_path: Path) -> None:
    config = RunConfig(**TINY | {"loss": "ssm", "num_negatives": 3, "backbone": "sasrec", "epochs": 1})
    model, supervisor = start(config, prepared, tmp_path)
    seen: list[torch.Tensor] = []
    draw = model.head.sampler.draw
    model.head.sampler.draw = lambda request: seen.append(draw(request).ids[:5]) or draw(request)
    train(model, supervisor.optimizer, prepared.split, supervisor)
    assert len(seen) > 2
    assert len({ids.numpy().tobytes() for ids in seen}) == len(seen)


@pytest.mark.parametrize("loss", [*FAMILY, *REFERENCE_LOSSES])
def test_a_huge_learning_rate_diverges_with_a_message(loss: str, prepared: Prepared, tmp_path: Path) -> None:
    for lr in (1e9, 1e38):
        config = RunConfig(**TINY | {"loss": loss, "lr": lr})
        with pytest.raises(Diverged, match=r"in epoch 1, step \d"):
            go(config, prepared, tmp_path)


def test_als_is_the_solver_of_the_library(prepared: Prepared, tmp_path: Path) -> None:
    config = RunConfig(data="planted-tiny", loss="rg", solver="als", dim=8, epochs=3, ridge=0.05)
    model, supervisor = start(config, prepared, tmp_path)
    train_als(model, prepared.split, supervisor)
    split = prepared.split
    solver = RGFactorization(split.num_users, split.num_items, 8, ridge=0.05, generator=generator(0, "init"))
    objectives = []
    solver.fit(split.train.users(), split.train.items, sweeps=3, callback=lambda m, _: objectives.append(m.objective()))
    torch.testing.assert_close(model.backbone.users.weight.data, solver.user_vectors)
    torch.testing.assert_close(model.backbone.items.weight.data, solver.item_vectors)
    expected = [value / split.train.items.numel() for value in objectives]
    assert [row["loss"] for row in supervisor.state.rows] == pytest.approx(expected)
    assert [row["step"] for row in supervisor.state.rows] == [1, 2, 3]


def test_bf16_stays_near_float32(prepared: Prepared, tmp_path: Path) -> None:
    for backbone in ("mf", "sasrec"):
        plain, half = (
            go(RunConfig(**TINY | {"bf16": bf16, "backbone": backbone}), prepared, tmp_path)[1]
            for bf16 in (False, True)
        )
        losses = [supervisor.state.rows[-1]["loss"] for supervisor in (plain, half)]
        assert losses[0] == pytest.approx(losses[1], rel=0.01)
        assert losses[0] != losses[1]


@pytest.mark.parametrize(("loss", "decoupled"), [("softmax", False), ("softmax", True), ("rankmax", False)])
def test_other_positives_of_a_user_are_left_out_of_the_sum(prepared, loss: str, decoupled: bool) -> None:
    settings = {"exclude": "positives", "scale": "cosine", "temperature": 0.5}
    settings |= {"decoupled": True} if decoupled else {}
    config = RunConfig(**TINY, loss=loss, **settings)
    model = build_model(config, prepared.split)
    batch = epoch_batches(config, prepared.split, model, 0)[0]
    vectors = model.backbone.vectors()
    scores = (model.backbone.queries(batch, vectors) @ vectors.items.T).double()
    rows = []
    for row, user in enumerate(batch.users.tolist()):
        seen = prepared.split.train.padded(torch.tensor([user]))[0]
        ids = batch.target if isinstance(batch.target, torch.Tensor) else batch.target.ids
        for positive in ids.reshape(len(batch.users), -1)[row][weights_of(batch)[row] > 0].tolist():
            left = scores[row].clone()
            own = left[positive].clone()
            left[seen] = -torch.inf
            left[positive] = own
            if decoupled:
                left[positive] = -torch.inf
                rows.append(left.logsumexp(0) - own)
            else:
                rows.append(FAMILY[loss].loss(left, torch.tensor(positive)))
    assert len(rows) == config.training.batch_size
    torch.testing.assert_close(model(batch).double(), torch.stack(rows).mean(), rtol=1e-5, atol=1e-6)


def weights_of(batch) -> torch.Tensor:
    return torch.ones(len(batch.users), 1) if isinstance(batch.target, torch.Tensor) else batch.target.weights
