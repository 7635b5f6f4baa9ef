"""Labeled things: what is asked about, what a label says of cells, and that a judge learns it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from recipes.composition.captions import prompt_lines
from recipes.composition.judges import labels, things
from recipes.composition.judges.files import Kind
from recipes.composition.judges.heldout import CELLS, HeldoutJudge
from recipes.composition.judges.train_heldout import INNER, tune
from recipes.composition.make_prompts import read_lines
from recipes.composition.render import render
from recipes.composition.scenes import World, draw
from recipes.composition.world import WORLDS
from services.reward.scorers.networks.geneval_rules import read_request


@pytest.fixture(scope="module")
def world() -> World:
    return World.small()


@pytest.fixture
def folder(world: World, tmp_path: Path) -> Path:
    scenes = draw(world, 4, torch.Generator().manual_seed(3))
    labels.save(tmp_path, render(world, scenes, "cpu"), prompt_lines(world, scenes))
    return tmp_path


def write(folder: Path, *rows: tuple[object, ...]) -> None:
    with (folder / things.THINGS).open("w", newline="") as file:
        csv.writer(file).writerows([("picture", "noun", "left", "top", "right", "bottom", "shown"), *rows])


def test_a_label_is_about_the_middle_of_its_box(folder: Path, world: World) -> None:
    write(folder, (1, world.nouns[2], 0, 16, 32, 48, "yes"), (3, world.nouns[0], 32, 32, 64, 64, "no"))
    found = things.read(folder, world.nouns, 0.5)
    assert found.pictures.shape == (4, 3, 64, 64)
    assert found.nouns.nonzero().tolist() == [[1, row, column] for row in range(6, 10) for column in range(2, 6)]
    assert set(found.nouns.flatten().tolist()) == {0, 3}
    assert found.refused.nonzero().tolist() == [[3, row, column] for row in range(10, 14) for column in range(10, 14)]


@pytest.mark.parametrize(
    ("noun", "shown", "says"), [("apple", "maybe", "write yes or no"), ("sphinx", "yes", "has no")]
)
def test_other_labels_are_refused(folder: Path, world: World, noun: str, shown: str, says: str) -> None:
    write(folder, (0, noun, 0, 0, 9, 9, shown))
    with pytest.raises(ValueError, match=says):
        things.read(folder, world.nouns, 0.5)


def test_what_a_larger_world_alone_has_is_nothing(folder: Path, world: World) -> None:
    write(folder, (0, "unicorn", 0, 0, 32, 32, "yes"), (1, "unicorn", 0, 0, 32, 32, "no"))
    found = things.read(folder, world.nouns, 0.5)
    assert not found.nouns.any()
    assert set(found.refused.nonzero()[:, 0].tolist()) == {1}


@pytest.mark.parametrize("name", WORLDS)
def test_labels_of_a_world_can_be_read(name: str) -> None:
    world = World.named(name)
    found = things.read_kept(world, 0.5)
    assert found.pictures.shape[2:] == (world.size, world.size)
    assert found.refused.any()
    assert 0 < found.nouns.max() <= len(world.nouns)


def test_pictures_are_drawn_with_their_labels_in_a_mirror_too(folder: Path, world: World) -> None:
    write(folder, *((number, world.nouns[number], 0, 0, 32, 32, "yes") for number in range(4)))
    labeled, generator = things.read(folder, world.nouns, 0.5), torch.Generator().manual_seed(1)
    sides = set()
    for _ in range(8):
        drawn = labeled.drawn(5, generator)
        for picture, nouns in zip(drawn.pictures, drawn.nouns, strict=True):
            number = int(nouns.max()) - 1
            is_left = bool(nouns[:, : CELLS // 2].any())
            sides.add(is_left)
            assert torch.equal(picture if is_left else picture.flip(-1), labeled.pictures[number])
    assert sides == {True, False}


def test_sheets_ask_about_what_a_doubtful_judge_may_see_by_a_name_of_its_prompt(
    folder: Path, world: World, tmp_path: Path
) -> None:
    judge = HeldoutJudge(Kind.of("heldout", world))
    judge.reads = False
    bias = judge.head.out.bias
    assert bias is not None
    with torch.no_grad():
        bias[0] += 4  # believes that nothing is there
        bias[3] += 1  # and if anything, the third noun
    assert not any(found.things for found in judge.look(labels.read(folder, range(4))))
    count = things.write_sheets(folder, judge, tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out" / things.THINGS).open(newline="")))
    assert len(rows) == count >= 4
    asked = [set(read_request(line["metadata"]).names) for line in read_lines(folder / labels.PROMPTS)]
    for row in rows:
        names = asked[int(row["picture"])]
        assert row["noun"] in names
        assert row["noun"] == world.nouns[2] or world.nouns[2] not in names
        assert row["shown"] == ""
    assert (tmp_path / "out" / "things-0.png").is_file()


def test_sheets_of_another_world_are_refused(world: World, tmp_path: Path) -> None:
    medium = World.medium()
    scenes = draw(medium, 16, torch.Generator().manual_seed(3))
    labels.save(tmp_path, render(medium, scenes, "cpu"), prompt_lines(medium, scenes))
    with pytest.raises(ValueError, match=r"the judge knows no .*--judge"):
        things.write_sheets(tmp_path, HeldoutJudge(Kind.of("heldout", world)), tmp_path / "out")


def test_the_medium_world_learns_from_the_labels_of_the_full_one_too() -> None:
    medium, full = World.medium(), World.full()
    own = things.read(things.LABELED / "medium", medium.nouns, 0.5)
    both, others = things.read_kept(medium, 0.5), things.read_kept(full, 0.5)
    assert len(both.pictures) == len(own.pictures) + len(others.pictures)
    assert torch.equal(both.nouns[: len(own.nouns)], own.nouns)
    assert torch.equal(both.refused[len(own.nouns) :], others.refused)


def test_a_judge_learns_what_people_refuse(world: World) -> None:
    judge, generator = HeldoutJudge(Kind.of("heldout", world)), torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    labeled = things.read_kept(world, INNER)
    assert (len(labeled.pictures), int((labeled.nouns > 0).any(2).any(1).sum())) == (827, 548)
    before = [value.clone() for value in judge.features.state_dict().values()]

    def refusing() -> float:
        with torch.no_grad():
            said = judge.cells(labeled.pictures[:32])[0].softmax(1)[:, 0]
        return float(said[labeled.refused[:32]].mean())

    judge.features.eval()
    judge.head.eval()
    first = refusing()
    tune(judge, world, labeled, generator, 12)
    judge.head.eval()
    assert refusing() > 1.4 * first
    assert all(torch.equal(old, new) for old, new in zip(before, judge.features.state_dict().values(), strict=True))
