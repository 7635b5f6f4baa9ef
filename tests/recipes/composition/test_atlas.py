"""The atlas: extents of sprites, averaging, files; and the list of nouns."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.composition import atlas as atlases
from recipes.composition.atlas import NUM_DIRECTIONS, STYLES, Atlas
from recipes.composition.nouns import Noun, article, read_nouns
from recipes.composition.sprites import _draw
from recipes.composition.world import SMALL_NOUNS
from tests.recipes.composition.shapes import EDGE, shapes


def bar(width: int, height: int, edge: int = 20) -> Atlas:
    """One thing: an opaque white bar in the middle."""
    sprite = np.zeros((1, edge, edge, 4), np.uint8)
    top, left = (edge - height) // 2, (edge - width) // 2
    sprite[0, top : top + height, left : left + width] = 255
    part = shapes()
    return Atlas((Noun("bar", "bar", "bars"),), ("plain",), sprite, part.glyphs, part.advances)


def test_extents_of_a_bar_are_its_sides_and_its_diagonal() -> None:
    reach = bar(16, 8).extents[0]
    right, down = reach[0].item(), reach[NUM_DIRECTIONS // 4].item()
    assert (right, down) == pytest.approx((0.4, 0.2), abs=1e-6)
    diagonal = reach[NUM_DIRECTIONS // 8].item()
    assert diagonal == pytest.approx((0.4 + 0.2) / 2**0.5, abs=1e-6)
    assert torch.allclose(reach, reach.roll(NUM_DIRECTIONS // 2), atol=1e-6)


def test_every_shape_fills_the_edge_but_for_a_pixel() -> None:
    alpha = shapes().sprites[..., 3] > 16
    across, down = alpha.any(1).sum(1), alpha.any(2).sum(1)
    assert np.abs(np.maximum(across, down) - (EDGE - 2)).max() <= 1


def test_averaging_keeps_the_mean_of_every_sprite() -> None:
    half = shapes().of(SMALL_NOUNS[:2], ("flat",), EDGE // 2)
    wanted = shapes().sprites[[2, 5]].mean((1, 2))
    assert half.sprites.shape == (2, EDGE // 2, EDGE // 2, 4)
    assert half.sprites.mean((1, 2)) == pytest.approx(wanted, abs=0.5)
    with pytest.raises(ValueError, match="no unicorn"):
        shapes().of(["unicorn"], ("flat",), EDGE)
    with pytest.raises(ValueError, match="take a divisor"):
        shapes().of(SMALL_NOUNS, ("flat",), 24)


def test_files_give_the_same_atlas(tmp_path: Path) -> None:
    atlases.save(shapes(), tmp_path)
    again = atlases.read(tmp_path)
    assert (again.nouns, again.styles) == (shapes().nouns, shapes().styles)
    assert np.array_equal(again.sprites, shapes().sprites)
    assert np.array_equal(again.glyphs, shapes().glyphs)
    assert again.advances == pytest.approx(shapes().advances, abs=1e-4)
    with pytest.raises(ValueError, match="holds no atlas"):
        atlases.read(tmp_path / "other")


def test_the_folder_of_the_atlas_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    atlases.save(shapes(), tmp_path)
    monkeypatch.setenv(atlases.FOLDER, str(tmp_path))
    assert np.array_equal(atlases.load().sprites, shapes().sprites)


def test_an_icon_is_drawn_from_its_vectors() -> None:
    icons = {"icons": {"square": {"body": '<rect x="4" y="4" width="8" height="8" fill="#f00"/>'}}, "width": 16}
    sprite = _draw("square", icons, "some")
    assert sprite[1:-1, 1:-1].reshape(-1, 4).tolist() == [[255, 0, 0, 255]] * 62**2
    assert not sprite[0].any()
    with pytest.raises(ValueError, match="no icon 'circle'"):
        _draw("circle", icons, "some")


def test_the_list_names_a_thing_once_and_has_the_small_world() -> None:
    nouns = read_nouns()
    names = [noun.name for noun in nouns]
    assert 200 <= len(names) <= 400
    assert len(set(names)) == len(names) == len({noun.icon for noun in nouns})
    assert set(SMALL_NOUNS) <= set(names)
    assert names == sorted(names)
    plurals = {noun.name: noun.plural for noun in nouns}
    assert (plurals["mouse"], plurals["bus"], plurals["cat"]) == ("mice", "buses", "cats")


@pytest.mark.parametrize(("words", "wanted"), [("apple", "an apple"), ("ufo", "a ufo"), ("red owl", "a red owl")])
def test_articles(words: str, wanted: str) -> None:
    assert article(words) == wanted


@pytest.mark.long
def test_the_packages_have_every_icon(tmp_path: Path) -> None:
    """Fetched with npm as a user's first run does, and drawn."""
    from recipes.composition.sprites import build

    built = build(tmp_path / "packages")
    atlases.save(built, tmp_path / "atlas")
    assert built.sprites.shape == (len(read_nouns()) * len(STYLES), 64, 64, 4)
    assert built.sprites[..., 3].max((1, 2)).min() > 128
    assert sum(file.stat().st_size for file in (tmp_path / "atlas").iterdir()) < 10_000_000
    assert json.loads((tmp_path / "atlas" / "atlas.json").read_text())["styles"] == list(STYLES)
