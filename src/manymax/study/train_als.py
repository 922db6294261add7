"""Training of matrix factorisation by alternating least squares, with the solver that the member declares.

An epoch is one sweep: all user vectors are solved for, then all item vectors.
"""

from __future__ import annotations

from typing import Any

import torch

from manymax.study.data.interactions import Split
from manymax.study.run_head import own_keywords
from manymax.study.supervisor import TrainingSupervisor
from manymax.study.train import Model


@torch.no_grad()
def train_als(model: Model, split: Split, supervisor: TrainingSupervisor) -> None:
    """Train until `patience` or `epochs` (sweeps) is used up; `supervisor.best` then holds the best weights.

    The solver changes the vectors of the model in place and keeps no other state, so a checkpoint needs the state of
    the model only. The reported loss of a sweep is the objective divided by the number of interactions.
    """
    config = supervisor.config
    # `RunConfig` admits a solver only on a backbone with `BackboneEntry.factors`: two embeddings and nothing else.
    backbone: Any = model.backbone
    entry = config.member.solvers[config.training.solver]
    own = own_keywords(entry.settings, config.training.own)
    solver = entry.make(split.num_users, split.num_items, config.backbone.dim, **own)
    # Replace the solver's own random start by the vectors of the model: they come from the seed of the run, or from its
    # checkpoint. Sharing the memory means that the model is up to date after each sweep.
    solver.user_vectors, solver.item_vectors = backbone.users.weight.data, backbone.items.weight.data
    solver.observe(split.train.users(), split.train.items)
    while supervisor.has_epochs_left:
        with supervisor.timed("training"):
            solver.update_users()
            solver.update_items()
            supervisor.count_batch(solver.objective() / split.train.items.numel(), batches_per_epoch=1)
        supervisor.end_epoch()
        supervisor.save_or_stop()
