"""MLflow, at `MLFLOW_TRACKING_URI`. A metric that is sent twice with its time is one metric, and files are replaced."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from flowfleet.api.jobs import Job
from flowfleet.tracking.place import State
from flowfleet.tracking.tracker import Histogram, Picture, Values, missing, table_of, temporary_folder

try:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunStatus
except ImportError as error:
    raise missing("mlflow", error) from None

QUANTILES: Final = {"p05": 0.05, "p50": 0.5, "p95": 0.95}
"""Quantiles whose curves stand for histograms, which MLflow does not draw."""
TABLES: Final = "mlflow.loggedArtifacts"
"""The tag by which MLflow's pages find tables."""
_PARAM_CHARACTERS: Final = 500
_AT_ONCE: Final = 100
_ENDS: Final = {"succeeded": RunStatus.FINISHED, "failed": RunStatus.FAILED, "cancelled": RunStatus.KILLED}


class MlflowTracker:
    """Tracker that writes a job to a run of MLflow, in the experiment with the project's name."""

    def __init__(self, project: str) -> None:
        self._client = MlflowClient()
        self._project = project
        self._run = ""

    def open(self, job: Job, state: State) -> str:
        self._run = state.run or self._find(job) or self._create(job)
        return self._run

    def step(self, number: int, values: Values, histograms: Mapping[str, Histogram], at: datetime) -> None:
        curves = {
            f"histograms/{name}/{part}": bins.quantile(share)
            for name, bins in histograms.items()
            for part, share in QUANTILES.items()
        }
        self._log(number, {**values, **curves}, at)

    def validation(self, version: int, values: Values, pictures: Sequence[Picture], at: datetime) -> None:
        self._log(version, values, at)
        with temporary_folder() as folder:
            files = {picture.name: picture.write(Path(folder)) for picture in pictures if picture.media is not None}
            folder_name = f"validation/{version:08d}"
            if files:
                self._client.log_artifacts(self._run, folder, folder_name)
            shown = {name: f"{folder_name}/{path.name}" for name, path in files.items()}
        self._log_table(f"{folder_name}.json", version, pictures, shown)

    def model(self, folder: Path, job: Job) -> None:
        self._client.log_artifacts(self._run, str(folder), "adapter")

    def finish(self, job: Job) -> None:
        ended = round(1000 * (job.ended_at or job.created_at).timestamp())
        self._client.set_terminated(self._run, RunStatus.to_string(_ENDS[job.status]), ended)

    def close(self) -> None:
        """MLflow keeps no connection."""

    def _find(self, job: Job) -> str:
        """The run of a follower that was killed before it noted the run's id."""
        experiment = self._client.get_experiment_by_name(self._project)
        if experiment is None:
            return ""
        runs = self._client.search_runs([experiment.experiment_id], f"tags.`flowfleet.job` = '{job.id}'", max_results=1)
        return str(runs[0].info.run_id) if runs else ""

    def _create(self, job: Job) -> str:
        experiment = self._client.get_experiment_by_name(self._project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self._project)
        run = self._client.create_run(
            number, round(1000 * job.created_at.timestamp()), {"flowfleet.job": job.id}, job.name or job.id
        )
        run_id = str(run.info.run_id)
        self._client.log_dict(run_id, job.spec, "job.json")
        params = [Param(name, value[:_PARAM_CHARACTERS]) for name, value in _flat("", job.spec)]
        for start in range(0, len(params), _AT_ONCE):
            self._client.log_batch(run_id, params=params[start : start + _AT_ONCE])
        return run_id

    def _log(self, step: int, values: Values, at: datetime) -> None:
        time = round(1000 * at.timestamp())
        self._client.log_batch(self._run, [Metric(name, value, time, step) for name, value in values.items()])

    def _log_table(self, path: str, version: int, pictures: Sequence[Picture], shown: Mapping[str, str]) -> None:
        columns, rows = table_of(version, pictures, [shown.get(picture.name) for picture in pictures])
        self._client.log_dict(self._run, {"columns": columns, "data": rows}, path)
        tables = json.loads(self._client.get_run(self._run).data.tags.get(TABLES, "[]"))
        if {"path": path, "type": "table"} not in tables:
            self._client.set_tag(self._run, TABLES, json.dumps([*tables, {"path": path, "type": "table"}]))


def _flat(prefix: str, part: Mapping[str, Any]) -> list[tuple[str, str]]:
    flat: list[tuple[str, str]] = []
    for name, value in part.items():
        flat += _flat(f"{prefix}{name}.", value) if isinstance(value, Mapping) else [(f"{prefix}{name}", str(value))]
    return flat
