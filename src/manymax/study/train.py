"""Training by gradient descent: fetch a batch, forward, backward, optimiser step; evaluate after each epoch."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from manymax.engine.head import LinearHead
from manymax.errors import ArgumentError
from manymax.samplers import Sampler
from manymax.study.backbones.base import Backbone
from manymax.study.config import RunConfig
from manymax.study.data.batches import Batch, Batches, training_batches
from manymax.study.data.interactions import Split
from manymax.study.parallel import Team
from manymax.study.seeds import derive, generator
from manymax.study.supervisor import TrainingSupervisor


class Model(nn.Module):
    """A backbone and a head; its state dict is what checkpoints and `model.safetensors` hold."""

    backbone: Backbone
    head: LinearHead
    bounds: Tensor | None

    def __init__(self, backbone: Backbone, head: LinearHead, held: int = 0) -> None:
        """With `held` users the model keeps the K-th largest score of each, which `refresh_bounds` finds."""
        super().__init__()
        self.backbone, self.head = backbone, head
        # A buffer is in checkpoints: a run that is resumed goes on with the same bounds.
        self.register_buffer("bounds", torch.zeros(held) if held else None)

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a batch, a scalar."""
        vectors = self.backbone.vectors()
        queries = self.backbone.queries(batch, vectors)
        # Not every kind of head takes ids that its sums leave out, and numbers of its pairs.
        given = {"exclude": batch.exclude, "pair_ids": batch.pair_ids}
        listed = {name: ids for name, ids in given.items() if ids is not None}
        if self.bounds is not None:
            listed["bound"] = self.bounds[batch.users]
        loss: Tensor = self.head(queries, batch.target, vectors.for_head(self.head), **listed)
        return loss


def build_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Adam:
    """Adam with torch's default betas; the fused version makes one pass over the memory instead of about ten."""
    return torch.optim.Adam(
        model.parameters(), lr=config.training.lr, weight_decay=config.training.weight_decay, fused=True
    )


def train(
    model: Model,
    optimizer: torch.optim.Optimizer,
    split: Split,
    supervisor: TrainingSupervisor,
    team: Team | None = None,
) -> None:
    """Train until `patience` or `epochs` is used up; `supervisor.best` then holds the best weights.

    Every step seeds its own random generators and every epoch its own order of batches, so that a run resumed from a
    checkpoint takes the same steps as one that was never interrupted.

    Args:
        model, optimizer: changed in place.
        split: its training part is used.
        supervisor: holds the progress, which after a resume begins in the middle of an epoch.
        team: the ranks that share each batch. This function runs on the first rank, the others run `follow`.
    """
    config, state, team = supervisor.config, supervisor.state, team or Team()
    team.share_draws(model)
    model.train()
    supervisor.watch_memory()
    while supervisor.has_epochs_left:
        with supervisor.timed("loading"):
            batches = epoch_batches(config, split, model, state.epoch)
        # Not when resuming in the middle of an epoch: what samplers and bounds were at its beginning is in the
        # checkpoint, as buffers of the model, and the item vectors are different by now.
        if state.batch == 0:
            refresh_samplers(model, config.seed, state.epoch)
            refresh_bounds(model, config, state.epoch)
        while state.batch < len(batches):
            with supervisor.timed("loading"):
                group = next_group(batches, state.batch, config)
            with supervisor.timed("training"):
                team.announce_batch(state.epoch, state.batch, state.step)
                optimizer.zero_grad(set_to_none=True)
                try:
                    losses = compute_gradients(model, group, config, state.step, team)
                except ArgumentError:
                    # A loss refuses scores that are nan. If the weights have diverged, the run ends as "diverged";
                    # otherwise the error is about something else and is raised.
                    supervisor.check_weights()
                    raise
                # Losses are checked before the step, so that weights are never updated from a loss that is not finite.
                # Counting before the step is safe: checkpoints are only written by `save_or_stop` below.
                for loss in losses:
                    supervisor.count_batch(loss, batches_per_epoch=len(batches))
                take_step(model, optimizer, config)
            supervisor.save_or_stop()
        model.eval()  # no dropout in the evaluation
        supervisor.end_epoch()
        model.train()
        supervisor.save_or_stop()


def follow(model: Model, optimizer: torch.optim.Optimizer, split: Split, config: RunConfig, team: Team) -> None:
    """The work of the other ranks while the first runs `train`: the same steps, on their own rows of every batch.

    They neither evaluate nor count: the first rank announces each batch, so that all ranks agree on it also after a
    resume or an early stop.
    """
    team.share_draws(model)
    model.train()
    current_epoch = None
    while (announced := team.next_batch()) is not None:
        epoch, batch, step = announced
        if epoch != current_epoch:
            batches, current_epoch = epoch_batches(config, split, model, epoch), epoch
        if batch == 0:
            refresh_samplers(model, config.seed, epoch)
            refresh_bounds(model, config, epoch)
        optimizer.zero_grad(set_to_none=True)
        # `compute_gradients` raises an error of one rank on all ranks. The first rank decides what it means.
        with contextlib.suppress(ArgumentError):
            compute_gradients(model, next_group(batches, batch, config), config, step, team)
            take_step(model, optimizer, config)


def next_group(batches: Batches, first: int, config: RunConfig) -> list[Batch]:
    """The batches of one optimiser step: `accumulate` of them, fewer at the end of an epoch."""
    return [batches[i] for i in range(first, min(first + config.training.accumulate, len(batches)))]


def compute_gradients(model: Model, group: list[Batch], config: RunConfig, step: int, team: Team) -> list[float]:
    """Add the gradient of the mean loss of some batches to the gradients of the parameters.

    Args:
        model: its parameters' `grad` are added to.
        group: the batches of one optimiser step.
        config: settings of the run.
        step: number of the first of these batches since the beginning of the run; it seeds the random numbers.
        team: each rank computes its own rows of every batch, then gradients and losses are summed over the ranks.

    Returns:
        The loss of each batch.
    """
    losses = [torch.zeros(()) for _ in group]
    refused = None
    try:
        for i, batch in enumerate(group):
            own, weight = team.own_rows(batch, config.loss.multilabel)
            if own is None:  # the batch has fewer rows than there are ranks
                continue
            seed_step(model, config.seed, step + i, team.rank)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.training.bf16):
                loss = weight * model(own)
            (loss / len(group)).backward()
            losses[i] = loss.detach()
    except ArgumentError as error:
        # Not raised here: the other ranks wait in the sum below, which tells them of the error.
        refused = error
    return team.sum_gradients(model, losses, refused)


def take_step(model: Model, optimizer: torch.optim.Optimizer, config: RunConfig) -> None:
    """Clip the gradients if asked for, and update the weights."""
    if config.training.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), config.training.clip)
    optimizer.step()


def epoch_batches(config: RunConfig, split: Split, model: Model, epoch: int) -> Batches:
    """The batches of an epoch; their order depends on the seed and the number of the epoch alone."""
    # The flat form has a value of every setting, also of those that the chosen backbone does not declare: backbones
    # without histories do not look at `positions` and `max_length`.
    training, every_setting = config.training, config.flat()
    return training_batches(
        split,
        model.backbone,
        batch_size=training.batch_size,
        batches=training.batches,
        chunk=training.chunk,
        positions=every_setting["positions"],
        max_length=every_setting["max_length"],
        grouped=config.groups_pairs,
        exclude=config.loss.exclude == "positives",
        numbered=config.keeps_pairs,
        generator=generator(config.seed, "shuffle", step=epoch),
    )


def seed_step(model: Model, seed: int, step: int, rank: int = 0) -> None:
    """Seed the random numbers of one step.

    Negatives depend on the seed and the step only, so that all ranks draw the same. Dropout, which uses torch's global
    generator, depends on the rank too: with one seed, rows of different ranks would get the same masks.
    """
    # The name of rank 0 is the one without a number, so that a run on one process keeps its random numbers.
    torch.manual_seed(derive(seed, f"dropout-{rank}" if rank else "dropout", step))
    draws = getattr(model.head, "generator", None)
    if draws is not None:
        draws.manual_seed(derive(seed, "negatives", step))


@torch.no_grad()
def refresh_samplers(model: Model, seed: int, epoch: int) -> None:
    """Let samplers whose proposal depends on the item vectors recompute it from the current ones."""
    for module in model.head.modules():
        if isinstance(module, Sampler):
            module.refresh(model.backbone.vectors().items, generator(seed, "sampler", step=epoch))


@torch.no_grad()
def refresh_bounds(model: Model, config: RunConfig, epoch: int) -> None:
    """Before the first epoch and again every `bound_epochs`: the K-th largest of all scores of each user."""
    if model.bounds is None or epoch % config.loss.bound_epochs:
        return
    training = model.backbone.training
    model.backbone.eval()  # no dropout in the scores
    vectors = model.backbone.vectors()
    length = min(getattr(model.head, "k"), model.head.num_classes)  # noqa: B009, of heads with a list of K
    for users in torch.arange(len(model.bounds)).split(config.training.batch_size):
        queries = model.backbone.queries(Batch(users), vectors)
        model.bounds[users] = model.head.topk(queries, length, vectors.for_head(model.head))[0][:, -1]
    model.backbone.train(training)
