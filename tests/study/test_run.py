"""A run: its folder, resuming after an interruption, and its errors."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from manymax.errors import ManymaxError
from manymax.study import run as run_module
from manymax.study.checkpoint import TrainingState
from manymax.study.config import RunConfig
from manymax.study.data.prepare import Prepared
from manymax.study.parallel import Team
from manymax.study.records import Record, read_record
from manymax.study.run import finished, load_model, prepare_data, run
from manymax.study.run_outcome import evaluate_part
from manymax.study.supervisor import ProgressReporter
from manymax.study.sweep import sweep

TINY = {"data": "planted-tiny", "dim": 8, "batch_size": 500, "epochs": 3, "lr": 0.01}
SAMPLED = TINY | {"backbone": "sasrec", "loss": "ssm", "num_negatives": 5, "patience": 1, "epochs": 6}
AVERAGED = {"loss": "ssm", "num_negatives": 5, "correction": "partition", "compositional": 0.2}


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare_data(RunConfig(**TINY))


class Events(ProgressReporter):
    """Notes all events, and calls `action` at step `at`."""

    def __init__(self, at: int = -1, action=None) -> None:
        self.heard: list[str] = []
        self.at, self.action = at, action

    def begin(self, config: RunConfig, folder: Path, state: TrainingState) -> None:
        self.heard.append(f"begin {state.step}")

    def step(self, state: TrainingState, loss: float, of: int) -> None:
        if state.step == self.at and self.action is not None:
            self.action()

    def end(self) -> None:
        self.heard.append("end")


def outcome(folder: Path) -> dict[str, object]:
    """The result of a run, without seconds, memory and the machine."""
    record = read_record(folder)
    epochs = pq.read_table(folder / "epochs.parquet").to_pydict()
    return {
        "record": {name: getattr(record, name) for name in ("status", "valid", "test", "epochs", "best_epoch", "card")},
        "epochs": {name: values for name, values in epochs.items() if not name.startswith("seconds")},
        "users": pq.read_table(folder / "user_metrics.parquet").to_pydict(),
        "model": (folder / "model.safetensors").read_bytes(),
    }


def test_a_run_leaves_its_folder_in_order(prepared: Prepared, tmp_path: Path) -> None:
    config = RunConfig(**TINY, cutoffs=(5, 20))
    record = run(config, tmp_path / "a" / "b", prepared=prepared)
    folder = tmp_path / "a" / "b"
    names = {path.name for path in folder.iterdir()}
    kept = {
        "settings.json",
        "epochs.parquet",
        "user_metrics.parquet",
        "items.parquet",
        "user_items.parquet",
        "model.safetensors",
    }
    assert names == {*kept, "record.json", ".lock"}
    assert record == read_record(folder)
    assert (record.status, record.epochs, record.reason) == ("done", 3, None)
    assert (record.sizes["users"], record.sizes["items"]) == (prepared.split.num_users, prepared.split.num_items)
    assert sum(record.sizes[part] for part in ("train", "valid", "test")) == len(prepared.interactions)
    assert {"ndcg@5", "ndcg@20", "recall@20", "regret@20"} <= set(record.test)
    assert set(record.test) == set(record.popularity) == set(record.valid)
    assert {"loading", "training", "evaluation", "testing", "preparing"} <= set(record.seconds)
    epochs = pq.read_table(folder / "epochs.parquet").to_pydict()
    assert epochs["epoch"] == [1, 2, 3]
    assert max(epochs["ndcg@20"]) == record.valid["ndcg@20"]
    users = pq.read_table(folder / "user_metrics.parquet").to_pydict()
    assert sum(users["ndcg@20"]) / len(users["user"]) == pytest.approx(record.test["ndcg@20"])
    assert RunConfig(**record.settings) == config
    assert record.hash == config.content_hash()


def test_a_finished_run_is_not_done_again(prepared: Prepared, tmp_path: Path) -> None:
    config, events = RunConfig(**TINY), Events()
    first = run(config, tmp_path / "run", prepared=prepared)
    assert run(config, tmp_path / "run", progress=events) == first
    assert events.heard == []


def test_a_checkpoint_left_behind_by_a_kill_after_the_record_is_deleted(prepared: Prepared, tmp_path: Path) -> None:
    config = RunConfig(**TINY)
    run(config, tmp_path, prepared=prepared)
    (tmp_path / "checkpoint.safetensors").write_bytes(b"written before the record")
    assert run(config, tmp_path).status == "done"
    assert not (tmp_path / "checkpoint.safetensors").exists()


def test_the_same_settings_give_the_same_bits(prepared: Prepared, tmp_path: Path) -> None:
    config = RunConfig(**SAMPLED)
    for name in ("a", "b"):
        run(config, tmp_path / name, prepared=prepared)
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")


@pytest.mark.parametrize(
    "settings",
    [
        SAMPLED,
        SAMPLED | {"sampler": "midx", "codewords": 4, "accumulate": 3},
        SAMPLED | AVERAGED | {"positions": "windows"},
        TINY | AVERAGED | {"shared": True, "batches": "chunks", "accumulate": 2},
        TINY | {"loss": "entmax", "learnable_alpha": True, "backbone": "lightgcn"},
        TINY | {"loss": "hsm", "eval_every": 2},
        TINY | {"loss": "talos", "k": 5, "tau": 0.3, "scale": "cosine", "temperature": 1.0, "bound_epochs": 2},
        TINY | {"loss": "nce", "learnable_log_z": True, "num_negatives": 5, "bf16": True},
        {"data": "planted-tiny", "loss": "rg", "solver": "als", "dim": 8, "epochs": 5},
    ],
    ids=lambda settings: settings["loss"],
)
def test_ctrl_c_stops_and_the_resumed_run_ends_like_an_uninterrupted_one(
    settings: dict, prepared: Prepared, tmp_path: Path
) -> None:
    config, before = RunConfig(**settings), signal.getsignal(signal.SIGINT)
    run(config, tmp_path / "whole", prepared=prepared)
    steps = pq.read_table(tmp_path / "whole" / "epochs.parquet")["step"].to_pylist()
    for at in sorted({1, steps[0], steps[-1] - 1}):
        events = Events(at, lambda: signal.raise_signal(signal.SIGINT))
        record = run(config, tmp_path / "cut", prepared=prepared, progress=events)
        assert (record.status, record.reason) == ("stopped", "stopped by SIGINT")
        assert (tmp_path / "cut" / "checkpoint.safetensors").exists()
        assert not record.final
    assert run(config, tmp_path / "cut", prepared=prepared).status == "done"
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
    assert not (tmp_path / "cut" / "checkpoint.safetensors").exists()
    assert signal.getsignal(signal.SIGINT) is before  # may be "ignored", if the tests run in the background of a shell


def test_a_run_that_was_killed_at_its_first_file_begins_again(prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / ".settings.json.12.ab.partial").write_text("{", encoding="utf-8")
    assert run(RunConfig(**TINY), tmp_path, prepared=prepared).status == "done"
    assert not list(tmp_path.glob(".*.partial"))


def test_a_second_ctrl_c_stops_at_once(prepared: Prepared, tmp_path: Path) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(RunConfig(**TINY), tmp_path / "run", prepared=prepared, progress=Events(2, twice))
    assert run(RunConfig(**TINY), tmp_path / "run", prepared=prepared).status == "done"


def test_other_settings_in_the_folder_are_named(prepared: Prepared, tmp_path: Path) -> None:
    run(RunConfig(**TINY), tmp_path / "run", prepared=prepared)
    with pytest.raises(ManymaxError, match=r"run with other settings \(lr\): choose another folder"):
        run(RunConfig(**TINY | {"lr": 0.02}), tmp_path / "run", prepared=prepared)
    assert read_record(tmp_path / "run").settings["training"]["lr"] == 0.01


def test_a_folder_of_other_things_is_left_alone(prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious", encoding="utf-8")
    with pytest.raises(ManymaxError, match="holds other files and not a run"):
        run(RunConfig(**TINY), tmp_path, prepared=prepared)
    with pytest.raises(ManymaxError, match="is a file"):
        run(RunConfig(**TINY), tmp_path / "thesis.txt", prepared=prepared)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_bad_data_leaves_no_folder_behind(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("", encoding="utf-8")
    with pytest.raises(ManymaxError, match=r"empty\.csv"):
        run(RunConfig(data=str(tmp_path / "empty.csv")), tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["empty.csv"]


def test_a_finished_run_whose_data_file_has_changed_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    lines = [f"u{user},i{item}" for user in range(12) for item in range(8) if (user + item) % 3]
    path.write_text("user,item\n" + "\n".join(lines), encoding="utf-8")
    config = RunConfig(data=str(path), dim=2, epochs=1)
    record = run(config, tmp_path / "run")
    assert run(config, tmp_path / "run") == record
    path.write_text("user,item\n" + "\n".join(lines[:-5]), encoding="utf-8")
    with pytest.raises(ManymaxError, match=r"own\.csv has changed since the run in .* was finished"):
        run(config, tmp_path / "run")
    path.unlink()  # a file that does not exist any more does not count as changed
    assert run(config, tmp_path / "run") == record


def test_a_study_with_a_changed_file_does_nothing(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("user,item\n" + "".join(f"u{i % 9},i{i % 5}\n" for i in range(45)), encoding="utf-8")
    configs = [RunConfig(data=str(path), dim=2, epochs=1, seed=seed) for seed in (0, 1)]
    run(configs[0], tmp_path / "study" / configs[0].content_hash())
    path.write_text(path.read_text(encoding="utf-8") + "u1,i9\n", encoding="utf-8")
    with pytest.raises(ManymaxError, match=r"own\.csv has changed"):
        sweep(configs, tmp_path / "study")
    assert not (tmp_path / "study" / configs[1].content_hash()).exists()


def test_data_that_changed_during_a_run_is_an_error(prepared: Prepared, tmp_path: Path) -> None:
    config = RunConfig(**TINY)
    events = Events(3, lambda: signal.raise_signal(signal.SIGINT))
    run(config, tmp_path / "run", prepared=prepared, progress=events)
    other = prepare_data(RunConfig(**TINY, seed=1))
    with pytest.raises(ManymaxError, match="the data has changed since"):
        run(config, tmp_path / "run", prepared=other)


def test_divergence_is_a_record(prepared: Prepared, tmp_path: Path) -> None:
    config = RunConfig(**TINY | {"lr": 1e30})
    record = run(config, tmp_path / "run", prepared=prepared)
    assert record.status == "diverged"
    assert "in epoch 1" in str(record.reason)
    assert (record.test, record.best_epoch) == ({}, 0)
    assert record.popularity["ndcg@20"] > 0
    assert run(config, tmp_path / "run", prepared=prepared) == record
    with pytest.raises(ManymaxError, match="holds no trained model: its run is diverged"):
        load_model(tmp_path / "run")


def test_divergence_later_keeps_the_best_weights_so_far(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = []
    build = run_module.build_model
    monkeypatch.setattr(run_module, "build_model", lambda *args: models.append(build(*args)) or models[-1])

    def spoil() -> None:
        models[0].backbone.users.weight.data[0] = torch.nan

    events = Events(10, spoil)
    record = run(RunConfig(**TINY), tmp_path / "run", prepared=prepared, progress=events)
    assert (record.status, record.best_epoch, record.epochs) == ("diverged", 1, 1)
    assert record.test["ndcg@20"] is not None
    assert load_model(tmp_path / "run")[1].backbone.users.weight.isfinite().all()


def test_an_error_is_recorded_and_the_run_is_tried_again(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        run(RunConfig(**TINY), tmp_path / "run", prepared=prepared, progress=Events(2, fail))
    record = read_record(tmp_path / "run")
    assert (record.status, record.reason) == ("failed", "MemoryError: no room")
    assert finished(RunConfig(**TINY), tmp_path / "run") is None
    assert run(RunConfig(**TINY), tmp_path / "run", prepared=prepared).status == "done"


@pytest.mark.parametrize("name", ["settings.json", "record.json", "checkpoint.safetensors"])
def test_a_damaged_file_is_named(name: str, prepared: Prepared, tmp_path: Path) -> None:
    config, folder = RunConfig(**TINY), tmp_path / "run"
    run(config, folder, prepared=prepared, progress=Events(3, lambda: signal.raise_signal(signal.SIGINT)))
    (folder / name).write_text("{", encoding="utf-8")
    with pytest.raises(ManymaxError, match=name):
        run(config, folder, prepared=prepared)


@pytest.mark.parametrize("name", ["model.safetensors", "items.parquet", "user_items.parquet"])
@pytest.mark.parametrize("content", [None, "{"])
def test_a_finished_run_that_lost_a_file_says_how_to_make_it_again(
    name: str, content: str | None, prepared: Prepared, tmp_path: Path
) -> None:
    config, folder = RunConfig(**TINY), tmp_path / "run"
    run(config, folder, prepared=prepared)
    whole = (folder / name).read_bytes()
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    with pytest.raises(ManymaxError, match=rf"{name}.*Remove record\.json there and train again"):
        load_model(folder)
    (folder / "record.json").unlink()
    run(config, folder, prepared=prepared)
    load_model(folder)
    assert (folder / name).read_bytes() == whole


def test_a_monitor_that_needs_the_true_law_is_refused_without_it(prepared: Prepared, tmp_path: Path) -> None:
    unknown = Prepared(prepared.interactions, prepared.split, prepared.card)
    config = RunConfig(**TINY, monitor="regret@20")
    with pytest.raises(ManymaxError, match=r"needs the true p\(item \| user\) of the data"):
        run(config, tmp_path / "run", prepared=unknown)


def test_a_loaded_model_scores_as_the_trained_one(prepared: Prepared, tmp_path: Path) -> None:
    hsm, averaged, cosine = {"loss": "hsm"}, AVERAGED, {"backbone": "lightgcn", "scale": "cosine"}
    for number, settings in enumerate((SAMPLED, TINY | hsm, TINY | averaged, TINY | cosine)):
        folder = tmp_path / str(number)
        record = run(RunConfig(**settings), folder, prepared=prepared)
        config, model, _, _, split = load_model(folder)
        again = evaluate_part(config, model, Prepared(prepared.interactions, split, [], prepared.truth), "test")
        assert again.mean == record.test


def test_averages_of_pairs_are_learned_saved_and_matter(prepared: Prepared, tmp_path: Path) -> None:
    settings = TINY | AVERAGED
    plain = run(RunConfig(**{**settings, "compositional": None}), tmp_path / "plain", prepared=prepared)
    assert run(RunConfig(**settings), tmp_path / "run", prepared=prepared).test != plain.test
    averages = load_model(tmp_path / "run")[1].head.pair_averages
    assert len(averages) == prepared.split.train.items.numel()
    assert averages.isfinite().all()  # every pair was met
    # Relative to the positive, which is a part of it, a sum is above 1; with C classes of about equal scores it is C.
    assert averages.min() > 0
    assert abs(averages.mean().exp() / prepared.split.num_items - 1) < 0.5


def test_averages_of_pairs_are_refused_on_several_ranks(prepared: Prepared, tmp_path: Path) -> None:
    team = Team()
    team.size = 2
    with pytest.raises(ManymaxError, match=r"`compositional` works in one process, .* start it without torchrun"):
        run(RunConfig(**TINY | AVERAGED), tmp_path / "run", prepared=prepared, team=team)
    assert not (tmp_path / "run").exists()


def test_records_are_json_that_anything_reads(prepared: Prepared, tmp_path: Path) -> None:
    record = run(RunConfig(**TINY), tmp_path / "run", prepared=prepared)
    plain = json.loads((tmp_path / "run" / "record.json").read_text(encoding="utf-8"))
    assert plain["test"]["ndcg@20"] == record.test["ndcg@20"]
    assert plain.pop("checksum")
    assert Record(**plain) == record
