"""The end of a run: its best weights are tested, and the files of its folder written, the record last."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manymax.study.checkpoint import write_tensors
from manymax.study.config import RunConfig
from manymax.study.data.interactions import PARTS
from manymax.study.data.prepare import Prepared
from manymax.study.evaluate import Evaluation, evaluate, popularity
from manymax.study.records import (
    CHECKPOINT,
    MODEL,
    Record,
    checksums,
    new_record,
    write_epochs,
    write_record,
    write_users,
    write_vocabulary,
)
from manymax.study.supervisor import TrainingSupervisor
from manymax.study.train import Model


def evaluate_part(config: RunConfig, model: Model, prepared: Prepared, part: str) -> Evaluation:
    """The metrics of `model` on the validation or the test part, at the cutoffs that the settings ask for."""
    cutoffs = config.evaluation.cutoffs
    if part == "valid" and config.evaluation.monitor is not None:
        # Each epoch is judged by one metric, and lists for the longest cutoff would take a multiple of its time.
        cutoffs = (int(config.monitored.partition("@")[2]),)
    return evaluate(model.backbone, model.head, prepared.split, part, cutoffs=cutoffs, truth=prepared.truth)


def test_best(supervisor: TrainingSupervisor, model: Model, folder: Path, prepared: Prepared) -> dict[str, Any]:
    """Test the best weights and the popularity ranking, and write what is needed to serve the model.

    Returns:
        The fields `popularity` and `test` of the record; the latter is missing if the run diverged before its first
        evaluation.
    """
    config, split, found = supervisor.config, prepared.split, {}
    with supervisor.timed("testing"):
        baseline = popularity(split, "test", cutoffs=config.evaluation.cutoffs, truth=prepared.truth)
        found["popularity"] = finite(baseline.mean)
        if supervisor.best:
            model.load_state_dict(supervisor.best)
            test = evaluate_part(config, model, prepared, "test")
            found["test"] = finite(test.mean)
            write_users(folder, prepared.interactions.user_ids[test.users.numpy()], test.per_user)
            write_tensors(folder / MODEL, supervisor.best, {"hash": config.content_hash()})
        made = prepared.interactions
        write_vocabulary(folder, made.user_ids, made.item_ids, split, made.item_titles)
    return found


def write_outcome(supervisor: TrainingSupervisor, folder: Path, prepared: Prepared, **outcome: Any) -> Record:
    """Write `epochs.parquet` and `record.json`, then delete the checkpoint of a finished run.

    In this order: the record says that everything else is there. A kill before the record leaves a run that continues
    from its checkpoint; a kill after it leaves a checkpoint that the next start deletes.
    """
    state, split = supervisor.state, prepared.split
    best = next((row for row in state.rows if row["epoch"] == state.best_epoch), {})
    record = new_record(
        supervisor.config,
        sizes={"users": split.num_users, "items": split.num_items}
        | {part: getattr(split, part).items.numel() for part in PARTS},
        card=prepared.card,
        epochs=state.epoch,
        best_epoch=state.best_epoch,
        valid=finite({name: value for name, value in best.items() if "@" in name}),
        seconds=state.seconds,
        backend=state.backend,
        training_memory_mb=state.training_memory_mb,
        **outcome,
    )
    if state.rows:
        write_epochs(folder, state.rows)
    record = record.model_copy(update={"files": checksums(folder)})
    write_record(folder, record)
    if record.final:
        (folder / CHECKPOINT).unlink(missing_ok=True)
    return record


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics with None in place of nan and infinity, which JSON does not have."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
