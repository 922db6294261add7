"""Training by gradients: fetch, forward, backward, step, and once an epoch evaluate."""

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
    """A backbone and a head: what is trained, saved and served."""

    backbone: Backbone
    head: LinearHead

    def __init__(self, backbone: Backbone, head: LinearHead) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a batch."""
        vectors = self.backbone.vectors()
        queries = self.backbone.queries(batch, vectors)
        loss: Tensor = self.head(queries, batch.target, vectors.for_head(self.head))
        return loss


def build_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Adam:
    """Adam with torch's betas; fused, which is one pass over the memory instead of ten."""
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
    """Train until patience or epochs are used up; `supervisor.best` then holds the best weights.

    Every step seeds its own randomness, so a run that goes on from a checkpoint takes the same steps as one that was
    never interrupted. The other ranks of a `team` are at `follow` meanwhile.
    """
    config, state, team = supervisor.config, supervisor.state, team or Team()
    team.share_draws(model)
    model.train()
    while supervisor.going:
        with supervisor.timed("loading"):
            batches = epoch_batches(config, split, model, state.epoch)
        if state.batch == 0:
            refresh_samplers(model, config.seed, state.epoch)
        while state.batch < len(batches):
            with supervisor.timed("loading"):
                group = next_group(batches, state.batch, config)
            with supervisor.timed("training"):
                team.lead(state.epoch, state.batch, state.step)
                optimizer.zero_grad(set_to_none=True)
                try:
                    losses = compute_gradients(model, group, config, state.step, team)
                except ArgumentError:  # a loss refuses scores that are no numbers: have the weights run away?
                    supervisor.check_weights()
                    raise
                for loss in losses:
                    supervisor.count_batch(loss, of=len(batches))
                take_step(model, optimizer, config)
            supervisor.save_or_stop()
        model.eval()
        supervisor.end_epoch()
        model.train()
        supervisor.save_or_stop()


def follow(model: Model, optimizer: torch.optim.Optimizer, split: Split, config: RunConfig, team: Team) -> None:
    """What the other ranks do while the first is at `train`: the same steps, on their own rows of every batch."""
    team.share_draws(model)
    model.train()
    known = None
    while (place := team.next()) is not None:
        epoch, batch, step = place
        if epoch != known:
            batches, known = epoch_batches(config, split, model, epoch), epoch
        if batch == 0:
            refresh_samplers(model, config.seed, epoch)
        optimizer.zero_grad(set_to_none=True)
        with contextlib.suppress(ArgumentError):  # the first rank has it too, and decides
            compute_gradients(model, next_group(batches, batch, config), config, step, team)
            take_step(model, optimizer, config)


def next_group(batches: Batches, first: int, config: RunConfig) -> list[Batch]:
    """The batches of one step."""
    return [batches[i] for i in range(first, min(first + config.training.accumulate, len(batches)))]


def compute_gradients(model: Model, group: list[Batch], config: RunConfig, step: int, team: Team) -> list[float]:
    """The losses of some batches; the gradient of their mean is added to that of the parameters."""
    losses = [torch.zeros(()) for _ in group]
    refused = None
    try:
        for i, batch in enumerate(group):
            own, weight = team.share(batch, config.loss.multilabel)
            if own is None:
                continue
            seed_step(model, config.seed, step + i, team.rank)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.training.bf16):
                loss = weight * model(own)
            (loss / len(group)).backward()
            losses[i] = loss.detach()
    except ArgumentError as error:
        refused = error
    return team.summed(model, losses, refused)


def take_step(model: Model, optimizer: torch.optim.Optimizer, config: RunConfig) -> None:
    """Move the weights along the gradients."""
    if config.training.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), config.training.clip)
    optimizer.step()


def epoch_batches(config: RunConfig, split: Split, model: Model, epoch: int) -> Batches:
    """The batches of an epoch, in the order that the seed gives it."""
    made, histories = config.training, config.flat()  # of which backbones without histories use nothing
    return training_batches(
        split,
        model.backbone,
        batch_size=made.batch_size,
        batches=made.batches,
        chunk=made.chunk,
        positions=histories["positions"],
        max_length=histories["max_length"],
        generator=generator(config.seed, "shuffle", step=epoch),
    )


def seed_step(model: Model, seed: int, step: int, rank: int = 0) -> None:
    """Negatives of a step depend on the seed and the step alone; dropout on the rank too, whose rows are others."""
    torch.manual_seed(derive(seed, f"dropout-{rank}" if rank else "dropout", step))
    draws = getattr(model.head, "generator", None)
    if draws is not None:
        draws.manual_seed(derive(seed, "negatives", step))


@torch.no_grad()
def refresh_samplers(model: Model, seed: int, epoch: int) -> None:
    """Let samplers that follow the item vectors catch up with them."""
    for module in model.head.modules():
        if isinstance(module, Sampler):
            module.refresh(model.backbone.vectors().items, generator(seed, "sampler", step=epoch))
