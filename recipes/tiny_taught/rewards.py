"""The rule that scores a tiny edit, for `flowfleet up --reward followed=recipes/tiny_taught/rewards.py:followed`."""

import base64
import io
from collections.abc import Mapping

import numpy as np
from PIL import Image


def followed(picture: Image.Image, prompt: str, metadata: Mapping[str, str]) -> float:
    """0 … 1: half of 1 + the share of `source`'s contrast, left minus right, that is kept, or swapped if so asked."""
    source = Image.open(io.BytesIO(base64.b64decode(metadata["source"].partition(",")[2])))
    share = _contrast(picture) / _contrast(source)
    return min(1.0, max(0.0, 0.5 + 0.5 * (-share if prompt.startswith("Swap") else share)))


def _contrast(picture: Image.Image) -> float:
    left, right = np.split(np.asarray(picture, np.float64), 2, axis=1)
    return float(left.mean() - right.mean())
