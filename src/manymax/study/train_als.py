"""Training on matrix factorisation by a solver that a member brings, which alternates: an epoch is one sweep."""

from __future__ import annotations

from typing import Any

import torch

from manymax.study.data.interactions import Split
from manymax.study.run_head import own_keywords
from manymax.study.supervisor import TrainingSupervisor
from manymax.study.train import Model


@torch.no_grad()
def train_als(model: Model, split: Split, supervisor: TrainingSupervisor) -> None:
    """Alternate until patience or sweeps are used up; `supervisor.best` then holds the best weights.

    The solver works on the vectors of the model itself, so a checkpoint is the model's state and nothing else. The
    loss of a sweep is the objective per interaction.
    """
    config = supervisor.config
    tables: Any = model.backbone  # `BackboneEntry.factors`: two tables of vectors and nothing else
    row = config.member.solvers[config.training.solver]
    own = own_keywords(row.settings, config.training.own)
    solver = row.make(split.num_users, split.num_items, config.backbone.dim, **own)
    # the first vectors are the model's, whatever the solver has drawn
    solver.user_vectors, solver.item_vectors = tables.users.weight.data, tables.items.weight.data
    solver.observe(split.train.users(), split.train.items)
    while supervisor.going:
        with supervisor.timed("training"):
            solver.update_users()
            solver.update_items()
            supervisor.count_batch(solver.objective() / split.train.items.numel(), of=1)
        supervisor.end_epoch()
        supervisor.save_or_stop()
