"""Trackio: files of this machine (`TRACKIO_DIR`), a server (`TRACKIO_SERVER_URL`) or a Space (`TRACKIO_SPACE_ID`)."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from flowfleet.api.jobs import Job
from flowfleet.tracking.place import State
from flowfleet.tracking.tracker import Histogram, Picture, Values, media_of, missing, table_of, temporary_folder

try:
    import trackio
except ImportError as error:
    raise missing("trackio", error) from None


class TrackioTracker:
    """Tracker that writes a job to a run of Trackio, named like the job with its id."""

    def __init__(self, project: str) -> None:
        self._project = project
        self._run: Any = None

    def open(self, job: Job, state: State) -> str:
        name = state.run or f"{job.name or 'job'}-{job.id}"
        self._run = trackio.init(
            project=self._project,
            name=name,
            config=job.spec,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return name

    def step(self, number: int, values: Values, histograms: Mapping[str, Histogram], at: datetime) -> None:
        drawn = {
            f"histograms/{name}": trackio.Histogram(np_histogram=(list(bins.counts), bins.edges))
            for name, bins in histograms.items()
        }
        self._log({**values, **drawn}, number)

    def validation(self, version: int, values: Values, pictures: Sequence[Picture], at: datetime) -> None:
        with temporary_folder() as folder:
            shown = [media_of(row, Path(folder), trackio.Image, trackio.Video) for row in pictures]
            columns, rows = table_of(version, pictures, shown)
            self._log({**values, "pictures": trackio.Table(columns=columns, data=rows)}, version)

    def model(self, folder: Path, job: Job) -> None:
        self._run.log_artifact(folder, name=f"adapter-{job.id}", type="model")

    def finish(self, job: Job) -> None:
        self.close()

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
        self._run = None

    def _log(self, row: Mapping[str, Any], step: int) -> None:
        """Writes at once: Trackio keeps rows for half a second, and a kill would lose them."""
        self._run.log(dict(row), step=step)
        self._run._flush_queues_inline()
