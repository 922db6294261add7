"""Reading runs from folders, and grouping those that differ in the seed alone into trials."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from manymax.errors import ManymaxError
from manymax.members import FAMILY, REFERENCE_LOSSES
from manymax.study.records import EPOCHS, RECORD, SETTINGS_FILE, write_epochs
from manymax.study.report.runs import read_study
from manymax.study.report.trials import at_best_rates, metrics, natural_sort_key, trials
from tests.study.report.generated import QUALITY, grid, write_run


def labels(folder: Path) -> list[str]:
    return [trial.label for trial in trials(read_study(folder).done)]


def test_runs_that_differ_in_the_seed_are_one_trial(tmp_path: Path) -> None:
    for seed, quality in enumerate((0.2, 0.3, 0.4)):
        write_run(tmp_path, seed=seed, quality=quality)
    (trial,) = trials(read_study(tmp_path).done)
    values = [run.record.test["ndcg@20"] for run in trial.runs]
    assert [run.settings["seed"] for run in trial.runs] == [0, 1, 2]
    assert trial.mean("ndcg@20") == pytest.approx(np.mean(values))
    assert trial.spread("ndcg@20") == pytest.approx(np.std(values, ddof=1))
    assert trial.mean("no such metric") is None


def test_one_seed_has_no_spread(tmp_path: Path) -> None:
    write_run(tmp_path)
    (trial,) = trials(read_study(tmp_path).done)
    assert trial.spread("ndcg@20") is None


def test_losses_are_in_the_order_of_the_family_and_reference_losses_follow(tmp_path: Path) -> None:
    grid(tmp_path, losses=sorted(QUALITY))
    assert labels(tmp_path) == [name for name in (*FAMILY, *REFERENCE_LOSSES) if name in QUALITY]


def test_a_label_names_what_varies_for_its_loss_and_nothing_else(tmp_path: Path) -> None:
    write_run(tmp_path, loss="softmax")
    write_run(tmp_path, loss="softmax", backbone="sasrec")  # the backbone is never part of a label
    for k in (5, 10):
        write_run(tmp_path, loss="nce", num_negatives=k, lr=1e-2)
    write_run(tmp_path, loss="sampled_softmax", num_negatives=7)
    assert labels(tmp_path) == [
        "softmax",
        "sampled_softmax",
        "nce (num_negatives=5)",
        "nce (num_negatives=10)",
        "softmax",
    ]


def test_als_has_no_learning_rate(tmp_path: Path) -> None:
    write_run(tmp_path, loss="rg", solver="als")
    write_run(tmp_path, loss="rg", lr=0.01)
    found = {trial.label: trial.lr for trial in trials(read_study(tmp_path).done)}
    assert found == {"rg (solver=als)": None, "rg (solver=gradient)": 0.01}


def test_de_biasing_is_named_before_the_correction_it_asks_for(tmp_path: Path) -> None:
    write_run(tmp_path, loss="sampled_softmax")
    write_run(tmp_path, loss="sampled_softmax", correction="partition", debias="jackknife")
    assert labels(tmp_path) == ["sampled_softmax", "sampled_softmax (debias=jackknife)"]


def test_how_a_run_was_watched_shows_where_nothing_else_differs(tmp_path: Path) -> None:
    write_run(tmp_path, loss="softmax", lr=1e-3, patience=10)
    write_run(tmp_path, loss="softmax", lr=5e-4, patience=3, eval_every=4)
    assert labels(tmp_path) == ["softmax", "softmax"], "two rates of one trial"
    write_run(tmp_path, loss="softmax", lr=1e-3, patience=40)
    assert set(labels(tmp_path)) == {f"softmax (patience={patience})" for patience in (3, 10, 40)}


def test_what_varies_under_another_backbone_is_not_named(tmp_path: Path) -> None:
    write_run(tmp_path, loss="softmax", patience=5)
    for patience in (10, 40):
        write_run(tmp_path, loss="softmax", backbone="sasrec", patience=patience)
    assert labels(tmp_path) == ["softmax", "softmax (patience=10)", "softmax (patience=40)"]


def test_labels_are_as_short_as_tells_trials_apart(tmp_path: Path) -> None:
    """A setting that follows from another one, as the pool does from the sampler, is not part of a label."""
    write_run(tmp_path, loss="nce", num_negatives=5)
    write_run(tmp_path, loss="nce", num_negatives=20)
    write_run(tmp_path, loss="nce", num_negatives=20, sampler="dns", pool=100)
    write_run(tmp_path, loss="nce", num_negatives=20, data="elsewhere")
    made = trials(read_study(tmp_path).done)
    assert {trial.label for trial in made if trial.data == "planted"} == {
        "nce (num_negatives=5)",
        "nce (num_negatives=20, sampler=uniform)",
        "nce (num_negatives=20, sampler=dns)",
    }
    assert {trial.label for trial in made if trial.data == "elsewhere"} == {"nce (num_negatives=20, sampler=uniform)"}
    assert {tuple(trial.varied) for trial in made} == {("num_negatives", "sampler")}


def test_data_sets_are_named_as_shortly_as_tells_them_apart(tmp_path: Path) -> None:
    for data in ("one/ratings.csv", "two/ratings.csv", "three/books.csv"):
        write_run(tmp_path, data=data)
    write_run(tmp_path, data="three/books.csv", k_core=5)
    write_run(tmp_path, data="x.parquet", name="ml-1m")
    assert {trial.data for trial in trials(read_study(tmp_path).done)} == {
        "one/ratings.csv",
        "two/ratings.csv",
        "books",
        "books (k_core=5)",
        "ml-1m",
    }


def test_a_split_that_goes_with_the_backbone_is_no_other_data(tmp_path: Path) -> None:
    write_run(tmp_path, split="ratio", backbone="mf")
    write_run(tmp_path, split="leave-one-out", backbone="sasrec")
    assert {trial.data for trial in trials(read_study(tmp_path).done)} == {"planted"}


def test_numbers_sort_as_numbers() -> None:
    names = ["nce (k=100)", "nce (k=5)", "nce (k=10)", "nce"]
    assert sorted(names, key=natural_sort_key) == ["nce", "nce (k=5)", "nce (k=10)", "nce (k=100)"]


def test_the_learning_rate_is_chosen_on_the_validation_part(tmp_path: Path) -> None:
    write_run(tmp_path, lr=1e-3, quality=0.3)
    write_run(tmp_path, lr=1e-4, quality=0.2)
    made = trials(read_study(tmp_path).done)
    for run in made[1].runs:  # better in validation, worse in the test
        run.record.valid["ndcg@20"] = 0.9
    (best,) = at_best_rates(made, "ndcg@20")
    assert best.lr == 1e-4


def test_the_cutoff_is_the_papers_or_the_largest(tmp_path: Path) -> None:
    write_run(tmp_path)
    made = trials(read_study(tmp_path).done)
    assert metrics(made) == ["ndcg@20", "precision@20", "recall@20"]
    record = made[0].runs[0].record
    values = {"ndcg@5": 0.1, "ndcg@10": 0.1, "coverage@10": 0.1}
    record.test.clear()
    record.test.update(values)
    assert metrics(made) == ["ndcg@10"]
    assert metrics([]) == []


def test_curves_are_means_of_what_all_seeds_have(tmp_path: Path) -> None:
    write_run(tmp_path, seed=0, epochs=5, quality=0.2)
    write_run(tmp_path, seed=1, epochs=3, quality=0.4)
    (trial,) = trials(read_study(tmp_path).done)
    assert trial.curve["epoch"].tolist() == [1, 2, 3]
    singles = [run.epochs["ndcg@20"][:3] for run in trial.runs]
    assert trial.curve["ndcg@20"] == pytest.approx(np.mean(singles, axis=0))


def test_epochs_without_evaluation_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    write_epochs(folder, [{"epoch": 1, "loss": 1.0}, {"epoch": 2, "loss": 0.5, "ndcg@20": 0.1}])
    (trial,) = trials(read_study(tmp_path).done)
    assert trial.curve["epoch"].tolist() == [2]


def test_what_cannot_be_read_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    good = write_run(tmp_path, seed=0)
    no_json = write_run(tmp_path, seed=1)
    (no_json / RECORD).write_text("{", encoding="utf-8")
    no_parquet = write_run(tmp_path, seed=2)
    (no_parquet / EPOCHS).write_bytes(b"PAR1")
    other = write_run(tmp_path, seed=3)
    (other / RECORD).write_text('{"a": 1}', encoding="utf-8")
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / SETTINGS_FILE).write_text("{}", encoding="utf-8")
    study = read_study(tmp_path)
    assert [run.folder for run in study.runs] == [good]
    assert study.unfinished == (begun,)
    assert len(study.unreadable) == 3
    for folder, name in ((no_json, RECORD), (no_parquet, EPOCHS), (other, RECORD)):
        assert any(str(folder / name) in reason for reason in study.unreadable)


def test_one_run_is_a_study_too(tmp_path: Path) -> None:
    assert len(read_study(write_run(tmp_path)).runs) == 1


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.touch()])
def test_a_folder_without_runs(tmp_path: Path, make) -> None:
    make(tmp_path / "x")
    with pytest.raises(ManymaxError, match="manymax study"):
        read_study(tmp_path / "x")
