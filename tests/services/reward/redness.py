"""A reward function of a user, for the scorer `python`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from PIL import Image


def redness(picture: Image.Image, prompt: str, metadata: Mapping[str, str]) -> float:
    """Mean of the red channel, 0 … 1."""
    return float(np.asarray(picture)[..., 0].mean()) / 255
