"""Training by gradients: fetch, forward, backward, step, and once an epoch evaluate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manymax.errors import ArgumentError
from manymax.heads.modules import LinearHead
from manymax.samplers import Sampler
from manymax.study.backbones.base import Backbone
from manymax.study.config import RunConfig
from manymax.study.course import Course
from manymax.study.data.batches import Batch, Batches, training_batches
from manymax.study.data.interactions import Split
from manymax.study.seeds import derive, generator


class Model(nn.Module):
    """A backbone and a head: what is trained, saved and served."""

    backbone: Backbone

    def __init__(self, backbone: Backbone, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a batch."""
        vectors = self.backbone.vectors()
        queries = self.backbone.queries(batch, vectors)
        loss: Tensor = self.head(queries, batch.target, vectors.items if self.takes_items else None)
        return loss

    @property
    def takes_items(self) -> bool:
        """Whether the head scores by the item vectors; a tree has vectors of its own."""
        return isinstance(self.head, LinearHead)


def build_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Adam:
    """Adam with torch's betas; fused, which is one pass over the memory instead of ten."""
    return torch.optim.Adam(model.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True)


def train(model: Model, optimizer: torch.optim.Optimizer, split: Split, course: Course) -> None:
    """Train until patience or epochs are used up; `course.best` then holds the best weights.

    Every step seeds its own randomness, so a run that goes on from a checkpoint takes the same steps as one that was
    never interrupted.
    """
    config, standing = course.config, course.standing
    model.train()
    while course.going:
        with course.timed("loading"):
            batches = epoch_batches(config, split, model, standing.epoch)
        if standing.batch == 0:
            refresh_samplers(model, config.seed, standing.epoch)
        while standing.batch < len(batches):
            with course.timed("loading"):
                group = [
                    batches[standing.batch + i] for i in range(min(config.accumulate, len(batches) - standing.batch))
                ]
            with course.timed("training"):
                optimizer.zero_grad(set_to_none=True)
                for batch in group:
                    seed_step(model, config.seed, standing.step)
                    try:
                        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.bf16):
                            loss = model(batch)
                    except ArgumentError:  # a loss refuses scores that are no numbers: have the weights run away?
                        course.check_weights()
                        raise
                    (loss / len(group)).backward()
                    course.count_batch(loss.item(), of=len(batches))
                if config.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), config.clip)
                optimizer.step()
            course.breathe()
        model.eval()
        course.end_epoch()
        model.train()
        course.breathe()


def epoch_batches(config: RunConfig, split: Split, model: Model, epoch: int) -> Batches:
    """The batches of an epoch, in the order that the seed gives it."""
    return training_batches(
        split,
        model.backbone,
        batch_size=config.batch_size,
        batches=config.batches,
        chunk=config.chunk,
        positions=config.positions,
        max_length=config.max_length,
        generator=generator(config.seed, "shuffle", step=epoch),
    )


def seed_step(model: Model, seed: int, step: int) -> None:
    """Dropout and negatives of a step depend on the seed and the step alone."""
    torch.manual_seed(derive(seed, "dropout", step))
    draws = getattr(model.head, "generator", None)
    if draws is not None:
        draws.manual_seed(derive(seed, "negatives", step))


@torch.no_grad()
def refresh_samplers(model: Model, seed: int, epoch: int) -> None:
    """Let samplers that follow the item vectors catch up with them."""
    for module in model.head.modules():
        if isinstance(module, Sampler):
            module.refresh(model.backbone.vectors().items, generator(seed, "sampler", step=epoch))
