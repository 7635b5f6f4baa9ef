"""A reward for the `python` scorer that scores a picture by its pixels alone, the same in whatever batch it comes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from PIL import Image


def brightness(picture: Image.Image, prompt: str, metadata: Mapping[str, str]) -> float:
    """Mean of all channels of all pixels, 0 to 1."""
    return float(np.asarray(picture, dtype=np.float64).mean() / 255)
