"""Hand the records of a study to TensorBoard or MLflow; both are optional packages, imported only when used."""

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

INSTALL_COMMAND = 'pip install "manymax[track]"'
METRICS_PER_REQUEST, PARAMETERS_PER_REQUEST = 500, 50  # MLflow refuses more than 1000 and 100


def to_tensorboard(study: Study, folder: Path) -> int:
    """Write curves, settings and test metrics of every finished run for TensorBoard.

    Each run gets a folder of its own below `folder`; one that is already there is not written again.

    Returns:
        the number of runs that were written.
    """
    writer_class = _import_optional("torch.utils.tensorboard", "tensorboard").SummaryWriter
    new = [run for run in study.done if not (folder / _run_name(run)).exists()]
    try:
        for run in new:
            _write_events(writer_class, run, folder)
    except OSError as error:
        raise ManymaxError(f"`tensorboard` {folder} cannot be written to: {error.strerror or error}.") from None
    return len(new)


def _write_events(writer_class: Any, run: Run, folder: Path) -> None:
    """Write one run into a folder that gets its name at the end, so that an interrupted one is written again."""
    partial = folder / f".{_run_name(run)}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    with writer_class(str(partial)) as writer:
        for name, epoch, value in _curve_points(run):
            writer.add_scalar(name, value, epoch)
        writer.add_hparams(_parameters(run), _test_metrics(run), run_name=".")
    partial.replace(folder / _run_name(run))


def to_mlflow(study: Study, uri: str) -> int:
    """Log every finished run to an MLflow server or folder, in an experiment with the title of the study.

    A run that is already there is not logged again.

    Returns:
        the number of runs that were logged.
    """
    mlflow = _import_optional("mlflow", "mlflow")
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
    """All runs of an experiment; the server hands them out page by page."""
    token = None
    while True:
        page = client.search_runs([experiment], page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _log(mlflow: Any, client: Any, experiment: str, run: Run) -> None:
    """Log one run. The tag `hash`, by which a run counts as known, is set last: an interrupted one is logged again."""
    made = client.create_run(experiment, run_name=_run_name(run))
    key = made.info.run_id
    entities = mlflow.entities
    now = made.info.start_time
    metrics = [entities.Metric(_mlflow_name(name), value, now, epoch) for name, epoch, value in _curve_points(run)]
    metrics += [
        entities.Metric(_mlflow_name(f"test/{name}"), value, now, 0) for name, value in _test_metrics(run).items()
    ]
    parameters = [entities.Param(name, str(value)) for name, value in _parameters(run).items()]
    for start in range(0, len(metrics), METRICS_PER_REQUEST):
        client.log_batch(key, metrics=metrics[start : start + METRICS_PER_REQUEST])
    for start in range(0, len(parameters), PARAMETERS_PER_REQUEST):
        client.log_batch(key, params=parameters[start : start + PARAMETERS_PER_REQUEST])
    client.log_dict(key, run.record.model_dump(mode="json"), RECORD)
    client.set_tag(key, "hash", run.record.hash)
    client.set_terminated(key)


def _run_name(run: Run) -> str:
    return f"{run.settings['loss']}-{run.record.hash}"


def _mlflow_name(metric: str) -> str:
    """The name of a metric for MLflow, which allows no @ in names."""
    return metric.replace("@", "_at_")


def _curve_points(run: Run) -> Iterator[tuple[str, int, float]]:
    """(name, epoch, value) of every point of the curves."""
    for name, values in run.epochs.items():
        if name not in ("epoch", "step"):
            for epoch, value in zip(run.epochs["epoch"].tolist(), values.tolist(), strict=True):
                yield (f"valid/{name}" if "@" in name else name), int(epoch), float(value)


def _test_metrics(run: Run) -> dict[str, float]:
    return {name: value for name, value in run.record.test.items() if value is not None}


def _parameters(run: Run) -> dict[str, str | float | int | bool]:
    return {
        name: value if isinstance(value, str | float | int | bool) else str(value)
        for name, value in run.settings.items()
        if value is not None
    }


def _import_optional(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ManymaxError(f"this needs the package `{package}`. Install it with: {INSTALL_COMMAND}") from None
