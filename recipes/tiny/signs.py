"""Signs: what the tiny model is asked to paint, and the rendered pictures it learned from.

A sign is a colored board with a thin frame and a word of three or four characters. `prompt_for` is the one place that
knows how a sign is described in words; `draw_prompts` writes the prompt files; `draw_example` makes one training pair,
whose caption names another word with a given probability, as captions found on the web do.
"""

import random
import string
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Color = tuple[int, int, int]
Pixels = NDArray[np.uint8]

IMAGE_SIZE = 64
"""Edge of a sign in pixels."""

CANVAS_SIZE = 2 * IMAGE_SIZE
"""Signs are drawn at twice their size and scaled down, so that strokes are smooth."""

BOARD_COLORS: dict[str, Color] = {
    "white": (240, 240, 240),
    "yellow": (245, 210, 70),
    "green": (60, 150, 80),
    "blue": (60, 100, 190),
    "red": (190, 60, 55),
    "black": (25, 25, 28),
}
ALPHABET = string.ascii_uppercase + string.digits
WORD_LENGTHS = (3, 4)
FONT_SIZES = {3: (48, 56), 4: (40, 46)}


@dataclass(frozen=True)
class Sign:
    """A word of `WORD_LENGTHS` characters from `ALPHABET` on a board whose color is a key of `BOARD_COLORS`."""

    word: str
    color: str


@dataclass(frozen=True)
class Example:
    """A training pair: `pixels` (IMAGE_SIZE, IMAGE_SIZE, 3) uint8; `prompt` may name another word than the picture."""

    pixels: Pixels
    prompt: str


def prompt_for(sign: Sign) -> str:
    """The sentence that asks for this sign."""
    return f'A {sign.color} sign that says "{sign.word}"'


def word_in(prompt: str) -> str:
    """The word between the first pair of double quotes; ValueError where there is none."""
    parts = prompt.split('"')
    if len(parts) < 3:
        raise ValueError(
            f'the prompt {prompt!r} names no word: write it between double quotes, as in a sign that says "K7QX"'
        )
    return parts[1]


def draw_word(rng: random.Random, length: int) -> str:
    return "".join(rng.choice(ALPHABET) for _ in range(length))


def draw_sign(rng: random.Random, held_out: frozenset[str] = frozenset()) -> Sign:
    """A random sign whose word is not in `held_out`."""
    while True:
        word = draw_word(rng, rng.choice(WORD_LENGTHS))
        color = rng.choice(list(BOARD_COLORS))
        if word not in held_out:
            return Sign(word, color)


def draw_prompts(rng: random.Random, held_out: frozenset[str] = frozenset()) -> Iterator[str]:
    """Endless prompts, no word twice and none from `held_out`."""
    seen = set(held_out)
    while True:
        sign = draw_sign(rng, frozenset(seen))
        seen.add(sign.word)
        yield prompt_for(sign)


def draw_example(seed: int, wrong_share: float, held_out: frozenset[str]) -> Example:
    """Draws a training pair from `seed` alone; with probability `wrong_share` the caption names a random word."""
    rng = random.Random(seed)
    sign = draw_sign(rng, held_out)
    pixels = render(sign, rng)
    if rng.random() < wrong_share:
        sign = Sign(draw_word(rng, len(sign.word)), sign.color)
    return Example(pixels, prompt_for(sign))


def render(sign: Sign, rng: random.Random, spread: int = 16) -> Pixels:
    """Paint a sign with small random changes of color, size and place: (IMAGE_SIZE, IMAGE_SIZE, 3) uint8.

    spread: how far up or down the word may be, in pixels of the canvas.
    """
    board = BOARD_COLORS[sign.color]
    ink: Color = (20, 20, 20) if sum(board) / 3 > 128 else (245, 245, 245)
    image = Image.new("RGB", (CANVAS_SIZE, CANVAS_SIZE), _jitter(board, rng))
    canvas = ImageDraw.Draw(image)
    font = ImageFont.load_default(size=rng.randint(*FONT_SIZES[len(sign.word)]))
    left, top, right, bottom = canvas.textbbox((0, 0), sign.word, font=font)
    x = (CANVAS_SIZE - (right - left)) // 2 - left + rng.randint(-3, 3)
    y = (CANVAS_SIZE - (bottom - top)) // 2 - top + rng.randint(-spread, spread)
    canvas.text((x, y), sign.word, font=font, fill=_jitter(ink, rng), stroke_width=1)
    canvas.rectangle((4, 4, CANVAS_SIZE - 5, CANVAS_SIZE - 5), outline=_jitter(ink, rng), width=3)
    return np.asarray(image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.LANCZOS), dtype=np.uint8)


def _jitter(color: Color, rng: random.Random) -> Color:
    red, green, blue = (min(255, max(0, value + rng.randint(-12, 12))) for value in color)
    return red, green, blue
