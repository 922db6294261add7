"""Records for other people's viewers: TensorBoard and MLflow. Both are optional packages, imported when asked for."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from manymax.errors import ManymaxError
from manymax.study.records import RECORD
from manymax.study.report.runs import Run, Study

INSTALL = 'pip install "manymax[track]"'


def to_tensorboard(study: Study, folder: Path) -> int:
    """Write curves, settings and test metrics below `folder`, one sub-folder a run; those that are there stay.

    Returns:
        How many runs were written.
    """
    writer_of = _package("torch.utils.tensorboard", "tensorboard").SummaryWriter
    new = [run for run in study.done if not (folder / _called(run)).exists()]
    try:
        for run in new:
            _write_events(writer_of, run, folder)
    except OSError as error:
        raise ManymaxError(f"`tensorboard` {folder} cannot be written to: {error.strerror or error}.") from None
    return len(new)


def _write_events(writer_of: Any, run: Run, folder: Path) -> None:
    """The folder gets its name when all is in it: what was interrupted is written again."""
    partial = folder / f".{_called(run)}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    with writer_of(str(partial)) as writer:
        for name, epoch, value in _points(run):
            writer.add_scalar(name, value, epoch)
        writer.add_hparams(_plain(run), _test(run), run_name=".")
    partial.replace(folder / _called(run))


def to_mlflow(study: Study, uri: str) -> int:
    """Log every finished run to a tracking server or folder, under the study's title; those that are there stay.

    Returns:
        How many runs were logged.
    """
    mlflow = _package("mlflow", "mlflow")
    try:
        client = mlflow.MlflowClient(tracking_uri=uri)
        found = client.get_experiment_by_name(study.title)
        experiment = found.experiment_id if found else client.create_experiment(study.title)
        known = {run.data.tags.get("hash") for run in _all_runs(client, experiment)}
        new = [run for run in study.done if run.record.hash not in known]
        for run in new:
            _log(mlflow, client, experiment, run)
    except mlflow.exceptions.MlflowException as error:
        raise ManymaxError(f"`mlflow` {uri!r} cannot be written to: {error}") from None
    return len(new)


def _all_runs(client: Any, experiment: str) -> Iterator[Any]:
    token = None
    while True:
        page = client.search_runs([experiment], page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _log(mlflow: Any, client: Any, experiment: str, run: Run) -> None:
    """The tag that marks a run as known comes last, with its end: what was interrupted is logged again."""
    made = client.create_run(experiment, run_name=_called(run))
    key = made.info.run_id
    entities = mlflow.entities
    now = made.info.start_time
    metrics = [entities.Metric(_name(name), value, now, epoch) for name, epoch, value in _points(run)]
    metrics += [entities.Metric(_name(f"test/{name}"), value, now, 0) for name, value in _test(run).items()]
    parameters = [entities.Param(name, str(value)) for name, value in _plain(run).items()]
    for start in range(0, len(metrics), 500):
        client.log_batch(key, metrics=metrics[start : start + 500])
    for start in range(0, len(parameters), 50):
        client.log_batch(key, params=parameters[start : start + 50])
    client.log_dict(key, run.record.model_dump(mode="json"), RECORD)
    client.set_tag(key, "hash", run.record.hash)
    client.set_terminated(key)


def _called(run: Run) -> str:
    return f"{run.settings['loss']}-{run.record.hash}"


def _name(metric: str) -> str:
    """MLflow knows no @."""
    return metric.replace("@", "_at_")


def _points(run: Run) -> Iterator[tuple[str, int, float]]:
    """(name, epoch, value) of the curves."""
    for name, values in run.epochs.items():
        if name not in ("epoch", "step"):
            for epoch, value in zip(run.epochs["epoch"].tolist(), values.tolist(), strict=True):
                yield (f"valid/{name}" if "@" in name else name), int(epoch), float(value)


def _test(run: Run) -> dict[str, float]:
    return {name: value for name, value in run.record.test.items() if value is not None}


def _plain(run: Run) -> dict[str, str | float | int | bool]:
    return {
        name: value if isinstance(value, str | float | int | bool) else str(value)
        for name, value in run.settings.items()
        if value is not None
    }


def _package(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ManymaxError(f"this needs the package `{package}`. Install it with: {INSTALL}") from None
