"""Shows a client's answers in notebooks: tables with pandas, pictures with Pillow. Nothing else needs either."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flowfleet.api.jobs import MetricsRow
from flowfleet.api.overview import JobRow
from flowfleet.api.samples import Sample
from flowfleet.client.standings import settings_of
from flowfleet.extras import pip_install
from flowfleet.job.sweeps import shown

if TYPE_CHECKING:
    from pandas import DataFrame
    from PIL.Image import Image


def metrics_frame(rows: Sequence[MetricsRow]) -> DataFrame:
    """A row a step, indexed by it, and a column a metric; NaN where a step has none. Where `critic/rewards/revision`
    changes, other rewards make up the total. ValueError without pandas."""
    frame = _frame([{"step": row.step, **row.values} for row in rows], ["step"])
    return frame.set_index("step").astype(float)


def sweep_frame(jobs: Sequence[tuple[JobRow, Sequence[MetricsRow]]]) -> DataFrame:
    """A row a job and step, indexed by both, and a column a setting or metric; lists and tables are texts there."""
    rows = []
    for job, metrics in jobs:
        known = {key: shown(one) if isinstance(one, list | dict) else one for key, one in settings_of(job).items()}
        rows += [{"job": job.id, "step": row.step, **known, **row.values} for row in metrics]
    return _frame(rows, ["job", "step"]).set_index(["job", "step"])


def samples_frame(samples: Sequence[Sample]) -> DataFrame:
    """A row a sample with its fields; dicts are spread to columns as `scores.ocr`. ValueError without pandas."""
    return _frame([_flat(sample.model_dump()) for sample in samples], list(Sample.model_fields))


def picture(data: bytes, media_type: str) -> Image:
    """Decodes a picture, RGB. ValueError for a video, and without Pillow."""
    if not media_type.startswith("image/"):
        raise ValueError(f"the sample is of {media_type}: `media` gives its file")
    try:
        from PIL import Image

        from flowfleet.media.files import as_rgb
    except ModuleNotFoundError:
        raise ValueError(f"pictures need Pillow: {pip_install('notebook')}") from None
    return as_rgb(Image.open(io.BytesIO(data)))


def _frame(rows: Sequence[dict[str, Any]], columns: list[str]) -> DataFrame:
    """`columns` are those of a frame without rows."""
    try:
        import pandas
    except ModuleNotFoundError:
        raise ValueError(f"frames need pandas: {pip_install('notebook')}") from None
    return pandas.DataFrame(rows, columns=None if rows else columns)


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    return flat
