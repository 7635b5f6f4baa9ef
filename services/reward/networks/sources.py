"""The picture that a sample was edited from, for scorers that compare both."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from flowfleet.media.files import MediaError, decode_media
from services.reward.judge.media import source_picture
from services.reward.scorer import Problem, Sample


def source_of(sample: Sample, root: Path | None) -> Image.Image | Problem:
    """The RGB picture that the metadata field `source` holds or names; see `source_picture`."""
    try:
        source = source_picture(sample.metadata, root)
        return Image.fromarray(decode_media(source.data, source.media_type)[0])
    except (ValueError, MediaError) as error:
        return Problem("source", str(error))


def sized(pictures: Sequence[Image.Image], like: Image.Image) -> list[Image.Image]:
    """The pictures at the size of another."""
    return [one if one.size == like.size else one.resize(like.size, Image.Resampling.BICUBIC) for one in pictures]


def levels(picture: Image.Image) -> np.ndarray:
    """(3, H, W) float32 from -1 to 1."""
    pixels: np.ndarray = np.asarray(picture, np.float32).transpose(2, 0, 1) / 127.5 - 1
    return pixels
