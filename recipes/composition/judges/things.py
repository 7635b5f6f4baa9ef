"""Things that a model drew, labeled by people: what tells a judge which shapes pass for a thing. Renders cannot.

    python -m recipes.composition.evaluate --pictures PICTURES …
    python -m recipes.composition.judges.things PICTURES --output LABELS

PICTURES is a folder as `labels` describes it, of prompts without words; for the larger worlds name their --judge. This
finds what might be a thing in them, and writes sheets of it, each with the likeliest of the names that its prompt asks
for, and things.csv, a line for each. Write yes or no under `shown`: is it that, to a person? Where a name is another's,
write the right one under `noun`. `labeled/things` holds a developer's labels for each world, and `medium_reward`,
of which the reward learns; all others are the held-out judge's. No picture has labels in two folders.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

from recipes.composition.judges import labels
from recipes.composition.judges.findings import Thing
from recipes.composition.judges.heldout import HeldoutJudge
from recipes.composition.judges.loading import load_judge
from recipes.composition.make_prompts import read_lines
from recipes.composition.nouns import read_nouns
from recipes.composition.world import WORLDS, World
from services.reward.scorers.networks.geneval_rules import read_request

THINGS = "things.csv"
LABELED = Path(__file__).parent / "labeled" / "things"
HELDOUT = {"small": ("small",), "medium": ("medium", "full"), "full": ("full",)}
REWARD = {"medium": ("medium_reward",)}
"""Folders under `LABELED` of which each judge learns, by world."""
WEIGHTS = Path(__file__).parent / "weights"
THRESHOLD = 0.02
"""Certainty that there is anything, from which it is asked about."""
COLUMNS, ROWS, EDGE, LINE_HEIGHT = 12, 9, 110, 14
MOST_TURN, MOST_SCALE, MOST_SHIFT = 0.25, 0.3, 0.2
"""How far labeled pictures are varied: radians, the logarithm of a factor, halves of an edge."""
MOST_GAIN, MOST_SHADE = 0.15, 0.05
"""How far their channels are: shares of what they are, and what is added."""
AROUND = 1.24
"""Edge of what is shown, by the longer one of the thing's box."""


@dataclass(frozen=True)
class Labeled:
    """Pictures (N, 3, S, S) float32 from 0 to 1 and their things. `boxes` (N, M, 4) in edges, zeros where a picture has
    fewer; `nouns` (N, M) int64, −1 where a box shows none of them; `refused` (N, M) bool: a person does not take it
    for a thing.
    """

    pictures: torch.Tensor
    boxes: torch.Tensor
    nouns: torch.Tensor
    refused: torch.Tensor

    def drawn(self, num: int, generator: torch.Generator) -> Labeled:
        """Draws so many pictures by chance, half of the times as in a mirror."""
        chosen = torch.randint(len(self.pictures), (num,), generator=generator, device=generator.device)
        pictures, boxes, nouns, refused = (getattr(self, field.name)[chosen] for field in fields(self))
        if torch.rand(1, generator=generator, device=generator.device) < 0.5:
            pictures = pictures.flip(-1)
            mirrored = torch.stack([1 - boxes[..., 2], boxes[..., 1], 1 - boxes[..., 0], boxes[..., 3]], -1)
            boxes = torch.where(boxes[..., 2:3] > 0, mirrored, boxes)
        return Labeled(pictures, boxes, nouns, refused)

    def varied(self, generator: torch.Generator) -> Labeled:
        """Turns, scales, shifts and tints each picture by chance, so that a judge learns shapes and not pictures. A
        thing whose middle leaves its picture is background."""
        num, device = len(self.pictures), self.pictures.device
        numbers = torch.rand(4, num, generator=generator, device=device) - 0.5
        tints = torch.rand(2, num, 3, 1, 1, generator=generator, device=device) - 0.5
        angle, size, shift = (
            MOST_TURN * 2 * numbers[0],
            (MOST_SCALE * 2 * numbers[1]).exp(),
            MOST_SHIFT * 2 * numbers[2:].T,
        )
        turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(num, 2, 2)
        matrix = torch.cat([turn / size[:, None, None], shift[..., None]], 2)
        points = F.affine_grid(matrix, list(self.pictures.shape), align_corners=False)
        pictures = F.grid_sample(self.pictures, points, padding_mode="border", align_corners=False)
        pictures = (pictures * (1 + MOST_GAIN * 2 * tints[0]) + MOST_SHADE * 2 * tints[1]).clamp(0, 1)
        # A place p is painted from turn p / size + shift.
        middles = self.boxes[..., :2] + self.boxes[..., 2:] - 1 - shift[:, None]
        middles = (middles @ turn * size[:, None, None] + 1) / 2
        halves = (self.boxes[..., 2:] - self.boxes[..., :2]) / 2 * size[:, None, None]
        stays = ((middles > 0) & (middles < 1)).all(-1) & (self.boxes[..., 2] > 0)
        boxes = torch.cat([middles - halves, middles + halves], -1) * stays[..., None]
        return Labeled(pictures, boxes, self.nouns.where(stays, -1), self.refused & stays)


def read(folder: Path, nouns: Sequence[str], device: torch.device | str = "cpu") -> Labeled:
    """Labeled things. Raises ValueError for a label that is neither yes nor no, an unknown noun, and no labels.
    Nouns of other worlds are background."""
    lines = read_lines(folder / labels.PROMPTS)
    pictures = labels.read(folder, range(len(lines)))
    known = {noun.name for noun in read_nouns()}
    rows: list[list[tuple[list[float], int, bool]]] = [[] for _ in lines]
    with (folder / THINGS).open(newline="") as file:
        for row in csv.DictReader(file):
            if row["shown"] not in labels.CALLED:
                raise ValueError(f"{folder / THINGS}: a thing is labeled {row['shown']!r}: write yes or no")
            if row["noun"] not in known:
                raise ValueError(f"{folder / THINGS}: nouns.txt has no {row['noun']!r}")
            box = [float(row[side]) / pictures.shape[-1] for side in ("left", "top", "right", "bottom")]
            is_shown = bool(labels.CALLED[row["shown"]])
            noun = nouns.index(row["noun"]) if is_shown and row["noun"] in nouns else -1
            rows[int(row["picture"])].append((box, noun, not is_shown))
    if not (most := max(map(len, rows))):
        raise ValueError(f"{folder / THINGS} has no labels: fill one by `python -m recipes.composition.judges.things`")
    full = [[*ones, *[([0.0] * 4, -1, False)] * (most - len(ones))] for ones in rows]
    boxes, kinds, refused = (torch.tensor([[one[part] for one in ones] for ones in full]) for part in range(3))
    return Labeled(pictures.to(device), boxes.to(device), kinds.to(device), refused.to(device))


def read_kept(folders: Mapping[str, Sequence[str]], world: World, device: torch.device | str = "cpu") -> Labeled | None:
    """Labels in the repository, as `read` gives them. folders: names of those under `LABELED`, by the world's name,
    "full" for one without; None where there are none."""
    own = next((name for name in WORLDS if world.nouns == World.named(name).nouns), "full")
    parts = [read(LABELED / folder, world.nouns, device) for folder in folders.get(own, ())]
    if not parts:
        return None
    most = max(part.nouns.shape[1] for part in parts)
    grown = [_with_room(part, most - part.nouns.shape[1]) for part in parts]
    return Labeled(*(torch.cat([getattr(part, field.name) for part in grown]) for field in fields(Labeled)))


def _with_room(labeled: Labeled, more: int) -> Labeled:
    """Makes room for more things to a picture."""
    boxes = F.pad(labeled.boxes, (0, 0, 0, more))
    nouns, refused = (
        F.pad(part, (0, more), value=empty) for part, empty in ((labeled.nouns, -1), (labeled.refused, 0))
    )
    return Labeled(labeled.pictures, boxes, nouns, refused)


def write_sheets(folder: Path, judge: HeldoutJudge, output: Path) -> int:
    """Write things-0.png, … and an unfilled things.csv; returns how many things they ask about. ValueError for a prompt
    that asks for a noun which the judge does not know."""
    lines = read_lines(folder / labels.PROMPTS)
    pictures = labels.read(folder, range(len(lines)))
    names = [read_request(line["metadata"]).names for line in lines]
    if unknown := sorted({name for ones in names for name in ones} - {*judge.kind.nouns}):
        raise ValueError(f"the judge knows no {', '.join(unknown[:3])}: name the one of this world by --judge")
    asked = torch.tensor([[noun in ones for noun in judge.kind.nouns] for ones in names])
    looks = judge.look(pictures, THRESHOLD, asked)
    found = [(number, thing) for number, ones in enumerate(looks) for thing in ones.things]
    output.mkdir(parents=True, exist_ok=True)
    with (output / THINGS).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("picture", "noun", "left", "top", "right", "bottom", "shown"))
        writer.writerows((number, one.name, *(f"{side:.2f}" for side in one.box), "") for number, one in found)
    for place in range(0, len(found), COLUMNS * ROWS):
        part = found[place : place + COLUMNS * ROWS]
        _sheet(pictures, part, place).save(output / f"things-{place // (COLUMNS * ROWS)}.png")
    return len(found)


def _sheet(pictures: torch.Tensor, found: Sequence[tuple[int, Thing]], first: int) -> Image.Image:
    sheet = Image.new("RGB", (COLUMNS * EDGE, ROWS * (EDGE + LINE_HEIGHT)), "white")
    canvas, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=11)
    for place, (number, thing) in enumerate(found):
        left, top = place % COLUMNS * EDGE, place // COLUMNS * (EDGE + LINE_HEIGHT)
        pixels = (pictures[number].permute(1, 2, 0) * 255).round().byte().numpy()
        shown = Image.fromarray(pixels).crop(_around(thing.box)).resize((EDGE - 4, EDGE - 4), Image.Resampling.BICUBIC)
        sheet.paste(shown, (left, top))
        canvas.text((left + 1, top + EDGE - 4), f"{first + place} {thing.name}", fill="black", font=font)
    return sheet


def _around(box: tuple[float, float, float, float]) -> tuple[int, int, int, int]:
    left, top, right, bottom = box
    half = AROUND / 2 * max(right - left, bottom - top)
    middle = (left + right) / 2, (top + bottom) / 2
    return tuple(round(at + by) for by in (-half, half) for at in middle)  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--judge", type=Path, default=WEIGHTS / f"heldout-{World.small().size}.safetensors")
    options = parser.parse_args()
    judge = load_judge(options.judge)
    if not isinstance(judge, HeldoutJudge):
        parser.error(f"{options.judge} is the reward: give the file of a held-out judge")
    judge.reads = False
    try:
        print(f"{write_sheets(options.pictures, judge, options.output)} things: {options.output}")
    except ValueError as mistake:
        parser.error(str(mistake))


if __name__ == "__main__":
    main()
