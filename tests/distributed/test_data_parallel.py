"""A run on several ranks against the run on one: the same steps, up to the order of summation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from manymax.engine.target import Target
from manymax.errors import ArgumentError, ManymaxError
from manymax.samplers import SAMPLERS
from manymax.study.config import RunConfig
from manymax.study.data.batches import Batch
from manymax.study.parallel import Team, rows_of
from manymax.study.records import EPOCHS, MODEL, Record
from manymax.study.run import build_model, follow_run, prepare_data, run
from manymax.study.train import compute_gradients, epoch_batches
from tests.distributed.pool import Pool

TINY = {"data": "planted", "size": "60x50x9", "dim": 4, "batch_size": 150, "lr": 0.01, "epochs": 2, "threads": 1}
SASREC = {"backbone": "sasrec", "dropout": 0.0, "layers": 1, "hidden": 8, "init_scale": 0.3}
SAMPLED = {"loss": "ssm", "num_negatives": 5, "pool": 12, "codewords": 3, "init_scale": 0.3}
CASES: dict[str, dict[str, Any]] = {
    "mf": {"loss": "softmax"},
    "mf, whole users": {"loss": "entmax", "learnable_alpha": True, "batches": "users", "multilabel": "normalized"},
    "mf, a tree": {"loss": "hsm", "batches": "chunks", "chunk": 3},
    "mf, a last batch of few rows": {"loss": "rg", "batches": "users", "batch_size": 8, "label_smoothing": 0.1},
    "mf, accumulated and clipped": {"loss": "rankmax", "accumulate": 3, "clip": 0.01, "batch_size": 60},
    "mf, held bounds": {"loss": "sl_at_k", "k": 5, "bound_epochs": 2, "epochs": 3},
    "lightgcn": {"backbone": "lightgcn", "loss": "sparsemax", "scale": "cosine"},
    "lightgcn, negatives": {"backbone": "lightgcn", "loss": "bpr", "num_negatives": 3, "sampler": "popularity"},
    "sasrec": {**SASREC, "loss": "softmax"},
    "sasrec, prefixes": {**SASREC, "loss": "softmax", "positions": "prefix"},
    "sasrec, windows": {**SASREC, "loss": "softmax", "positions": "windows", "max_length": 4},
    "sasrec, negatives": {**SASREC, "loss": "nce", "learnable_log_z": True, "num_negatives": 5},
} | {
    f"{name}{', shared' if shared else ''}": {**SAMPLED, "sampler": name, "shared": shared}
    for name in SAMPLERS
    for shared in (False, True)
}


def do_run(group: dist.ProcessGroup, settings: dict[str, Any], folder: Path) -> Record | None:
    """A run, whose record rank 0 returns; the other ranks help and return None."""
    team = Team(group)
    if team.rank > 0:
        return follow_run(team)
    try:
        return run(RunConfig.trimmed(TINY | settings), folder, team=team)
    finally:
        team.finish()


def losses(folder: Path) -> list[float]:
    return pq.read_table(folder / EPOCHS)["loss"].to_pylist()


# The first tier has a run of each backbone, one with several positives per row and one of each kind of sampler.
QUICK = {"mf", "mf, whole users", "mf, held bounds", "lightgcn", "sasrec, negatives", "dns", "in_batch, shared"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES])
def test_a_run_on_ranks_is_the_run_on_one(pool: Pool, case: str, tmp_path: Path) -> None:
    (alone,) = pool.run(1, do_run, CASES[case], tmp_path / "1")
    ranks = 2 if "shared" in case else 3
    together, *others = pool.run(ranks, do_run, CASES[case], tmp_path / "n")
    assert others == [None] * (ranks - 1)
    assert (alone.status, together.status) == ("done", "done")
    assert losses(tmp_path / "n") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
    expected, actual = load_file(tmp_path / "1" / MODEL), load_file(tmp_path / "n" / MODEL)
    assert list(actual) == list(expected)
    for name, weight in expected.items():
        rows = torch.ones(len(weight) if weight.ndim else 1, dtype=torch.bool)
        if name.endswith("project.bias"):  # that of the keys has gradient 0: Adam makes steps of rounding errors
            rows[len(rows) // 3 : 2 * len(rows) // 3] = False
        a, b = (weights.reshape(len(rows), -1)[rows] for weights in (actual[name], weight))
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3, msg=lambda m, name=name: f"{name}: {m}")
    # a user in sixty may see two items of the same score change places
    assert together.test["ndcg@20"] == pytest.approx(alone.test["ndcg@20"], abs=2e-2)
    assert {path.name for path in (tmp_path / "n").iterdir()} == {path.name for path in (tmp_path / "1").iterdir()}


def do_run_in_float64(group: dist.ProcessGroup, settings: dict[str, Any], folder: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        do_run(group, settings, folder)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_ranks_choose_the_hardest_candidates_of_one_process(pool: Pool, tmp_path: Path) -> None:
    """In float32 two candidates change places where their scores differ by rounding, and long runs drift apart."""
    settings = {**CASES["dns"], "epochs": 30, "patience": 30, "lr": 0.02}
    for ranks in (1, 3):
        pool.run(ranks, do_run_in_float64, settings, tmp_path / str(ranks))
    expected, actual = load_file(tmp_path / "1" / MODEL), load_file(tmp_path / "3" / MODEL)
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, atol=1e-7, rtol=1e-6)


def all_weights(group: dist.ProcessGroup, settings: dict[str, Any]) -> dict[str, Any]:
    """The gradients of this rank after a step, and its draws of dropout."""
    team, config = Team(group), RunConfig.trimmed(TINY | settings)
    split = prepare_data(config).split
    model = build_model(config, split)
    model.train()
    team.share_draws(model)
    compute_gradients(model, [epoch_batches(config, split, model, 0)[0]], config, 0, team)
    return {"grads": [p.grad for p in model.parameters()], "draw": torch.rand(4)}


def test_every_rank_has_the_same_gradients_and_a_dropout_of_its_own(pool: Pool) -> None:
    first, *rest = pool.run(3, all_weights, {**SASREC, **SAMPLED, "dropout": 0.5})
    for other in rest:
        assert all(torch.equal(a, b) for a, b in zip(first["grads"], other["grads"], strict=True))
        assert not torch.equal(first["draw"], other["draw"])


def test_a_finished_run_leaves_nothing_to_do(pool: Pool, tmp_path: Path) -> None:
    first = pool.run(2, do_run, {}, tmp_path / "run")
    assert pool.run(2, do_run, {}, tmp_path / "run") == first


def test_divergence_is_a_record_of_the_first_rank(pool: Pool, tmp_path: Path) -> None:
    for loss in ("softmax", "nce"):
        record, other = pool.run(2, do_run, {"loss": loss, "lr": 1e30}, tmp_path / loss)
        assert (record.status, other) == ("diverged", None)


def refusing(group: dist.ProcessGroup) -> None:
    """The loss of one rank refuses its rows: all ranks raise its message, and none of them waits for another."""
    team, config = Team(group), RunConfig(**TINY)
    split = prepare_data(config).split
    model = build_model(config, split)
    batch = epoch_batches(config, split, model, 0)[0]
    target = batch.target
    assert isinstance(target, Target)
    target.ids[-1, 0] = 10_000  # of the last rank
    with pytest.raises(ArgumentError, match=r"`target` ids must be in .* 10000"):
        compute_gradients(model, [batch], config, 0, team)


def test_a_refusal_of_one_rank_is_heard_by_all(pool: Pool) -> None:
    pool.run(3, refusing)


def solve(group: dist.ProcessGroup, folder: Path) -> None:
    team = Team(group)
    if team.rank == 0:
        with pytest.raises(ManymaxError, match="`solver='als'` works in one process: start it without torchrun"):
            run(RunConfig(data="planted-tiny", loss="rg", solver="als"), folder, team=team)


def test_als_is_for_one_process(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, solve, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_rows_of_a_batch() -> None:
    history = torch.tensor([[5, 6, -100], [7, -100, -100], [8, 9, 4]])
    batch = Batch(torch.arange(3), history, torch.arange(6), every_position=True)
    parts = [rows_of(batch, 0, 1), rows_of(batch, 1, 2), rows_of(batch, 2, 3)]
    assert [part.target.tolist() for part in parts] == [[0, 1], [2], [3, 4, 5]]
    assert [part.users.tolist() for part in parts] == [[0], [1], [2]]
    assert torch.equal(parts[1].history, history[1:2])
