"""Things that a model drew, labeled by people: what tells a judge which shapes pass for a thing. Renders cannot.

    python -m recipes.composition.evaluate --pictures PICTURES …
    python -m recipes.composition.judges.things PICTURES --output LABELS

PICTURES is a folder as `labels` describes it, of prompts without words; for the larger worlds name their --judge. This
finds what might be a thing in them, and writes sheets of it, each with the likeliest of the names that its prompt asks
for, and things.csv, a line for each. Write yes or no under `shown`: is it that, to a person? Where a name is another's,
write the right one under `noun`. `labeled/things` holds a developer's labels for each world, in pictures of which no
other label here is.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from recipes.composition.judges import labels
from recipes.composition.judges.findings import Thing
from recipes.composition.judges.heldout import CELLS, HeldoutJudge
from recipes.composition.judges.loading import load_judge
from recipes.composition.make_prompts import read_lines
from recipes.composition.nouns import read_nouns
from recipes.composition.world import WORLDS, World
from services.reward.scorers.networks.geneval_rules import read_request

THINGS = "things.csv"
LABELED = Path(__file__).parent / "labeled" / "things"
"""It has a folder for each world."""
WEIGHTS = Path(__file__).parent / "weights"
THRESHOLD = 0.02
"""Certainty that there is anything, from which it is asked about."""
COLUMNS, ROWS, EDGE, LINE_HEIGHT = 12, 9, 110, 14
AROUND = 1.24
"""Edge of what is shown, by the longer one of the thing's box."""


@dataclass(frozen=True)
class Labeled:
    """Pictures (N, 3, S, S) float32 from 0 to 1. `nouns` (N, CELLS, CELLS) int64: 0 for nothing, else 1 + the noun in
    whose middle the cell is. `refused` (N, CELLS, CELLS) bool: in the middle of what is no thing to a person."""

    pictures: torch.Tensor
    nouns: torch.Tensor
    refused: torch.Tensor

    def drawn(self, num: int, generator: torch.Generator) -> Labeled:
        """So many of them by chance, half of the times as in a mirror."""
        chosen = torch.randint(len(self.pictures), (num,), generator=generator, device=generator.device)
        parts = [part[chosen] for part in (self.pictures, self.nouns, self.refused)]
        if torch.rand(1, generator=generator, device=generator.device) < 0.5:
            parts = [part.flip(-1) for part in parts]
        return Labeled(*parts)


def read(folder: Path, nouns: Sequence[str], inner: float, device: torch.device | str = "cpu") -> Labeled:
    """Labeled things. inner: how much of a box's width and height is its middle. Raises ValueError for a label that is
    neither yes nor no, and an unknown noun. Nouns of other worlds are background."""
    lines = read_lines(folder / labels.PROMPTS)
    pictures = labels.read(folder, range(len(lines)))
    edge, at = pictures.shape[-1], (torch.arange(CELLS) + 0.5) / CELLS
    known = {noun.name for noun in read_nouns()}
    target = torch.zeros(len(lines), CELLS, CELLS, dtype=torch.long)
    refused = torch.zeros_like(target, dtype=torch.bool)
    with (folder / THINGS).open(newline="") as file:
        for row in csv.DictReader(file):
            if row["shown"] not in labels.CALLED:
                raise ValueError(f"{folder / THINGS}: a thing is labeled {row['shown']!r}: write yes or no")
            if row["noun"] not in known:
                raise ValueError(f"{folder / THINGS}: nouns.txt has no {row['noun']!r}")
            left, top, right, bottom = (float(row[side]) / edge for side in ("left", "top", "right", "bottom"))
            across = (at - (left + right) / 2).abs() <= inner * (right - left) / 2
            inside = ((at - (top + bottom) / 2).abs() <= inner * (bottom - top) / 2)[:, None] & across
            number = int(row["picture"])
            if not labels.CALLED[row["shown"]]:
                refused[number] |= inside
            elif row["noun"] in nouns:
                target[number][inside] = 1 + nouns.index(row["noun"])
    return Labeled(pictures.to(device), target.to(device), refused.to(device))


def read_kept(world: World, inner: float, device: torch.device | str = "cpu") -> Labeled:
    """Labels of this world in the repository, as `read` gives them. The medium one has its own and the full one's."""
    own = next((name for name in WORLDS if world.nouns == World.named(name).nouns), "full")
    folders = [LABELED / name for name in {"medium": ("medium", "full")}.get(own, (own,))]
    parts = [read(folder, world.nouns, inner, device) for folder in folders]
    return Labeled(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Labeled)))


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
