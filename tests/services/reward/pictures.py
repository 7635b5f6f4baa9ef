"""Pictures for the tests of the reward service: rendered signs, and samples around encoded pictures."""

from __future__ import annotations

import io
import random
import string

from PIL import Image, ImageDraw, ImageFont

from flowfleet.proto.reward_pb2 import RewardSample

CROP = "0.05,0.125,0.95,0.875"
BOARDS = ((240, 240, 240), (245, 210, 70), (60, 150, 80), (60, 100, 190), (190, 60, 55), (25, 25, 28))


def sign(word: str, seed: int = 0, size: int = 64) -> Image.Image:
    """`word` on a framed board with random color, size and place, painted at twice the size and scaled down."""
    rng = random.Random(seed)
    canvas = 2 * size
    board = rng.choice(BOARDS)
    ink = (20, 20, 20) if sum(board) > 3 * 128 else (245, 245, 245)
    image = Image.new("RGB", (canvas, canvas), board)
    draw = ImageDraw.Draw(image)
    points = (48, 56) if len(word) <= 3 else (40, 46)
    font = ImageFont.load_default(size=rng.randint(*points) * canvas / 128)
    left, top, right, bottom = draw.textbbox((0, 0), word, font=font)
    x = (canvas - right - left) / 2 + rng.randint(-3, 3)
    y = (canvas - bottom - top) / 2 + rng.randint(-16, 16) * canvas / 128
    draw.text((x, y), word, font=font, fill=ink, stroke_width=1)
    draw.rectangle((4, 4, canvas - 5, canvas - 5), outline=ink, width=3)
    return image.resize((size, size), Image.Resampling.LANCZOS)


def page(*lines: tuple[str, float, float, int], tilt: float = 0.0, size: int = 512) -> Image.Image:
    """Dark text on a soft gradient: of each line its words, left and top as fractions, and the size in points; the
    whole turned by `tilt` degrees."""
    ground = Image.linear_gradient("L").resize((size, size)).point(lambda value: 170 + value // 4)
    image = Image.merge("RGB", (ground, ground.rotate(90), ground))
    draw = ImageDraw.Draw(image)
    for text, left, top, points in lines:
        draw.text((left * size, top * size), text, font=ImageFont.load_default(size=points), fill=(25, 20, 60))
    return image.rotate(tilt, Image.Resampling.BICUBIC, fillcolor=(200, 200, 200))


def random_words(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    alphabet = string.ascii_uppercase + string.digits
    return ["".join(rng.choice(alphabet) for _ in range(rng.choice((3, 4)))) for _ in range(count)]


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def sample(sample_id: str, image: Image.Image, prompt: str) -> RewardSample:
    return RewardSample(sample_id=sample_id, media=encoded(image), media_type="image/png", prompt=prompt)


def sign_sample(sample_id: str, word: str, asked: str | None = None) -> RewardSample:
    """A sign that shows `word` to a prompt that asks for `asked`, by default the same."""
    return sample(sample_id, sign(word), f'A sign that says "{word if asked is None else asked}"')
