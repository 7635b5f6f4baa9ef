"""Videos in the demo's grid: strips of frames, before over after."""

from pathlib import Path

import numpy as np
from PIL import Image

from flowfleet.demo.plots import Pair, before_after
from flowfleet.demo.results import _pixels, film_strip
from flowfleet.media.files import encode_media


def test_a_strip_shows_five_frames_from_the_first_to_the_last() -> None:
    frames = np.arange(9, dtype=np.uint8)[:, None, None, None] * np.full((1, 4, 32, 3), 10, dtype=np.uint8)

    strip = film_strip(frames)

    assert strip.shape == (4, 5 * 32 + 4 * 2, 3)
    assert [int(strip[0, 34 * n, 0]) for n in range(5)] == [0, 20, 40, 60, 80]
    assert (strip[:, 32:34] == 255).all()
    assert film_strip(frames[:2]).shape == (4, 2 * 32 + 2, 3)


def test_a_film_is_read_as_a_strip_and_a_picture_as_it_is() -> None:
    frames = np.full((5, 16, 16, 3), 90, dtype=np.uint8)
    assert _pixels(*encode_media(frames)).shape == (16, 5 * 16 + 4, 3)
    assert np.array_equal(_pixels(*encode_media(frames[:1])), frames[0])


def test_films_are_drawn_one_below_the_other(tmp_path: Path) -> None:
    strips = [np.full((32, 168, 3), (200, 10 * n, 30), dtype=np.uint8) for n in range(4)]
    pairs = [Pair("A large green ball moving right", strips[2 * n], strips[2 * n + 1], 0.5, 1.0) for n in range(2)]

    before_after(tmp_path / "films.png", pairs, "title", "subtitle")

    with Image.open(tmp_path / "films.png") as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    tops = [int(np.nonzero((pixels == strip[0, 0]).all(axis=2))[0].min()) for strip in strips]
    assert tops[0] == tops[2] < tops[1] == tops[3]
