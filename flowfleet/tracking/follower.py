"""Follows a job's events and hands each training step and each validation to a tracker, once.

The place is written after each event. A follower that was killed, or lost its controller, resumes after the last event
that it took; what it took is never handed over again.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from flowfleet.api.jobs import Job, JobEvent, MetricsRow
from flowfleet.api.problems import ApiError
from flowfleet.api.samples import Sample
from flowfleet.client import Client
from flowfleet.client.connection import AWAY
from flowfleet.tracking.place import Place, State
from flowfleet.tracking.tracker import Histogram, Picture, Tracker, Values, temporary_folder

VALIDATION: Final = "val"
"""Prefix of the metrics of validations; all others belong to training steps."""
TRAINED: Final = "timing_s/step"
"""Metric that marks the row of a trained step; rows without it belong to a validation alone."""
AWAY_S: Final = 5.0
"""Wait between tries while the controller is unreachable, besides the client's own retries."""
ROWS: Final = 200
HISTOGRAMS: Final[Sequence[str]] = ("rewards", "advantages")
NOT_FOUND: Final = 404
CONFLICT: Final = 409

log = logging.getLogger(__name__)


def follow(
    client: Client,
    job_id: str,
    tracker: Tracker,
    place: Place,
    max_pictures: int,
    opened: Callable[[str], object] = lambda run: None,
) -> Job:
    """Follows a job until it has ended, and returns it. ValueError where another follower has the place."""
    with place.held():
        follower = Follower(client, client.job(job_id), tracker, place, max_pictures)
        try:
            opened(follower.open())
            return follower.run()
        finally:
            tracker.close()


class Follower:
    """Copies one job to one tracker."""

    def __init__(self, client: Client, job: Job, tracker: Tracker, place: Place, max_pictures: int) -> None:
        self._client = client
        self._job = job
        self._tracker = tracker
        self._place = place
        self._max_pictures = max_pictures
        self._state = State()
        self._rows: dict[int, MetricsRow] = {}

    def open(self) -> str:
        """Opens the run, and returns its name in the tracker."""
        self._state = self._place.read()
        self._state.run = self._tracker.open(self._job, self._state)
        self._place.write(self._state)
        return self._state.run

    def run(self) -> Job:
        """Takes events until the job has ended. A controller that is unreachable is waited for."""
        while True:
            try:
                for event in self._client.events(self._job.id, after=self._state.event or None):
                    self._take(event)
                job = self._client.job(self._job.id)
                if job.ended:
                    self._take_model(job)
                    self._tracker.finish(job)
                    return job
            except ApiError as error:
                if error.status not in (0, *AWAY):
                    raise
                log.warning("follower waits: %s", error)
                time.sleep(AWAY_S)

    def _take(self, event: JobEvent) -> None:
        match event.type:
            case "trained" if int(event.data["step"]) > self._state.step:
                histograms = {name: Histogram(**event.data[name]) for name in HISTOGRAMS if name in event.data}
                self._hand_over(self._row(int(event.data["step"])), histograms, event)
            case "validation":
                self._take_validation(int(event.data["version"]), event.data, event)
            case "gap":
                self._catch_up(event)
        self._state.event = event.id
        self._place.write(self._state)

    def _hand_over(self, row: MetricsRow | None, histograms: Mapping[str, Histogram], event: JobEvent) -> None:
        if row is not None:
            values = {name: value for name, value in _known(row.values).items() if not _is_validation(name)}
            self._tracker.step(row.step, values, histograms, event.time)
            self._state.step = row.step
            self._state.records += 1

    def _take_validation(self, version: int, row: Mapping[str, Any], event: JobEvent) -> None:
        if version > self._state.version:
            values = {name: value for name, value in _known(row).items() if _is_validation(name)}
            samples = self._client.samples(self._job.id, purpose="validate", step=version, order="oldest")
            pictures = [self._picture(sample) for sample in islice(samples, self._max_pictures)]
            self._tracker.validation(version, values, pictures, event.time)
            self._state.version = version
            self._state.records += 1

    def _catch_up(self, event: JobEvent) -> None:
        """Takes what is in the rows of metrics where events are no longer kept: without histograms."""
        log.warning("some events are no longer kept; curves are taken from the metrics, without histograms")
        for row in self._client.metrics(self._job.id, after=min(self._state.step, self._state.version)):
            if any(map(_is_validation, row.values)):
                self._take_validation(row.step, row.values, event)
            if TRAINED in row.values and row.step > self._state.step:
                self._hand_over(row, {}, event)

    def _row(self, step: int) -> MetricsRow | None:
        """The metrics of a step that was trained; None where they are no longer kept. Reads some ahead."""
        if step not in self._rows or TRAINED not in self._rows[step].values:
            rows = islice(self._client.metrics(self._job.id, after=step - 1), ROWS)
            self._rows = {row.step: row for row in rows}
        return self._rows.get(step)

    def _take_model(self, job: Job) -> None:
        """Hands the final adapter over. A whole pipeline is too large for a tracker, and some jobs leave no model."""
        try:
            if self._client.model(job.id).kind != "adapter":
                log.warning("the model is a whole pipeline and is not copied; `flowfleet export` fetches it")
                return
            with temporary_folder() as folder:
                self._client.download_model(job.id, folder)
                self._tracker.model(Path(folder), job)
        except ApiError as error:
            if error.status not in (NOT_FOUND, CONFLICT):
                raise
            log.warning("no model to copy: %s", error)

    def _picture(self, sample: Sample) -> Picture:
        try:
            media = self._client.media(self._job.id, sample)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            media = None
        return Picture(
            sample.prompt, sample.group, sample.index, sample.reward, sample.scores, media, sample.media_type
        )


def _is_validation(name: str) -> bool:
    return name.startswith((f"{VALIDATION}/", f"{VALIDATION}-"))


def _known(row: Mapping[str, Any]) -> Values:
    """Returns the numbers of a row; null stands for NaN."""
    return {name: float(value) for name, value in row.items() if isinstance(value, int | float) and name != "version"}
