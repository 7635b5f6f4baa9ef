"""Lessons of the tiny judge: is the word above the middle of its sign? Pictures, and the answer from their pixels.

`word_rise` measures. It labels the lessons, and checks the judge and what it trains by other means than a judge.
"""

import random

import numpy as np
from PIL import Image

from recipes.tiny.signs import IMAGE_SIZE, Pixels, draw_sign, render

MARGIN = 6
"""Pixels at each edge of a sign that hold the frame, and no word."""
MIN_CONTRAST = 60
"""Gray levels between a word and its board."""
SPREAD = 34
"""Pixels of a sign's canvas, of 128, that lessons move words up and down: further than the painter ever does."""


def word_rise(pixels: Pixels) -> float:
    """How far the word's middle is above the sign's, as a share of half the sign's height: −1 … 1, 0 without a word.

    pixels: (64, 64, 3) uint8. The word is what differs in gray from the median inside the frame, the board.
    """
    gray = pixels[MARGIN:-MARGIN, MARGIN:-MARGIN].astype(np.float64).mean(axis=2)
    rows = np.flatnonzero((np.abs(gray - np.median(gray)) > MIN_CONTRAST).any(axis=1))
    if not len(rows):
        return 0.0
    middle = MARGIN + (rows[0] + rows[-1] + 1) / 2
    return float(1.0 - 2.0 * middle / IMAGE_SIZE)


def is_high(pixels: Pixels) -> bool:
    return word_rise(pixels) > 0.0


def draw_lesson(rng: random.Random) -> Image.Image:
    """A sign with a random word at a random height."""
    return Image.fromarray(render(draw_sign(rng), rng, SPREAD))
