"""Weights & Biases, online or offline (`WANDB_MODE`): W&B's own process keeps the key and the connection."""

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from flowfleet.api.jobs import Job
from flowfleet.tracking.place import State
from flowfleet.tracking.tracker import Histogram, Picture, Values, media_of, missing, table_of, temporary_folder

try:
    import numpy as np
    import wandb
except ImportError as error:
    raise missing("wandb", error) from None


FLUSH_S: Final = 0.05
"""W&B's process writes rows to its file so often."""


class WandbTracker:
    """Tracker that writes a job to a W&B run with the job's id. Its x axes are `step` and `version` (validations)."""

    def __init__(self, project: str, folder: Path) -> None:
        self._project = project
        self._folder = folder
        self._run: Any = None
        self._records = 0

    def open(self, job: Job, state: State) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self._project,
            id=state.run or job.id,
            name=job.name or job.id,
            config=job.spec,
            dir=str(self._folder),
            resume="allow",
            settings=wandb.Settings(
                console="off",
                x_disable_stats=True,
                disable_git=True,
                save_code=False,
                x_transaction_log_flush_interval=FLUSH_S,
            ),
        )
        self._run.define_metric("*", step_metric="step", step_sync=False)
        self._run.define_metric("val*", step_metric="version", step_sync=False)
        self._records = state.records
        return str(self._run.id)

    def step(self, number: int, values: Values, histograms: Mapping[str, Histogram], at: datetime) -> None:
        drawn = {
            f"histograms/{name}": wandb.Histogram(np_histogram=(np.asarray(bins.counts), np.asarray(bins.edges)))
            for name, bins in histograms.items()
        }
        self._log({"step": number, **values, **drawn}, at)

    def validation(self, version: int, values: Values, pictures: Sequence[Picture], at: datetime) -> None:
        with temporary_folder() as folder:
            video = partial(wandb.Video, format="mp4")
            shown = [media_of(picture, Path(folder), wandb.Image, video) for picture in pictures]
            columns, rows = table_of(version, pictures, shown)
            self._log({"version": version, **values, "pictures": wandb.Table(columns=columns, data=rows)}, at)

    def model(self, folder: Path, job: Job) -> None:
        artifact = wandb.Artifact(f"adapter-{job.id}", type="model", metadata={"job": job.id})
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact)

    def finish(self, job: Job) -> None:
        self._run.summary["status"] = job.status
        self._run.finish(exit_code=0 if job.status == "succeeded" else 1)
        self._run = None

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _log(self, row: Mapping[str, Any], at: datetime) -> None:
        """Returns when W&B's file has the row: a kill would lose what its process still holds. W&B drops a row whose
        number it has, so one that was handed over just before a kill is not doubled."""
        self._run.log({**row, "time": at.timestamp()}, step=self._records, commit=True)
        self._records += 1
        time.sleep(2 * FLUSH_S)
