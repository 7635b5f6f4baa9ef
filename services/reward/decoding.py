"""Encoded pictures to RGB, with limits that are checked in the header, before any pixel is decoded."""

from __future__ import annotations

import io
from dataclasses import dataclass

from PIL import Image

from flowfleet.proto.reward_pb2 import RewardSample
from services.reward.scorers.base import Problem, Sample

FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP"}
"""Media types that are read, and PIL's name of each: the content is never guessed."""

MAX_PIXELS = 4096 * 4096
MAX_SIDE = 16_384


@dataclass(frozen=True)
class Opened:
    """A picture of which only the header has been read."""

    image: Image.Image
    sample: RewardSample

    @property
    def num_pixels(self) -> int:
        return self.image.width * self.image.height


def open_picture(sample: RewardSample) -> Opened | Problem:
    """Reads the header of a sample's picture; a Problem for a media type, a content or a size that is refused."""
    if sample.media_type not in FORMATS:
        return Problem("media_type", f"media_type {sample.media_type!r} is not read here: send {', '.join(FORMATS)}")
    try:
        image = Image.open(io.BytesIO(sample.media), formats=[FORMATS[sample.media_type]])
    except Image.DecompressionBombError:
        return Problem("too_large", f"the picture has more than {MAX_PIXELS} pixels: send a smaller one")
    except Exception as error:  # PIL documents no closed set of what a broken file raises
        return _undecodable(sample, error)
    if image.width * image.height > MAX_PIXELS or max(image.size) > MAX_SIDE:
        limits = f"at most {MAX_PIXELS} pixels and {MAX_SIDE} a side are scored"
        return Problem("too_large", f"the picture is {image.width} x {image.height}: {limits}; send a smaller one")
    return Opened(image, sample)


def decode(opened: Opened) -> Sample | Problem:
    """Decodes the pixels. Alpha is dropped; of an animation the first frame counts."""
    try:
        image = opened.image.convert("RGB")
    except Exception as error:  # as above: a file may break anywhere in its pixels
        return _undecodable(opened.sample, error)
    return Sample(image, opened.sample.prompt, dict(opened.sample.metadata))


def _undecodable(sample: RewardSample, error: Exception) -> Problem:
    size = f"{len(sample.media)} bytes"
    return Problem("undecodable", f"the {size} of media are not a whole {sample.media_type}: {type(error).__name__}")
