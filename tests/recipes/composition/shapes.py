"""An atlas of shapes drawn in code, with the names of the small world: what pure tests look at in place of pictures."""

from functools import cache

import numpy as np
from PIL import Image, ImageDraw

from recipes.composition.atlas import STYLES, Atlas
from recipes.composition.nouns import Noun
from recipes.composition.sprites import draw_letters, trimmed
from recipes.composition.world import SMALL_NOUNS

EDGE = 32


@cache
def shapes() -> Atlas:
    """Polygons of three to twelve corners, in a color of each style, half of them twice as wide as high."""
    nouns = tuple(Noun(name, name, f"{name}s") for name in SMALL_NOUNS)
    sprites = [
        _polygon(3 + number, color, 1 + number % 2)
        for number in range(len(nouns))
        for color in ("crimson", "gold", "teal")
    ]
    glyphs, advances = draw_letters(edge=16)
    return Atlas(nouns, STYLES, np.stack(sprites), glyphs, advances)


def _polygon(corners: int, color: str, ratio: int) -> np.ndarray:
    page = Image.new("RGBA", (160, 160))
    ImageDraw.Draw(page).regular_polygon((80, 80, 70), corners, fill=color, outline="black")
    return trimmed(page.resize((160, 160 // ratio)).convert("RGBa"), EDGE)
