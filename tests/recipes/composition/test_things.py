"""Labeled things: what is asked about, what a label says of cells, and that a judge learns it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from recipes.composition.captions import prompt_lines
from recipes.composition.judges import labels, things
from recipes.composition.judges.files import Kind
from recipes.composition.judges.heldout import HeldoutJudge
from recipes.composition.judges.loading import load_judge
from recipes.composition.judges.reward import RewardJudge
from recipes.composition.judges.train_heldout import middles, tune
from recipes.composition.judges.train_reward import _bumps, _focal
from recipes.composition.judges.train_reward import tune as tune_reward
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
    found = things.read(folder, world.nouns)
    assert found.pictures.shape == (4, 3, 64, 64)
    assert found.nouns.tolist() == [[-1], [2], [-1], [-1]]
    assert found.refused.tolist() == [[False], [False], [False], [True]]
    cells = middles(found.boxes)[:, 0].nonzero().tolist()
    assert cells == [[1, row, column] for row in range(6, 10) for column in range(2, 6)] + [
        [3, row, column] for row in range(10, 14) for column in range(10, 14)
    ]


@pytest.mark.parametrize(
    ("noun", "shown", "says"), [("apple", "maybe", "write yes or no"), ("sphinx", "yes", "has no")]
)
def test_other_labels_are_refused(folder: Path, world: World, noun: str, shown: str, says: str) -> None:
    write(folder, (0, noun, 0, 0, 9, 9, shown))
    with pytest.raises(ValueError, match=says):
        things.read(folder, world.nouns)


def test_a_file_without_labels_is_refused(folder: Path, world: World) -> None:
    write(folder)
    with pytest.raises(ValueError, match="has no labels"):
        things.read(folder, world.nouns)


def test_what_a_larger_world_alone_has_is_nothing(folder: Path, world: World) -> None:
    write(folder, (0, "unicorn", 0, 0, 32, 32, "yes"), (1, "unicorn", 0, 0, 32, 32, "no"))
    found = things.read(folder, world.nouns)
    assert set(found.nouns.flatten().tolist()) == {-1}
    assert found.refused.nonzero().tolist() == [[1, 0]]


@pytest.mark.parametrize("name", WORLDS)
def test_labels_of_a_world_can_be_read(name: str) -> None:
    world = World.named(name)
    for folders in (things.HELDOUT, things.REWARD):
        if (found := things.read_kept(folders, world)) is None:
            assert name not in folders
            continue
        assert found.pictures.shape[2:] == (world.size, world.size)
        assert found.refused.any()
        assert 0 <= found.nouns.max() < len(world.nouns)
        assert (found.boxes[(found.nouns >= 0) | found.refused][:, 2] > 0).all()


def test_pictures_are_drawn_with_their_labels_in_a_mirror_too(folder: Path, world: World) -> None:
    write(folder, *((number, world.nouns[number], 0, 0, 32, 32, "yes") for number in range(4)))
    labeled, generator = things.read(folder, world.nouns), torch.Generator().manual_seed(1)
    sides = set()
    for _ in range(8):
        drawn = labeled.drawn(5, generator)
        for picture, box, nouns in zip(drawn.pictures, drawn.boxes, drawn.nouns, strict=True):
            number = int(nouns[0])
            left, _, right, _ = box[0].tolist()
            assert (left, right) in ((0.0, 0.5), (0.5, 1.0))
            is_left = left == 0.0
            sides.add(is_left)
            assert torch.equal(picture if is_left else picture.flip(-1), labeled.pictures[number])
    assert sides == {True, False}


def test_boxes_follow_what_varied_pictures_show() -> None:
    """White squares on black: what is bright stays in the middle of its box and as large."""
    generator = torch.Generator().manual_seed(1)
    pictures, boxes = torch.zeros(32, 3, 128, 128), torch.zeros(32, 2, 4)
    corners = torch.randint(8, 100, (32, 2), generator=generator)
    for picture, box, (left, top) in zip(pictures, boxes, corners.tolist(), strict=True):
        picture[:, top : top + 20, left : left + 20] = 1
        box[0] = torch.tensor([left, top, left + 20, top + 20]) / 128
    nouns = torch.tensor([3, -1]).expand(32, 2)
    refused = torch.tensor([True, False]).expand(32, 2)
    varied = things.Labeled(pictures, boxes, nouns, refused).varied(generator)
    light = (varied.pictures.mean(1) - varied.pictures.mean(1).amin((1, 2), keepdim=True)).flatten(1)
    light = light / light.amax(1, keepdim=True)
    at = (
        torch.stack(torch.meshgrid(torch.arange(128), torch.arange(128), indexing="xy"), -1).flatten(0, 1) + 0.5
    ) / 128
    inside = ((varied.boxes[:, 0] > 0.05) & (varied.boxes[:, 0] < 0.95)).all(1)
    assert 12 <= inside.sum() < 32
    middles_of = (light @ at) / light.sum(1, keepdim=True)
    sides = light.sum(1).sqrt() / 128
    assert ((middles_of - (varied.boxes[:, 0, :2] + varied.boxes[:, 0, 2:]) / 2)[inside].abs() < 0.01).all()
    assert ((sides / (varied.boxes[:, 0, 2] - varied.boxes[:, 0, 0]) - 1)[inside].abs() < 0.1).all()
    gone = varied.nouns[:, 0] < 0
    assert gone.any()
    assert not varied.boxes[gone].any()
    assert torch.equal(varied.refused[:, 0], ~gone)
    assert not varied.boxes[:, 1].any()
    assert (varied.nouns[:, 1] == -1).all()


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
    own = things.read(things.LABELED / "medium", medium.nouns)
    both, others = things.read_kept(things.HELDOUT, medium), things.read_kept(things.HELDOUT, full)
    assert both is not None
    assert others is not None
    assert len(both.pictures) == len(own.pictures) + len(others.pictures)
    assert torch.equal(both.nouns[: len(own.nouns), : own.nouns.shape[1]], own.nouns)
    assert torch.equal(both.refused[len(own.nouns) :].sum(1), others.refused.sum(1))
    assert (both.nouns[: len(own.nouns), own.nouns.shape[1] :] == -1).all()


def test_no_picture_is_labeled_for_two_ends() -> None:
    """The judges learn from no picture in common, and from none that measures them."""
    names = {name for folders in (things.HELDOUT, things.REWARD) for ones in folders.values() for name in ones}
    assert names == {folder.name for folder in things.LABELED.iterdir()}
    measuring = [folder for folder in things.LABELED.parent.iterdir() if folder != things.LABELED]
    assert len(measuring) == 12
    seen: set[bytes] = set()
    for folder in (*(things.LABELED / name for name in names), *measuring):
        pictures = labels.read(folder, range(len(read_lines(folder / labels.PROMPTS))))
        own = {picture.numpy().tobytes() for picture in pictures}
        assert not own & seen, folder.name
        seen |= own


def test_the_reward_learns_what_people_accept_and_refuse(world: World) -> None:
    """Negatives of renders are accepted, renders in the colors of other channels are refused."""
    judge, generator = load_judge(things.WEIGHTS / "reward-64.safetensors"), torch.Generator().manual_seed(1)
    assert isinstance(judge, RewardJudge)
    scenes = draw(world, 32, generator, categories=["single_object", "two_object"])
    pictures, is_thing = render(world, scenes, "cpu"), scenes.boxes[..., 2] > 0
    accepted = torch.arange(32) < 16
    shown = torch.where(accepted[:, None, None, None], 1 - pictures, pictures.roll(1, 1))
    nouns = torch.where(is_thing & accepted[:, None], scenes.nouns, -1)
    labeled = things.Labeled(shown, scenes.boxes, nouns, is_thing & ~accepted[:, None])

    def certain(pictures: torch.Tensor, ones: torch.Tensor) -> float:
        """Mean of the most heat in the middles of these pictures' things."""
        with torch.no_grad():
            heat = judge.detector(pictures[ones])[0][:, :-1].sigmoid().amax(1)
        asked = is_thing[ones]
        inside = middles(scenes.boxes[ones]) & asked[..., None, None]
        return float((heat[:, None] * inside).amax((2, 3))[asked].mean())

    judge.detector.eval()
    before = [certain(shown, ones) for ones in (accepted, ~accepted)]
    tune_reward(judge.detector, world, labeled, generator, 40)
    judge.detector.eval()
    after = [certain(shown, ones) for ones in (accepted, ~accepted)]
    assert after[0] > 1.5 * before[0]
    assert after[1] < 0.6 * before[1]
    assert certain(pictures, torch.ones(32, dtype=torch.bool)) > 0.5


def test_what_is_refused_weighs_more_than_what_is_background() -> None:
    boxes, heat = torch.tensor([[[0.25, 0.25, 0.75, 0.75]]]), torch.zeros(1, 3, 16, 16)
    bump = _bumps(boxes, torch.zeros(1, 1, dtype=torch.int64), 1)
    assert (bump.shape, bump[0, 0].argmax()) == ((1, 1, 16, 16), 8 * 16 + 8)
    plain, refused = _focal(heat, torch.zeros_like(heat)), _focal(heat, torch.zeros_like(heat), 1 + 8 * bump)
    assert float(refused) == pytest.approx(float(plain) * (1 + 8 * float(bump.mean())), rel=1e-5)
    assert not _bumps(boxes, torch.full((1, 1), -1), 1).any()
    assert not _bumps(torch.zeros(1, 1, 4), torch.zeros(1, 1, dtype=torch.int64), 1).any()


def test_a_judge_learns_what_people_refuse(world: World) -> None:
    judge, generator = HeldoutJudge(Kind.of("heldout", world)), torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    labeled = things.read_kept(things.HELDOUT, world)
    assert labeled is not None
    assert (len(labeled.pictures), int((labeled.nouns >= 0).any(1).sum())) == (827, 548)
    before = [value.clone() for value in judge.features.state_dict().values()]

    def refusing() -> float:
        with torch.no_grad():
            said = judge.cells(labeled.pictures[:32])[0].softmax(1)[:, 0]
        return float(said[(middles(labeled.boxes[:32]) & labeled.refused[:32, :, None, None]).any(1)].mean())

    judge.features.eval()
    judge.head.eval()
    first = refusing()
    tune(judge, world, labeled, generator, 12)
    judge.head.eval()
    assert refusing() > 1.4 * first
    assert all(torch.equal(old, new) for old, new in zip(before, judge.features.state_dict().values(), strict=True))
