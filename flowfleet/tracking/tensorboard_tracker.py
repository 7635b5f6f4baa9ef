"""TensorBoard event files: `DIR/NAME-ID/train` and `DIR/NAME-ID/validation`, each with an x axis of its own.

When a follower resumes, each file begins with the first step that the place does not have. TensorBoard then forgets
later records of the files before, so what was written in the moment of a kill is not doubled.
"""

import io
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from flowfleet.api.jobs import Job
from flowfleet.tracking.place import State
from flowfleet.tracking.tracker import VIDEO, Histogram, Picture, Values, missing, table_of

try:
    from PIL import Image
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.histogram_pb2 import HistogramProto
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    from flowfleet.media.files import decode_media
except ImportError as error:
    raise missing("tensorboard", error) from None

_RGB: Final = 3
_GIF_MS: Final = 125


class TensorBoardTracker:
    """Two event files below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run = ""
        self._writers: dict[str, Any] = {}

    def open(self, job: Job, state: State) -> str:
        self._run = state.run or f"{job.name}-{job.id}"
        folder = self._folder / self._run
        for name, first in (("train", state.step + 1), ("validation", state.version + 1)):
            self._writers[name] = EventFileWriter(str(folder / name))
            if state.run:
                start = Event(wall_time=job.created_at.timestamp(), step=first)
                start.session_log.status = SessionLog.START
                self._writers[name].add_event(start)
        if not state.run:
            spec = json.dumps(job.spec, indent=2).replace("\n", "\n    ")
            self._add("train", 0, job.created_at, [_text("config", f"{job.name} {job.id}\n\n    {spec}")])
        return folder.name

    def step(self, number: int, values: Values, histograms: Mapping[str, Histogram], at: datetime) -> None:
        drawn = [_histogram(f"histograms/{name}", bins) for name, bins in histograms.items()]
        self._add("train", number, at, [*_scalars(values), *drawn])

    def validation(self, version: int, values: Values, pictures: Sequence[Picture], at: datetime) -> None:
        shown = [
            Summary.Value(tag=f"pictures/{picture.name} {picture.prompt[:80]}", image=_image(picture))
            for picture in pictures
            if picture.media is not None and picture.text is None
        ]
        table = [_text("pictures", _markdown(version, pictures))] if pictures else []
        self._add("validation", version, at, [*_scalars(values), *shown, *table])

    def model(self, folder: Path, job: Job) -> None:
        """Copies it next to the event files: TensorBoard has no artifacts."""
        shutil.copytree(folder, self._folder / self._run / "adapter", dirs_exist_ok=True)

    def finish(self, job: Job) -> None:
        self._add("train", max(0, job.progress.step - 1), job.ended_at or job.created_at, [_text("status", job.status)])

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _add(self, name: str, step: int, at: datetime, values: Sequence[Any]) -> None:
        writer = self._writers[name]
        writer.add_event(Event(wall_time=at.timestamp(), step=step, summary=Summary(value=values)))
        writer.flush()


def _scalars(values: Values) -> list[Any]:
    return [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]


def _histogram(name: str, bins: Histogram) -> Any:
    edges = bins.edges
    middles = [(left + right) / 2 for left, right in itertools.pairwise(edges)]
    weighted = list(zip(bins.counts, middles, strict=True))
    proto = HistogramProto(
        min=bins.low,
        max=bins.high,
        num=sum(bins.counts),
        sum=sum(count * middle for count, middle in weighted),
        sum_squares=sum(count * middle**2 for count, middle in weighted),
        bucket_limit=edges[1:],
        bucket=bins.counts,
    )
    return Summary.Value(tag=name, histo=proto)


def _image(picture: Picture) -> Any:
    """The file as it is; a video as a GIF, which TensorBoard plays."""
    assert picture.media is not None
    data = _gif(picture.media) if picture.media_type == VIDEO else picture.media
    with Image.open(io.BytesIO(data)) as image:
        width, height = image.size
    return Summary.Image(encoded_image_string=data, width=width, height=height, colorspace=_RGB)


def _gif(video: bytes) -> bytes:
    frames = [Image.fromarray(frame) for frame in decode_media(video, VIDEO)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=_GIF_MS, loop=0)
    return buffer.getvalue()


def _text(name: str, text: str) -> Any:
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
    return Summary.Value(tag=name, metadata=metadata, tensor=tensor)


def _markdown(version: int, pictures: Sequence[Picture]) -> str:
    columns, rows = table_of(version, pictures, [picture.name for picture in pictures])
    lines: list[Sequence[object]] = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
