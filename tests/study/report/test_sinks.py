"""Records for TensorBoard and MLflow; a test is skipped where its package, which is optional, is not installed."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

from manymax.errors import ManymaxError
from manymax.study.report.runs import Study, read_study
from manymax.study.report.sinks import to_mlflow, to_tensorboard
from tests.study.report.generated import write_run


@pytest.fixture
def study(tmp_path: Path) -> Study:
    write_run(tmp_path / "runs", loss="softmax", epochs=4)
    write_run(tmp_path / "runs", loss="nce", epochs=4)
    write_run(tmp_path / "runs", loss="rg", status="failed", reason="x")
    return read_study(tmp_path / "runs")


@pytest.mark.parametrize(("module", "write"), [("tensorboard", to_tensorboard), ("mlflow", to_mlflow)])
def test_a_missing_package_is_named(study: Study, tmp_path: Path, monkeypatch, module: str, write) -> None:
    for name in (module, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ManymaxError, match=rf"`{module}`.*pip install"):
        write(study, tmp_path / "out")


@pytest.mark.filterwarnings("ignore")
def test_tensorboard(study: Study, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert to_tensorboard(study, tmp_path / "logs") == 2
    (folder,) = (tmp_path / "logs").glob("nce-*")
    events = EventAccumulator(str(folder))
    events.Reload()
    (run,) = [run for run in study.done if run.settings["loss"] == "nce"]
    values = [(event.step, event.value) for event in events.Scalars("valid/ndcg@20")]
    assert [step for step, _ in values] == [1, 2, 3, 4]
    assert [value for _, value in values] == pytest.approx(run.epochs["ndcg@20"].tolist())
    assert to_tensorboard(study, tmp_path / "logs") == 0


@pytest.mark.filterwarnings("ignore")
def test_an_interrupted_tensorboard_run_is_written_again(study: Study, tmp_path: Path, monkeypatch) -> None:
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter
    with monkeypatch.context() as patch:
        patch.setattr(writer, "add_hparams", interrupt)
        with pytest.raises(KeyboardInterrupt):
            to_tensorboard(study, tmp_path / "logs")
    assert to_tensorboard(study, tmp_path / "logs") == 2
    assert sorted(path.name.partition("-")[0] for path in (tmp_path / "logs").iterdir()) == ["nce", "softmax"]


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore")
def test_a_folder_that_cannot_be_written_to(study: Study, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    with pytest.raises(ManymaxError, match=r"`tensorboard` .*file cannot be written to"):
        to_tensorboard(study, tmp_path / "file")


@pytest.mark.extras
@pytest.mark.filterwarnings("ignore")
def test_mlflow(study: Study, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # log to a folder: a server needs more than mlflow-skinny
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlflow = pytest.importorskip("mlflow")
    uri = (tmp_path / "mlruns").as_uri()
    assert to_mlflow(study, uri) == 2
    assert to_mlflow(study, uri) == 0
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(study.title)
    logged = {run.data.params["loss"]: run for run in client.search_runs([experiment.experiment_id])}
    assert set(logged) == {"softmax", "nce"}
    (run,) = [run for run in study.done if run.settings["loss"] == "softmax"]
    softmax = logged["softmax"]
    assert softmax.data.metrics["test/ndcg_at_20"] == pytest.approx(run.record.test["ndcg@20"])
    assert softmax.info.status == "FINISHED"
    assert len(client.get_metric_history(softmax.info.run_id, "valid/ndcg_at_20")) == 4
