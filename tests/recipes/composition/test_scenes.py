"""Scenes: what `draw` promises of counts, places and splits, and what `render` paints."""

import dataclasses
from itertools import combinations

import pytest
import torch

from recipes.composition.heldout import DECISIVE, held_pairs, is_held_prompt
from recipes.composition.layout import GAP, MARGIN
from recipes.composition.render import coverage, render
from recipes.composition.scenes import CATEGORIES, Scenes, World, draw
from recipes.composition.world import RELATIONS, Split, mix
from services.reward.scorers.networks.geneval_rules import relations
from tests.recipes.composition.shapes import shapes

TEXT, COUNTING = CATEGORIES.index("text"), CATEGORIES.index("counting")


def same(one: Scenes, other: Scenes) -> bool:
    return all(
        torch.equal(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(Scenes)
    )


def test_a_seed_gives_the_same_scenes(world: World) -> None:
    first, again, other = (draw(world, 40, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert same(first, again)
    assert not same(first, other)
    parts = Scenes.cat([first.pick(slice(0, 15)), first.pick(torch.arange(15, 40))])
    assert same(first, parts)
    assert torch.equal(render(world, first, "cpu")[7:9], render(world, first.pick([7, 8]), "cpu"))


def test_every_category_has_the_things_it_is_about(world: World, scenes: Scenes) -> None:
    numbers = {"single_object": {1}, "colors": {1}, "style": {1}, "text": {0}, "counting": {2, 3, 4}}
    for index, name in enumerate(CATEGORIES):
        part = scenes.pick(scenes.category == index)
        assert len(part) > 40
        assert set(part.count.tolist()) == numbers.get(name, {2})
        assert torch.equal((part.nouns >= 0).sum(1), part.count)
        assert ((part.relation >= 0) == (name == "position")).all()
        assert ((part.word[:, 0] >= 0) == (name == "text")).all()
        is_colored = (part.colors >= 0).sum(1) == part.count
        assert name not in ("colors", "color_attr") or is_colored.all()
        if name in ("two_object", "position", "color_attr"):
            assert (part.nouns[:, 0] != part.nouns[:, 1]).all()
        if name == "color_attr":
            assert (part.colors[:, 0] != part.colors[:, 1]).all()
    counting = scenes.pick(scenes.category == COUNTING)
    assert ((counting.nouns == counting.nouns[:, :1]) | (counting.nouns < 0)).all()
    lengths = (scenes.word[scenes.category == TEXT] >= 0).sum(1)
    assert set(lengths.tolist()) == {3, 4}


def test_boxes_are_in_the_picture_and_apart(scenes: Scenes) -> None:
    for count, boxes, sign in zip(scenes.count.tolist(), scenes.boxes.tolist(), scenes.sign.tolist(), strict=True):
        shown = boxes[:count] + ([sign] if any(sign) else [])
        for left, top, right, bottom in shown:
            assert MARGIN - 1e-5 <= left < right <= 1 - MARGIN + 1e-5
            assert MARGIN - 1e-5 <= top < bottom <= 1 - MARGIN + 1e-5
        for one, other in combinations(shown, 2):
            gaps = [max(one[axis] - other[axis + 2], other[axis] - one[axis + 2]) for axis in (0, 1)]
            assert max(gaps) >= GAP - 1e-5


def test_relations_hold_by_the_rules_of_the_benchmark(scenes: Scenes) -> None:
    part = scenes.pick(scenes.relation >= 0)
    for relation, boxes in zip(part.relation.tolist(), part.boxes.tolist(), strict=True):
        assert relations(tuple(boxes[0]), tuple(boxes[1]), 0.1) == {RELATIONS[relation]}
    assert set(part.relation.tolist()) == {0, 1, 2, 3}


def test_boxes_hold_what_is_painted(world: World, scenes: Scenes) -> None:
    """To a pixel: edges are blurred over one."""
    part = scenes.pick(slice(0, 120))
    inside = coverage(world, part) > 0.3
    for owner, slot in (part.nouns >= 0).nonzero().tolist():
        rows, columns = inside[owner, slot].nonzero(as_tuple=True)
        painted = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        wanted = (part.boxes[owner, slot] * world.size).tolist()
        assert [float(side) for side in painted] == pytest.approx(wanted, abs=1.6)


def test_pictures_are_in_range_and_show_the_color_asked_for(world: World) -> None:
    scenes = draw(world, 80, torch.Generator().manual_seed(3), categories=["colors"])
    pictures = render(world, scenes, "cpu")
    assert pictures.shape == (80, 3, 64, 64)
    assert pictures.dtype == torch.float32
    assert 0 <= pictures.min() < 0.1
    assert 0.9 < pictures.max() <= 1
    cover = coverage(world, scenes)[:, 0, None] > 0.99
    red = scenes.colors[:, 0] == world.colors.index("red")
    means = (pictures * cover).sum((2, 3)) / cover.sum((2, 3))
    assert red.any()
    assert (means[red, 0] > 2 * means[red, 1:].amax(1)).all()


def test_what_is_behind_is_paler_than_things_are(world: World) -> None:
    scenes = draw(world, 60, torch.Generator().manual_seed(3), categories=["single_object"])
    pictures, cover = render(world, scenes, "cpu"), coverage(world, scenes).amax(1)
    behind = (cover < 0.01)[:, None].expand_as(pictures)
    assert pictures[behind].min() > 0.15
    chroma = (pictures.amax(1) - pictures.amin(1))[cover < 0.01]
    assert chroma.max() < 0.35


def test_a_word_is_dark_on_light_or_light_on_dark(world: World) -> None:
    scenes = draw(world, 40, torch.Generator().manual_seed(3), categories=["text"])
    pictures = render(world, scenes, "cpu").mean(1)
    for picture, (left, top, right, bottom) in zip(pictures, (scenes.sign * world.size).int().tolist(), strict=True):
        board = picture[top + 2 : bottom - 2, left + 2 : right - 2]
        assert board.max() - board.min() > 0.45


@pytest.mark.parametrize("split", ["train", "seen", "unseen"])
def test_splits_show_what_they_may(world: World, split: Split) -> None:
    scenes = draw(world, 400, torch.Generator().manual_seed(9), split=split)
    assert set(scenes.category.tolist()) == set(range(len(CATEGORIES)))
    held = held_pairs(world, scenes)
    if split == "unseen":
        decisive = torch.tensor([DECISIVE[name] for name in CATEGORIES])[scenes.category]
        assert held.gather(1, decisive[:, None]).all()
        assert (held.sum(1) == 1).all()
    else:
        assert not held.any()
        assert (is_held_prompt(world, scenes) == (split == "seen")).all()


def test_judges_learn_what_is_held_out_too(world: World) -> None:
    scenes = draw(world, 400, torch.Generator().manual_seed(9), split="any")
    held = held_pairs(world, scenes)
    assert held.any(0).all()  # of each kind of pair
    assert 0.2 < held.any(1).float().mean() < 0.6
    assert is_held_prompt(world, scenes).any()


def test_every_noun_is_trained_in_some_style_and_most_pairs_are(world: World) -> None:
    scenes = draw(world, 3000, torch.Generator().manual_seed(9))
    assert set(scenes.nouns[scenes.nouns >= 0].tolist()) == set(range(len(world.nouns)))
    colored = scenes.colors >= 0
    pairs = scenes.nouns[colored] * len(world.colors) + scenes.colors[colored]
    assert 80 <= len(set(pairs.tolist())) <= 95  # of 100, one in eight held out


def test_a_world_holds_the_same_pairs_out_whatever_else_it_has(world: World) -> None:
    fewer = World.of(64, world.nouns[3:], shapes())
    scenes = draw(fewer, 200, torch.Generator().manual_seed(1), categories=["two_object", "colors"])
    moved = dataclasses.replace(scenes, nouns=torch.where(scenes.nouns >= 0, scenes.nouns + 3, -1))
    assert torch.equal(held_pairs(fewer, scenes), held_pairs(world, moved))


def test_a_category_without_held_out_pairs_is_refused() -> None:
    two = World.of(64, ("banana", "car"), shapes())
    with pytest.raises(ValueError, match="has no single_object: take more nouns"):
        draw(two, 10, torch.Generator(), split="unseen", categories=["single_object"])


def test_hashes_are_spread_evenly() -> None:
    a, b = torch.arange(200)[:, None], torch.arange(200)
    for divisor in (8, 10):
        counts = torch.bincount((mix(3, a, b) % divisor).flatten(), minlength=divisor)
        expected = 40_000 / divisor
        assert ((counts - expected) ** 2 / expected).sum() < 35  # chi squared; 0.1 % of true dice exceed 28
