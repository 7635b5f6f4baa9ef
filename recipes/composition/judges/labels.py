"""Judges against people: sheets of pictures to label without knowing what a judge says, and the agreement afterwards.

    python -m recipes.composition.evaluate --pictures PICTURES …
    python -m recipes.composition.judges.labels sheets PICTURES --output LABELS --count 200
    python -m recipes.composition.judges.labels agree PICTURES --labels LABELS/labels.csv

PICTURES is a folder of pictures.png, tiles in rows, and prompts.jsonl, a line of a prompt file for each. Sheets show
each picture with its number and prompt. labels.csv has a line `number,category,shown` for each; write yes or no under
`shown`: does the picture show all that the prompt says?

`labeled` holds a developer's labels, of pictures whose painter he did not know where several are mixed. Labels of
styles are left out, for he could not tell them:

- `base`, `awm`, `flow_grpo`: 81 pictures each, of the small world.
- `medium`, `medium_trained`: 98 of the medium world's first base, of 32,000 steps; 106 of its second one and of a
  trained model, mixed.
  `second_look.csv` has his labels of the same 106 from another day.
- `medium_flow_grpo`: 216 of 72 prompts, of the first base and of two models, mixed; patterns behind things show the
  base's, which `base.csv` names by their place in other folders.
- `medium_weighted`: the same prompts by four more, mixed but for Flow-GRPO's seed 1, which came later;
  `medium_weighted_others`: 150 other prompts, each by one of these four.
- `medium_longer`: the same prompts by a base of 52,000 steps and by Flow-GRPO's three seeds on it, mixed.
- `medium_unseen`: 108 prompts of `medium_unseen.jsonl`, in 40 steps, by that base and by a fourth seed, mixed.
- `full`, `full_trained`: 98 of the full world's base, and 98 of two trained models, mixed.

What a judge said of a picture he never knew. But he had seen what one said of others of the kind before he labeled
`medium`, `medium_trained`, that seed 1, `medium_weighted_others`, `medium_longer`, `medium_unseen` and `full_trained`.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from recipes.composition.judges.findings import answer
from recipes.composition.judges.service import look
from recipes.composition.make_prompts import read_lines

PROMPTS, TILES = "prompts.jsonl", "pictures.png"
TILES_A_ROW = 16
COLUMNS, ROWS = 7, 4
SHOWN_EDGE = 192
LINE_HEIGHT = 13
WRAP = 31
"""Characters of a prompt in a line."""
CALLED: Mapping[str, float] = {"yes": 1.0, "no": 0.0}


def save(folder: Path, pictures: torch.Tensor, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write pictures (N, 3, S, S) from 0 to 1, and the lines of prompts that they were painted for."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = (pictures.permute(0, 2, 3, 1) * 255).round().byte().cpu().numpy()
    edge = pixels.shape[1]
    tiles = Image.new("RGB", (TILES_A_ROW * edge, -(-len(pixels) // TILES_A_ROW) * edge))
    for number, picture in enumerate(pixels):
        tiles.paste(Image.fromarray(picture), _corner(number, edge))
    tiles.save(folder / TILES)
    (folder / PROMPTS).write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(folder: Path, numbers: Sequence[int]) -> torch.Tensor:
    """Pictures (N, 3, S, S) float32 from 0 to 1 of these numbers."""
    pixels = np.stack([np.asarray(picture) for picture in _cut(folder, numbers)])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255


def _cut(folder: Path, numbers: Sequence[int]) -> list[Image.Image]:
    tiles = Image.open(folder / TILES).convert("RGB")
    edge = tiles.width // TILES_A_ROW
    corners = [_corner(number, edge) for number in numbers]
    return [tiles.crop((left, top, left + edge, top + edge)) for left, top in corners]


def _corner(number: int, edge: int) -> tuple[int, int]:
    return number % TILES_A_ROW * edge, number // TILES_A_ROW * edge


def chosen(lines: Sequence[Mapping[str, Any]], count: int, seed: int) -> list[int]:
    """Numbers of about `count` pictures, equally many of each category, by chance."""
    by_category: dict[str, list[int]] = defaultdict(list)
    for number, line in enumerate(lines):
        by_category[line["metadata"]["tag"]].append(number)
    rng = random.Random(seed)
    share = -(-count // len(by_category))
    return sorted(number for ones in by_category.values() for number in rng.sample(ones, min(share, len(ones))))


def write_sheets(folder: Path, output: Path, count: int, seed: int = 1) -> None:
    """Write sheet-0.png, … and an unfilled labels.csv."""
    lines = read_lines(folder / PROMPTS)
    numbers = chosen(lines, count, seed)
    output.mkdir(parents=True, exist_ok=True)
    for place in range(0, len(numbers), COLUMNS * ROWS):
        part = numbers[place : place + COLUMNS * ROWS]
        _sheet(folder, part, lines).save(output / f"sheet-{place // (COLUMNS * ROWS)}.png")
    with (output / "labels.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("number", "category", "shown"))
        writer.writerows((number, lines[number]["metadata"]["tag"], "") for number in numbers)


def read_labels(path: Path) -> dict[int, float]:
    """1.0 or 0.0 by a picture's number. Raises ValueError for a label that is neither yes nor no."""
    labels = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["shown"] not in CALLED:
                raise ValueError(f"{path}: picture {row['number']} is labeled {row['shown']!r}: write yes or no")
            labels[int(row["number"])] = CALLED[row["shown"]]
    return labels


def agreement(labels: Mapping[int, float], verdicts: Mapping[int, float], lines: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: by category how many are labeled, how many of them yes, how many a judge accepts, and the share on
    which both agree."""
    rows: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for number, label in labels.items():
        for name in (lines[number]["metadata"]["tag"], "all"):
            rows[name].append((label, verdicts[number]))
    text = ["| category | labels | yes | judge says yes | agreement |", "|---|---|---|---|---|"]
    for name in sorted(rows, key=lambda name: (name == "all", name)):
        pairs = rows[name]
        agreed = sum(label == verdict for label, verdict in pairs) / len(pairs)
        said = [sum(column) for column in zip(*pairs, strict=True)]
        text.append(f"| {name} | {len(pairs)} | {said[0]:.0f} | {said[1]:.0f} | {agreed:.3f} |")
    return "\n".join(text)


def _sheet(folder: Path, numbers: Sequence[int], lines: Sequence[Mapping[str, Any]]) -> Image.Image:
    height = SHOWN_EDGE + 3 * LINE_HEIGHT + 4
    sheet = Image.new("RGB", (COLUMNS * (SHOWN_EDGE + 4), ROWS * height), "white")
    canvas, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=11)
    for place, (number, picture) in enumerate(zip(numbers, _cut(folder, numbers), strict=True)):
        left, top = place % COLUMNS * (SHOWN_EDGE + 4), place // COLUMNS * height
        sheet.paste(picture.resize((SHOWN_EDGE, SHOWN_EDGE), Image.Resampling.BICUBIC), (left, top))
        for row, text in enumerate(_wrapped(f"{number}: {lines[number]['prompt']}")):
            canvas.text((left + 1, top + SHOWN_EDGE + row * LINE_HEIGHT), text, fill="black", font=font)
    return sheet


def _wrapped(text: str) -> list[str]:
    rows = [""]
    for word in text.split():
        if rows[-1] and len(rows[-1]) + len(word) >= WRAP:
            rows.append("")
        rows[-1] = f"{rows[-1]} {word}".strip()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    sheets = commands.add_parser("sheets", help="write sheets and a file of labels to fill")
    sheets.add_argument("--output", type=Path, required=True)
    sheets.add_argument("--count", type=int, default=200)
    agree = commands.add_parser("agree", help="compare filled labels with both judges")
    agree.add_argument("--labels", type=Path, required=True)
    for command in (sheets, agree):
        command.add_argument("pictures", type=Path)
    options = parser.parse_args()
    if options.command == "sheets":
        write_sheets(options.pictures, options.output, options.count)
        return
    labels, lines = read_labels(options.labels), read_lines(options.pictures / PROMPTS)
    pictures = read(options.pictures, list(labels))
    for name in ("reward", "heldout"):
        found = look(name, pictures, [lines[number]["metadata"] for number in labels])
        verdicts = {
            number: answer(one, lines[number]["metadata"])["correct"] for number, one in zip(labels, found, strict=True)
        }
        print(f"\n{name}\n\n{agreement(labels, verdicts, lines)}")


if __name__ == "__main__":
    main()
